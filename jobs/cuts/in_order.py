"""Reduce a cut's events of one table by parsing them all, in `seq` order. Pure.

Does what `jobs.cuts.reduce.newest` does, for any cut. A value that was not sent is taken from the
previous row, under whichever key it had; if that row is not in the cut it is read from the store,
by its key there. A value that neither has is left out of the row: it is unknown, not null, and for
a store of complete rows `unchanged` names it.

A cut in which a row's key changes from 1 to 5, and its column `big` is never sent (`-`):

    seq  op  key  row                     after it
    7    u   1    id 1, n 2, big -        1 has n 2, and big from the store's row 1
    8    d   1                            1 is deleted; a create may follow that belongs to it
    9    c   5    id 5, n 2, big -        it does (`halves`): 5 takes big from where 1 had it
    10   u   5    id 5, n 3, big -        5 has n 3, and big still from the store's row 1

Two changes remain: 1 is deleted with seq 8, and 5 has n 3 with seq 10 and the big of the store's
row 1, which is read before it is deleted (`taken` of 5 names 1). tests/unit/test_in_order.py runs
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from msgspec import Raw

from lockstep.jobs.cuts.reduce import (
    NULL,
    Bounds,
    CutEvent,
    Events,
    Reduced,
    Rows,
    decode_row,
    encode_row,
    lsn_of,
    parsed,
)
from lockstep.sinks.contract import Change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from cdc.log.dead_letters import Pointer


class _Stored(NamedTuple):
    """A placeholder: the value is in the store, in the row of this key."""

    key: bytes


@dataclass(slots=True)
class _Pending:
    """A change while its cut is being folded."""

    key: bytes | None
    event: CutEvent
    row: dict[str, Raw | _Stored] | None


Letter: TypeAlias = "Callable[[Pointer], bytes]"


def in_order(
    partitions: Iterable[Events],
    bounds: Bounds,
    *,
    letter: Letter,
    rows: Rows,
    complete_rows: bool = False,
    every: bool = False,
) -> Reduced:
    """Return the same as `newest`, for any cut.

    `letter` returns a dead letter's event, and is called in seq order; `rows` returns the store's
    rows as they are before the cut. With `complete_rows` only unknown columns stay `unchanged`.
    With `every` all changes are returned, in seq order, truncates included; for a table without a
    key, all after the last truncate.
    """
    events = [
        (key, parsed(value))
        for keys, values in partitions
        for key, value in zip(keys, values, strict=True)
    ]
    events.sort(key=lambda each: each[1].source.seq)
    folding = _Folding(every=every)
    for key, event in events:
        bounds.check(event.source.seq)
        if event.source.dead is not None and (event.op != "d" or every or key is None):
            pointer = event
            event = parsed(letter(event.source.dead))  # noqa: PLW2901 - in its pointer's place
            assert event.source.seq == pointer.source.seq
        folding.add(key, event)
    return folding.finish(rows, complete_rows=complete_rows)


class _Folding:
    """Folds a table's events one by one, in seq order."""

    def __init__(self, *, every: bool) -> None:
        self._every = every
        self._truncated: int | None = None
        self._rows: dict[bytes, _Pending] = {}
        self._all: list[_Pending] = []
        # The event, key and row of the previous delete, whose create may follow.
        self._moved: tuple[CutEvent, bytes, _Pending | None] | None = None
        self._schema_ids: set[int] = set()

    def add(self, key: bytes | None, event: CutEvent) -> None:
        self._schema_ids.add(event.source.schema_id)
        moved, self._moved = self._moved, None
        pending = _Pending(key, event, None)
        if event.op == "t":
            self._truncate(pending)
        elif key is None:
            self._all.append(pending)
            if event.op != "d":
                pending.row = {**decode_row(event.after)}
                self._complete_keyless(pending)
        else:
            before = self._rows.get(key)
            if event.op == "d":
                self._moved = (event, key, before)
            else:
                pending.row = {**decode_row(event.after)}
                if event.op == "c" and moved and halves(moved[0], event):
                    _, key_before, before = moved
                    self._complete(pending, key_before, before)
                else:
                    self._complete(pending, key, before)
            self._rows[key] = pending
            if self._every:
                self._all.append(pending)

    def finish(self, rows: Rows, *, complete_rows: bool) -> Reduced:
        changes = self._all or list(self._rows.values())
        changes.sort(key=attrgetter("event.source.seq"))
        wanted = {
            value.key: None
            for each in changes
            for value in (each.row or {}).values()
            if isinstance(value, _Stored) and (complete_rows or not _own(value, each))
        }
        ids = frozenset(self._schema_ids)
        found = rows(list(wanted), ids) if wanted else {}
        stored = {key: decode_row(row) for key, row in found.items()}
        return Reduced(
            [_change(each, stored, complete_rows=complete_rows) for each in changes],
            self._truncated,
            ids,
            {each.key: keys for each in changes if each.key and (keys := _taken(each))},
        )

    def _truncate(self, pending: _Pending) -> None:
        if self._every:
            self._all.append(pending)
        else:
            self._all.clear()
        self._rows.clear()
        self._truncated = pending.event.source.seq

    def _complete(self, pending: _Pending, key: bytes, before: _Pending | None) -> None:
        """Take the columns that were not sent from the previous row, which `key` had."""
        assert pending.row is not None
        for name in pending.event.source.unchanged:
            if before is None and self._truncated is None:
                pending.row[name] = _Stored(key)
            elif before is not None and before.row is not None and name in before.row:
                pending.row[name] = before.row[name]
            else:
                pending.row.pop(name, None)  # it is unknown, not null

    @staticmethod
    def _complete_keyless(pending: _Pending) -> None:
        assert pending.row is not None
        event = pending.event
        old = {} if bytes(event.before) == NULL else decode_row(event.before)
        for name in event.source.unchanged:
            pending.row.pop(name, None)
            if name in old:
                pending.row[name] = old[name]


def halves(delete: CutEvent, create: CutEvent) -> bool:
    """Return whether the two events are one update that changed the key."""
    one, other = delete.source, create.source
    return (one.seq + 1, one.ordinal, one.commit_lsn) == (
        other.seq,
        other.ordinal,
        other.commit_lsn,
    )


def _taken(pending: _Pending) -> set[bytes]:
    """Return the other keys from whose stored rows it takes values."""
    values = (pending.row or {}).values()
    return {each.key for each in values if isinstance(each, _Stored)} - {pending.key or b""}


def _own(value: _Stored, pending: _Pending) -> bool:
    """Return whether the store can leave the value as it is."""
    return value.key == pending.key and pending.event.op != "c"


_PLACEHOLDER: Final = Raw(b'"__debezium_unavailable_value"')


def _change(
    pending: _Pending, stored: Mapping[bytes, dict[str, Raw]], *, complete_rows: bool
) -> Change:
    event, source = pending.event, pending.event.source
    row, unchanged = pending.row, list[str]()
    before, encoded = bytes(event.before), None
    if row is not None:
        known: dict[str, Raw] = {}
        for name, value in row.items():
            if not isinstance(value, _Stored):
                known[name] = value
            elif _own(value, pending) and not complete_rows:
                known[name] = _PLACEHOLDER
                unchanged.append(name)
            elif name in stored.get(value.key, ()):
                known[name] = stored[value.key][name]
        encoded = encode_row(known)
        if complete_rows:
            unchanged = [name for name in source.unchanged if name not in known]
    return Change(
        pending.key,
        source.seq,
        encoded,
        source.schema_id,
        lsn_of(source.commit_lsn),
        source.ts_us,
        tuple(unchanged),
        None if before == NULL else before,
        event.op,
    )
