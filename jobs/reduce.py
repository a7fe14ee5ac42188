"""Reduce a cut's events of one table to what becomes of each key. Pure; the hot path.

Two ways with one result. `newest` takes each partition's events as they stand: a key's last event
there is its newest, so no other is even parsed, but where columns are `unchanged`. What it cannot
do it leaves to `in_order`, which parses all and goes by `seq`: a changed key whose columns were not
sent, dead letters, tables of which every change is wanted, tables without a key, a new epoch.

Rows are cut out of their events as the bytes that they are there. Of a value that is not in the cut
`in_order` asks the store, by the key that the row had before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Raw

from cdc.errors import ConfigError, GapError
from cdc.events import LSN
from cdc.log.letters import Pointer
from sinks.contract import Change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_NULL: Final = b"null"

# Keys and values of one partition's events, in the order of the log; no tombstones.
Events: TypeAlias = "tuple[Sequence[bytes | None], Sequence[bytes]]"
Row: TypeAlias = "dict[str, Raw]"


class Source(msgspec.Struct, gc=False):
    """What is read of an event's `source`."""

    seq: int
    commit_lsn: str
    ordinal: int
    schema_id: int
    ts_us: int
    unchanged: tuple[str, ...] = ()
    dead: Pointer | None = None


class Event(msgspec.Struct, gc=False):
    """What is read of a change event."""

    op: str
    source: Source
    before: Raw = Raw(_NULL)
    after: Raw = Raw(_NULL)


class Bounds(NamedTuple):
    """Which events a cut may hold: those with a seq above the first and up to the second."""

    above: int
    upto: int

    def check(self, seq: int) -> None:
        """Raise GapError where the log is not the one that its frontiers speak of."""
        if not self.above < seq <= self.upto:
            raise GapError(
                f"seq {seq} stands in the cut of seq {self.above + 1} to {self.upto}",
                hint="a topic was deleted and created again, or something else writes to it: see"
                " `cdc doctor`, then `cdc rebuild` the follower",
            )


class NeedsOrderError(Exception):
    """This cut of the table is for `in_order`."""


class Reduced(NamedTuple):
    """What a cut has done to a table; `schema_ids` are all that its events have."""

    changes: list[Change]
    truncated: int | None
    schema_ids: frozenset[int]


_decode: Final = msgspec.json.Decoder(Event).decode
_decode_row: Final = msgspec.json.Decoder(dict[str, Raw]).decode
_encode: Final = msgspec.json.Encoder().encode


def parsed(value: bytes) -> Event:
    """Return an event; raise ConfigError where it is none."""
    try:
        return _decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"a data topic holds a record that is no change event: {error}",
            hint="something else writes to it; give the pipeline a log.prefix of its own",
        ) from error


def newest(partitions: Iterable[Events], bounds: Bounds) -> Reduced:
    """Return the newest change of every key; raise NeedsOrderError where that is not enough."""
    partitions = list(partitions)
    last: dict[bytes | None, bytes] = {}
    for keys, values in partitions:
        last.update(zip(keys, values, strict=True))
    floor, schema_ids = 0, set[int]()
    if last.pop(None, None) is not None:
        floor, schema_ids = _truncated(partitions)
        bounds.check(floor)
    try:
        changes, gaps = _changes(last, bounds, floor)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        for value in last.values():
            parsed(value)
        raise
    if gaps:
        _fill(changes, gaps, partitions, floor)
    schema_ids.update([change.schema_id for change in changes])
    return Reduced(changes, floor or None, frozenset(schema_ids))


def _changes(
    last: Mapping[bytes | None, bytes], bounds: Bounds, floor: int
) -> tuple[list[Change], dict[bytes, int]]:
    """Return the changes that stand, and by key the places of those with columns unchanged."""
    changes: list[Change] = []
    gaps: dict[bytes, int] = {}
    above, upto, decode = *bounds, _decode
    for key, value in last.items():
        event = decode(value)
        source = event.source
        seq = source.seq
        if not above < seq <= upto:
            bounds.check(seq)
        if seq < floor:
            continue
        op = event.op
        if source.dead is not None:
            raise NeedsOrderError
        if source.unchanged:
            assert key is not None
            gaps[key] = len(changes)
        before = bytes(event.before)
        changes.append(
            Change(
                key,
                seq,
                None if op == "d" else bytes(event.after),
                source.schema_id,
                _lsn(source.commit_lsn),
                source.ts_us,
                source.unchanged,
                None if before == _NULL else before,
                op,
            )
        )
    return changes, gaps


