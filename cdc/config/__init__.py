"""The configuration: one YAML file, checked once, overridden by the environment.

The file overrides the defaults, and the environment overrides the file. Every value is checked
before anything connects, all errors are reported at once, and each names its place. The modules:
`model` what can be set, `layers` where it is read from, `check` and `rules` what is refused,
`selection` what is captured of each table, `snapshot` and `delta` their sections, `secrecy` what is
secret, `show` how the rest is shown.
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
