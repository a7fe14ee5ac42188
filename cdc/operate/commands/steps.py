"""The lines that `cdc setup` and `cdc teardown` print about what they do."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Did(Enum):
    DONE = "done"  # changed something
    LEFT = "left"  # found it as it should be
    WARN = "warn"  # a warning
    PROGRESS = "progress"  # part of a long step, to show progress


class CommandStep(NamedTuple):
    did: Did
    what: str