def _truncated(partitions: list[Events]) -> tuple[int, set[int]]:
    """Return the newest truncate's seq, and the versions that truncates have."""
    loose = [
        parsed(value)
        for keys, values in partitions
        for key, value in zip(keys, values, strict=True)
        if key is None
    ]
    if any(event.op != "t" for event in loose):
        raise NeedsOrderError  # a table without a key
    return max(event.source.seq for event in loose), {event.source.schema_id for event in loose}


def _fill(
    changes: list[Change], gaps: dict[bytes, int], partitions: list[Events], floor: int
) -> None:
    """Take what an update left unchanged from the events of its key before it."""
    chains: dict[bytes, list[bytes]] = {key: [] for key in gaps}
    for keys, values in partitions:
        for key, value in zip(keys, values, strict=True):
            if key is not None and key in chains:
                chains[key].append(value)
    for key, chain in chains.items():
        at = gaps[key]
        changes[at] = _filled(changes[at], chain[:-1], floor)


def _filled(change: Change, chain: list[bytes], floor: int) -> Change:
    if change.op == "c":
        raise NeedsOrderError
    missing, taken = set(change.unchanged), dict[str, Raw]()
    while missing and chain:
        event = parsed(chain.pop())
        source = event.source
        if source.seq < floor or event.op == "d":
            break
        if source.dead is not None or (event.op == "c" and source.unchanged):
            raise NeedsOrderError
        row = _decode_row(event.after)
        for name in missing & row.keys() - set(source.unchanged):
            taken[name] = row[name]
            missing.discard(name)
        if event.op != "u":
            break
    if not taken:
        return change
    assert change.row is not None
    return change._replace(
        row=_encode(_decode_row(change.row) | taken),
        unchanged=tuple(name for name in change.unchanged if name in missing),
    )


@lru_cache(4_096)
def _lsn(text: str) -> int:
    return int(LSN.parse(text))


# -- in order -----------------------------------------------------------------------------------


class _Stored(NamedTuple):
    """In a value's place: it is the store's, in the row that this key had there."""

    key: bytes


@dataclass(slots=True)
class _Pending:
    """A change while the cut is folded."""

    key: bytes | None
    event: Event
    row: dict[str, Raw | _Stored] | None


Whole: TypeAlias = "Callable[[Pointer], bytes]"
# The store's rows of these keys; of a table whose events have these versions.
Rows: TypeAlias = "Callable[[list[bytes], frozenset[int]], Mapping[bytes, bytes]]"


