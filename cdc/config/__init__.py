"""The configuration: one YAML file, checked once, with the environment above it.

What is written wins over what is default, and the environment over the file. Every value is checked
before anything connects, every finding is told at once, and each names its place. The modules:
`model` what can be set, `layers` where it is read from, `check` and `rules` what is refused,
`selection` what of each table is captured, `snapshot` and `delta` their sections, `secrecy` what of
it is secret, `show` how it is shown without that.
"""

from __future__ import annotations

from cdc.config.check import Effective, load, read
from cdc.config.model import Batch, Config, Http, Log, Mask, Source, TableRule
from cdc.config.patterns import TablePattern
from cdc.config.secrecy import without_passwords
from cdc.config.selection import Selection, TableSelection
from cdc.config.show import show
from cdc.config.snapshot import Snapshot

__all__ = [
    "Batch",
    "Config",
    "Effective",
    "Http",
    "Log",
    "Mask",
    "Selection",
    "Snapshot",
    "Source",
    "TablePattern",
    "TableRule",
    "TableSelection",
    "load",
    "read",
    "show",
    "without_passwords",
]
