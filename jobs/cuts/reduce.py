"""Reduce a cut's events of one table to one change per key. Pure; the hot path.

There are two ways with the same result, and one order: `seq`. Neither depends on partition numbers
or on the order of its input: if an epoch began in the cut, a key's events are in several
partitions. `newest` keeps the event with the highest seq of each key, and reads the others only if
columns are `unchanged`. The cases that it cannot handle go to `jobs.cuts.in_order`, which folds all
events: a changed key whose columns were not sent, dead letters, tables with a history of every
change, tables without a key.

Rows are taken from their events as raw bytes.
"""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Raw

from cdc.errors import (
    ConfigError,
    GapError,
    unquoted,
)
from cdc.events import LSN
from cdc.log.dead_letters import Pointer
from lockstep.sinks.contract import Change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

NULL: Final = b"null"

# Keys and values of events, in any order; no tombstones.
Events: TypeAlias = "tuple[Sequence[bytes | None], Sequence[bytes]]"
# Returns the store's rows of these keys, in a table whose events have these versions.
Rows: TypeAlias = "Callable[[list[bytes], frozenset[int]], Mapping[bytes, bytes]]"


class CutSource(msgspec.Struct, gc=False):
    """The fields that are read from an event's `source`."""

    seq: int
    commit_lsn: str
    ordinal: int
    schema_id: int
    ts_us: int
    epoch: int = 0
    unchanged: tuple[str, ...] = ()
    dead: Pointer | None = None


class CutEvent(msgspec.Struct, gc=False):
    """The fields that are read from a change event."""

    op: str
    source: CutSource
    before: Raw = Raw(NULL)
    after: Raw = Raw(NULL)


class Bounds(NamedTuple):
    """The seqs of a cut's events: above the first and up to the second."""

    above: int
    upto: int

    def check(self, seq: int) -> None:
        """Raise GapError if the seq is outside: the log does not match its frontiers."""
        if not self.above < seq <= self.upto:
            raise GapError(
                f"seq {seq} is in the cut of seq {self.above + 1} to {self.upto}",
                hint="a topic was deleted and recreated, or something else writes to it: see"
                " `cdc doctor`, then `cdc rebuild` the follower",
            )


class NeedsOrderError(Exception):
    """This cut of the table is for `in_order`."""


class Reduced(NamedTuple):
    """A cut's changes to a table; `schema_ids` has all that occur in its events.

    `taken` maps a row's key to the other keys from whose stored rows it takes values.
    """

    changes: list[Change]
    truncated: int | None
    schema_ids: frozenset[int]
    taken: Mapping[bytes, AbstractSet[bytes]] = MappingProxyType({})


E = TypeVar("E", bound=CutEvent)
_decode: Final = msgspec.json.Decoder(CutEvent).decode
decode_row: Final = msgspec.json.Decoder(dict[str, Raw]).decode
encode_row: Final = msgspec.json.Encoder().encode


def parsed(value: bytes) -> CutEvent:
    """Return an event; raise ConfigError if the value is not one."""
    return decoded(_decode, value)


def decoded(decode: Callable[[bytes], E], value: bytes) -> E:
    """Return what a decoder of events makes of a value; raise ConfigError if it is not one."""
    try:
        return decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"a data topic has a record that is not a change event: {unquoted(error)}",
            hint="something else writes to it; give the pipeline its own log.prefix",
        ) from error


def newest(batches: Iterable[Events], bounds: Bounds) -> Reduced:
    """Return the newest change of every key; raise NeedsOrderError if that is not enough.

    `batches` has all of the table's events in the cut, each a partition or a piece of one. The
    result does not depend on their order.
    """
    batches = list(batches)
    last, loose = _last(batches, bounds)
    floor, schema_ids = 0, set[int]()
    if loose:
        if any(event.op != "t" for event in loose):
            raise NeedsOrderError  # a table without a key
        floor = max(event.source.seq for event in loose)
        schema_ids = {event.source.schema_id for event in loose}
    changes, gaps = _changes(last, floor)
    if gaps:
        _fill(changes, gaps, batches, floor)
    schema_ids.update([change.schema_id for change in changes])
    return Reduced(changes, floor or None, frozenset(schema_ids))


