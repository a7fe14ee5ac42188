"""The configuration: one YAML file, checked once, overridden by the environment.

The file overrides the defaults, and the environment overrides the file. Every value is checked
before anything connects, all errors are reported at once, and each names its place. The modules:
`model` what can be set, with a module for each larger section; `schema` the tree of names and types
that the others walk; `layers` where values are read from, `check` how they are built and what is
refused, `selection` what is captured of each table, `secrecy` what is secret, `show` how the rest
is shown.
"""

from __future__ import annotations

from cdc.config.check import Effective, load, read
from cdc.config.model import BatchLimits, Config, Http, Log, Source
from cdc.config.patterns import TablePattern
from cdc.config.secrecy import without_passwords
from cdc.config.selection import Selection, TableSelection
from cdc.config.show import show
from cdc.config.snapshot import Snapshot
from cdc.config.tables import Mask, TableRule

__all__ = [
    "BatchLimits",
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
