"""Scripts that run inside Redis: compare-and-set by seq, many keys per call, atomically.

Each is a file in `lua/`, which documents its keys and arguments; what several have in common is in
`lua/parts/`, and a line `-- include parts/NAME` stands for that file.

Versions are compared as text of fixed width in lower-case hexadecimal, because Lua's numbers are
doubles: sixteen digits of the seq, then `1` if the row has a place, `00` if it exists without a
place, and `0` if it is deleted. Only digits, so that every locale orders them the same way.

A call that writes to existing data has a guard (`lua/parts/guard.lua`): the follower's own key or,
in a cluster, the slot's sentinel. If it is missing or has another token, this is not the data that
was opened: `LOST`. If readers see another generation, or a switch is at another step: `SWITCHED`.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Final

TOKEN_LENGTH: Final = 16  # a sentinel starts with this many characters; its step follows

_INCLUDE: Final = re.compile(r"^-- include (.+)\n", re.MULTILINE)
_COMMENT: Final = re.compile(r"^ *--.*\n", re.MULTILINE)


def _text(name: str) -> str:
    """Return a script with the parts that it includes, without comments: some are sent often."""
    text = (files("lockstep.sinks.redis") / f"lua/{name}.lua").read_text("utf-8")
    return _COMMENT.sub("", _INCLUDE.sub(lambda found: _text(found[1]), text))


ADD_BUCKETS: Final = _text("add_buckets")
BEGIN: Final = _text("begin")
ANNOUNCE: Final = _text("announce")
RAISE_FLOOR: Final = _text("raise_floor")
SET_ONCE: Final = _text("set_once")
APPLY: Final = _text("apply")
DELETE_BELOW_FLOOR: Final = _text("delete_below_floor")
DELETE_ORPHANS: Final = _text("delete_orphans")
ADVANCE_SWITCH: Final = _text("advance_switch")
MOVE_VALUES: Final = _text("move_values")
RAISE_SENTINEL: Final = _text("raise_sentinel")
RAISE_SEQ: Final = _text("raise_seq")
CREATE_GENERATION: Final = _text("create_generation")
DELETE_ROWS: Final = _text("delete_rows")
