"""The account that `cdc setup` and `cdc teardown` give of what they do, line by line."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Did(Enum):
    """What a step did."""

    DONE = "done"  # changed something
    LEFT = "left"  # found it as it should be
    WARN = "warn"  # something to know before going on
    PROGRESS = "progress"  # part of a long step, for people who wait


class Step(NamedTuple):
    """One line of the account."""

    did: Did
    what: str
