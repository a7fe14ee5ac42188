"""How often Python looks for garbage, in a follower and in the tasks of its cuts."""

from __future__ import annotations

import gc
from typing import Final

# In objects; Python's own is 700.
_COLLECTED_AFTER: Final = 100_000


def collect_seldom() -> None:
    """Look for garbage seldom.

    A cut makes a million tuples that live until its end: each collection would walk them, for
    nothing.
    """
    gc.set_threshold(_COLLECTED_AFTER, *gc.get_threshold()[1:])