def _last(batches: list[Events], bounds: Bounds) -> tuple[dict[bytes, CutEvent], list[CutEvent]]:
    """Return the event with the highest seq of each key, and all events without a key."""
    last: dict[bytes, CutEvent] = {}
    loose: list[CutEvent] = []
    above, upto, decode = *bounds, _decode
    value = b""
    try:
        for keys, values in batches:
            for key, value in zip(keys, values, strict=True):
                event = decode(value)
                seq = event.source.seq
                if not above < seq <= upto:
                    bounds.check(seq)
                if key is None:
                    loose.append(event)
                    continue
                other = last.get(key)
                if other is None or other.source.seq < seq:
                    last[key] = event
    except (msgspec.MsgspecError, UnicodeDecodeError):
        parsed(value)
        raise
    return last, loose


def _changes(last: Mapping[bytes, CutEvent], floor: int) -> tuple[list[Change], dict[bytes, int]]:
    """Return the remaining changes, and the indexes, by key, of those with unchanged columns."""
    changes: list[Change] = []
    gaps: dict[bytes, int] = {}
    new = tuple.__new__  # a NamedTuple's own takes three times as long
    for key, event in last.items():
        source = event.source
        seq = source.seq
        if seq < floor:
            continue
        op = event.op
        if source.dead is not None:
            raise NeedsOrderError
        if source.unchanged:
            gaps[key] = len(changes)
        before = bytes(event.before)
        fields = (
            key,
            seq,
            None if op == "d" else bytes(event.after),
            source.schema_id,
            lsn_of(source.commit_lsn),
            source.ts_us,
            source.unchanged,
            None if before == NULL else before,
            op,
        )
        changes.append(new(Change, fields))
    return changes, gaps


def _fill(changes: list[Change], gaps: dict[bytes, int], batches: list[Events], floor: int) -> None:
    """Fill in an update's unchanged columns from earlier events of its key, by seq."""
    chains: dict[bytes, list[CutEvent]] = {key: [] for key in gaps}
    for keys, values in batches:
        for key, value in zip(keys, values, strict=True):
            if key is not None and key in chains:
                chains[key].append(parsed(value))
    for key, chain in chains.items():
        at = gaps[key]
        chain.sort(key=_seq_of)
        changes[at] = _filled(changes[at], chain[:-1], floor)


def _seq_of(event: CutEvent) -> int:
    return event.source.seq


def _filled(change: Change, chain: list[CutEvent], floor: int) -> Change:
    """Return the change filled from the earlier events in `chain`, whose last is the newest."""
    if change.op == "c":
        raise NeedsOrderError
    missing, taken = set(change.unchanged), dict[str, Raw]()
    while missing and chain:
        event = chain.pop()
        source = event.source
        if source.seq < floor or event.op == "d":
            break
        if source.dead is not None or (event.op == "c" and source.unchanged):
            raise NeedsOrderError
        row = decode_row(event.after)
        for name in missing & row.keys() - set(source.unchanged):
            taken[name] = row[name]
            missing.discard(name)
        if event.op != "u":
            break
    if not taken:
        return change
    assert change.row is not None
    return change._replace(
        row=encode_row(decode_row(change.row) | taken),
        unchanged=tuple(name for name in change.unchanged if name in missing),
    )


@lru_cache(4_096)
def lsn_of(text: str) -> int:
    return int(LSN.parse(text))


def completed(reduced: Reduced, rows: Rows) -> Reduced:
    """Return the changes with the `unchanged` columns filled from the store.

    A value that the store does not have either is unknown: left out of the row, and named in
    `unchanged`.
    """
    changes = reduced.changes
    wanted = [change.key for change in changes if change.unchanged and change.key is not None]
    if not wanted:
        return reduced
    stored = rows(wanted, reduced.schema_ids)
    changes = [_completed(change, stored) if change.unchanged else change for change in changes]
    return reduced._replace(changes=changes)


def _completed(change: Change, stored: Mapping[bytes, bytes]) -> Change:
    assert change.key is not None
    assert change.row is not None
    row = decode_row(change.row)
    old = decode_row(stored[change.key]) if change.key in stored else {}
    unknown = tuple(name for name in change.unchanged if name not in old)
    for name in change.unchanged:
        row.pop(name, None)
        if name in old:
            row[name] = old[name]
    return change._replace(row=encode_row(row), unchanged=unknown)
