"""A cut's changes to one mirror, gathered from all the parts in which they are passed.

Nothing of a cut is in the table until its commit, so rows that another store would read back from
the table are read from here: a later part replaces earlier changes of its keys, and columns that it
leaves unchanged keep the earlier values.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from lockstep.sinks.contract import Changes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.sinks.contract import Altered, Change, Version

_decode: Final = msgspec.json.Decoder(dict[str, Raw]).decode
_encode: Final = msgspec.json.Encoder().encode


class GatheredChanges:
    """A cut's changes of one table."""

    def __init__(self, *, history: bool) -> None:
        self._history = history
        self._versions: dict[int, Version] = {}
        self._every: list[Change] = []  # with a history, or without a key
        self._newest: dict[bytes, Change] = {}
        self._truncated: int | None = None

    def add(self, changes: Changes) -> None:
        """Add a part; for each key, its changes follow those of earlier parts by seq."""
        self._versions |= {version.schema_id: version for version in changes.versions}
        if changes.truncated is not None:
            self._truncate(changes.truncated)
        if self._history:
            self._every += changes.changes
        newest = self._newest
        for change in changes.changes:
            if change.key is not None:
                before = newest.get(change.key)
                if before is None:
                    newest[change.key] = change
                elif before.seq < change.seq:
                    newest[change.key] = over(change, before)
            elif change.op == "t":  # in a history
                newest.clear()
            else:
                self._every.append(change)

    def alter(self, altered: Altered) -> None:
        """Give all changes so far the columns that the table has from here on."""
        self._versions = {altered.version.schema_id: altered.version}
        self._every = [altered.change(change) for change in self._every]
        newest = map(altered.change, self._newest.values())
        self._newest = {change.key: change for change in newest if change.key is not None}

    def _truncate(self, seq: int) -> None:
        """Drop changes below `seq`; a history keeps the versions that its truncates end."""
        self._truncated = max(seq, self._truncated or 0)
        self._newest = {key: each for key, each in self._newest.items() if each.seq > seq}
        if not self._history:
            self._every = [each for each in self._every if each.seq > seq]

    def changes(self) -> Changes:
        """Return all changes as one."""
        versions = tuple(self._versions[each] for each in sorted(self._versions))
        every = self._every if self._history else [*self._every, *self._newest.values()]
        return Changes(versions, every, self._truncated)

    def rows(self, keys: Sequence[bytes], stored: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
        """Return the rows of these keys; `stored` has those in the table."""
        if self._truncated is not None:
            stored = {}
        found = {key: self._row(key, stored.get(key)) for key in keys}
        return {key: row for key, row in found.items() if row is not None}

    def _row(self, key: bytes, stored: bytes | None) -> bytes | None:
        change = self._newest.get(key)
        if change is None:
            return stored
        return _completed(change, stored).row if change.row else None


def over(change: Change, before: Change) -> Change:
    """Return a change with unchanged columns filled from the one before it."""
    if not change.unchanged or change.row is None:
        return change
    filled = _completed(change, before.row)
    kept = tuple(name for name in change.unchanged if name in before.unchanged)
    return filled._replace(unchanged=kept)


def _completed(change: Change, row: bytes | None) -> Change:
    """Return a change with nothing unchanged: columns that `row` lacks are unknown and left out."""
    if not change.unchanged:
        return change
    assert change.row is not None, "a row's columns are unchanged"
    new, old = _decode(change.row), _decode(row) if row else {}
    for name in change.unchanged:
        new.pop(name, None)
        if name in old:
            new[name] = old[name]
    return change._replace(row=_encode(new), unchanged=())