def in_order(
    partitions: Iterable[Events],
    bounds: Bounds,
    *,
    letter: Whole,
    rows: Rows,
    whole_rows: bool = False,
    every: bool = False,
) -> Reduced:
    """Return what `newest` does, for any cut.

    `letter` returns a dead letter's event, asked for in seq order; `rows` the store's rows, as they
    are before the cut. With `whole_rows` nothing is left `unchanged`. With `every` all changes are
    returned, in seq order, truncates among them; of a table without a key all behind the last one.
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
            told = event
            event = parsed(letter(event.source.dead))  # noqa: PLW2901 - in its pointer's place
            assert event.source.seq == told.source.seq
        folding.add(key, event)
    return folding.finish(rows, whole_rows=whole_rows)


class _Folding:
    """A table's events one by one, in seq order."""

    def __init__(self, *, every: bool) -> None:
        self._every = every
        self._truncated: int | None = None
        self._rows: dict[bytes, _Pending] = {}
        self._all: list[_Pending] = []
        # The key and the row of the delete just before, whose create may follow.
        self._moved: tuple[Event, bytes, _Pending | None] | None = None
        self._schema_ids: set[int] = set()

    def add(self, key: bytes | None, event: Event) -> None:
        self._schema_ids.add(event.source.schema_id)
        moved, self._moved = self._moved, None
        pending = _Pending(key, event, None)
        if event.op == "t":
            self._truncate(pending)
        elif key is None:
            self._all.append(pending)
            if event.op != "d":
                pending.row = {**_decode_row(event.after)}
                self._complete_keyless(pending)
        else:
            before = self._rows.get(key)
            if event.op == "d":
                self._moved = (event, key, before)
            else:
                pending.row = {**_decode_row(event.after)}
                if event.op == "c" and moved and _halves(moved[0], event):
                    _, key_before, before = moved
                    self._complete(pending, key_before, before)
                else:
                    self._complete(pending, key, before)
            self._rows[key] = pending
            if self._every:
                self._all.append(pending)

    def finish(self, rows: Rows, *, whole_rows: bool) -> Reduced:
        changes = self._all or list(self._rows.values())
        changes.sort(key=attrgetter("event.source.seq"))
        asked = {
            value.key: None
            for each in changes
            for value in (each.row or {}).values()
            if isinstance(value, _Stored) and (whole_rows or not _own(value, each))
        }
        ids = frozenset(self._schema_ids)
        found = rows(list(asked), ids) if asked else {}
        stored = {key: _decode_row(row) for key, row in found.items()}
        return Reduced(
            [_change(each, stored, whole_rows=whole_rows) for each in changes], self._truncated, ids
        )

    def _truncate(self, pending: _Pending) -> None:
        if self._every:
            self._all.append(pending)
        else:
            self._all.clear()
        self._rows.clear()
        self._truncated = pending.event.source.seq

    def _complete(self, pending: _Pending, key: bytes, before: _Pending | None) -> None:
        """Take what was not sent from the row before, which `key` had."""
        assert pending.row is not None
        for name in pending.event.source.unchanged:
            if before is None and self._truncated is None:
                pending.row[name] = _Stored(key)
            elif before is not None and before.row is not None and name in before.row:
                pending.row[name] = before.row[name]
            else:
                pending.row.pop(name, None)  # nobody has told it yet: it is not null, but unknown

    @staticmethod
    def _complete_keyless(pending: _Pending) -> None:
        assert pending.row is not None
        event = pending.event
        old = {} if bytes(event.before) == _NULL else _decode_row(event.before)
        for name in event.source.unchanged:
            pending.row.pop(name, None)
            if name in old:
                pending.row[name] = old[name]


def _halves(delete: Event, create: Event) -> bool:
    """Return whether the two are one change of a key."""
    one, other = delete.source, create.source
    return (one.seq + 1, one.ordinal, one.commit_lsn) == (
        other.seq,
        other.ordinal,
        other.commit_lsn,
    )


def _own(value: _Stored, pending: _Pending) -> bool:
    """Return whether the store can leave the value as it is."""
    return value.key == pending.key and pending.event.op != "c"


_PLACEHOLDER: Final = Raw(b'"__debezium_unavailable_value"')


def _change(pending: _Pending, stored: Mapping[bytes, Row], *, whole_rows: bool) -> Change:
    event, source = pending.event, pending.event.source
    row, unchanged = pending.row, list[str]()
    before, told = bytes(event.before), None
    if row is not None:
        whole: Row = {}
        for name, value in row.items():
            if not isinstance(value, _Stored):
                whole[name] = value
            elif _own(value, pending) and not whole_rows:
                whole[name] = _PLACEHOLDER
                unchanged.append(name)
            elif name in stored.get(value.key, ()):
                whole[name] = stored[value.key][name]
        told = _encode(whole)
    return Change(
        pending.key,
        source.seq,
        told,
        source.schema_id,
        _lsn(source.commit_lsn),
        source.ts_us,
        tuple(unchanged),
        None if before == _NULL else before,
        event.op,
    )


def completed(reduced: Reduced, rows: Rows) -> Reduced:
    """Return the changes with nothing left `unchanged`: as the store has it."""
    changes = reduced.changes
    asked = [change.key for change in changes if change.unchanged and change.key is not None]
    if not asked:
        return reduced
    stored = rows(asked, reduced.schema_ids)
    whole = [_completed(change, stored) if change.unchanged else change for change in changes]
    return reduced._replace(changes=whole)


def _completed(change: Change, stored: Mapping[bytes, bytes]) -> Change:
    assert change.key is not None
    assert change.row is not None
    row = _decode_row(change.row)
    old = _decode_row(stored[change.key]) if change.key in stored else {}
    for name in change.unchanged:
        if name in old:
            row[name] = old[name]
        else:
            row.pop(name, None)
    return change._replace(row=_encode(row), unchanged=())
