"""The newest event of each key of a slice, with the values that it takes from earlier ones. Pure.

The order is `seq` alone, so partitions and epochs do not matter. Most events are chosen by their
columns and never parsed. Only an event that leaves values out is: `fills` then folds the events of
its key, and of the key that its row had before, in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Raw

from lockstep.jobs.cuts.in_order import halves
from lockstep.jobs.cuts.reduce import decode_row, encode_row, parsed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from lockstep.jobs.cuts.reduce import CutEvent
    from lockstep.sinks.contract import Altered

# In an event that leaves out values; in a row's text the quotes are escaped.
_UNSENT: Final = '"unchanged":['
_DEAD: Final = '"dead":{"id":'
_ORDER: Final = [("topic", "ascending"), ("key", "ascending"), ("seq", "ascending")]
_Row = dict[str, Raw]


class Held(NamedTuple):
    """An event in a chain."""

    seq: int
    key: bytes
    value: bytes
    fill: bytes | None


class Older(Protocol):
    """What the fold looks up outside of its slice, up to the frontier."""

    def deleted(self, topic: str, seqs: Collection[int]) -> dict[int, bytes]:
        """Return the key of each delete at these seqs."""
        ...

    def events(self, topic: str, keys: Collection[bytes]) -> list[Held]:
        """Return all events of these keys after the last truncate."""
        ...

    def letter(self, event: CutEvent) -> CutEvent:
        """Return the event of the dead letter that an event points to."""
        ...

    def alterations(self, topic: str) -> Sequence[Altered]:
        """Return what DDL has changed in the table's older rows, in seq order."""
        ...


def newest(
    rows: pa.Table,
    floors: Mapping[str, int],
    uncompacted: Collection[str],
    deletes_since_us: int,
    partly: Collection[str],
) -> pa.Table:
    """Return the newest event of each key, without truncated rows and old deletes.

    `floors` has the seq of each table's last truncate; of a table in `uncompacted` all events are
    kept, and of one in `partly`, of which there are older rows elsewhere, all deletes.
    """
    rows = remaining(rows, floors)
    kept = _of(rows, uncompacted)
    keyless = rows.filter(kept)
    keyed = rows.filter(pc.and_(pc.invert(kept), pc.is_valid(rows["key"]))).sort_by(_ORDER)
    keyed = keyed.filter(_is_last(keyed))
    is_delete = pc.equal(keyed["op"], "d")
    is_recent = pc.greater_equal(keyed["committed_at"].cast(pa.int64()), deletes_since_us)
    stays = pc.or_(is_recent, _of(keyed, partly))
    keyed = keyed.filter(pc.or_(pc.invert(is_delete), stays))
    return pa.concat_tables([keyed, keyless])


def remaining(rows: pa.Table, floors: Mapping[str, int]) -> pa.Table:
    """Return the rows that no truncate has deleted, without the truncates."""
    for topic, floor in floors.items():
        here, old = pc.equal(rows["topic"], topic), pc.less_equal(rows["seq"], floor)
        rows = rows.filter(pc.invert(pc.and_(here, old)))
    return rows


def _of(rows: pa.Table, topics: Collection[str]) -> pa.ChunkedArray:
    """Return which rows are of these tables."""
    return pc.is_in(rows["topic"], value_set=pa.array(sorted(topics), pa.string()))


def _is_last(rows: pa.Table) -> pa.ChunkedArray | pa.Array:
    """Return which of the sorted rows are the last of their key."""
    if not len(rows):
        return pa.array([], pa.bool_())
    differs = pa.array([False] * (len(rows) - 1), pa.bool_())
    for name in ("topic", "key"):
        column = rows[name].combine_chunks()
        differs = pc.or_(differs, pc.not_equal(column[1:], column[:-1]))
    return pa.concat_arrays([differs, pa.array([True])])


def leaves_out(rows: pa.Table) -> pa.ChunkedArray:
    """Return which rows' events leave out values, and are not filled yet."""
    unsent = pc.match_substring(rows["value"], _UNSENT)
    return pc.and_(
        pc.and_(pc.or_(unsent, pc.match_substring(rows["value"], _DEAD)), pc.is_null(rows["fill"])),
        pc.not_equal(rows["op"], "d"),
    )


def with_fills(
    chosen: pa.Table,
    rows: pa.Table,
    older: Older,
    uncompacted: Collection[str],
    partly: Collection[str],
) -> pa.Table:
    """Return chosen rows with the values that their events leave out; `rows` is all of the slice.

    Of a table in `partly` there are older rows elsewhere. A value that no event has stays unknown.
    """
    wanted = chosen.filter(pc.and_(leaves_out(chosen), pc.invert(_of(chosen, uncompacted))))
    if not len(wanted):
        return chosen
    found: dict[tuple[str, int], bytes] = {}
    for topic in pc.unique(wanted["topic"]).to_pylist():
        here = rows.filter(pc.equal(rows["topic"], topic))
        mine = wanted.filter(pc.equal(wanted["topic"], topic))
        keys = pc.unique(mine["key"]).cast(pa.binary())
        if topic in partly:
            chains = older.events(topic, keys.to_pylist())
        else:
            chains = held(here.filter(pc.is_in(here["key"], value_set=keys)))
        seqs = set(mine["seq"].to_pylist())
        for seq, fill in fills(topic, chains, seqs, older).items():
            found[topic, seq] = fill
    places = zip(chosen["topic"].to_pylist(), chosen["seq"].to_pylist(), strict=True)
    stored = chosen["fill"].to_pylist()
    filled = [found.get(at, old) for at, old in zip(places, stored, strict=True)]
    at = chosen.schema.get_field_index("fill")
    return chosen.set_column(at, "fill", pa.array(filled, pa.binary()))


def held(rows: pa.Table) -> list[Held]:
    """Return rows as events of chains."""
    columns: list[list[Any]] = [rows[name].to_pylist() for name in Held._fields]
    return [Held(*each) for each in zip(*columns, strict=True)]


def fills(
    topic: str, events: Iterable[Held], wanted: Collection[int], older: Older
) -> dict[int, bytes]:
    """Return the left-out values of the events at the seqs `wanted`, whose chains are given."""
    parts = _with_moved(topic, {each.seq: (each, parsed(each.value)) for each in events}, older)
    folding = _Folding(older, older.alterations(topic), set(wanted))
    for seq in sorted(parts):
        folding.add(*parts[seq])
    return folding.found


def _with_moved(
    topic: str, events: dict[int, tuple[Held, CutEvent]], older: Older
) -> dict[int, tuple[Held, CutEvent]]:
    """Return the events, and those of the keys that their rows had before."""
    asked = set[int]()
    while True:
        before = {
            seq - 1
            for seq, (_, event) in events.items()
            if event.op == "c" and (event.source.unchanged or event.source.dead)
        }
        missing = before - events.keys() - asked
        if not missing:
            return events
        asked |= missing
        keys = set(older.deleted(topic, missing).values())
        for each in older.events(topic, keys) if keys else ():
            events.setdefault(each.seq, (each, parsed(each.value)))


class _Folding:
    """Folds events in seq order into the rows after each."""

    def __init__(self, older: Older, alterations: Sequence[Altered], wanted: set[int]) -> None:
        self._older, self._alterations, self._wanted = older, alterations, wanted
        self._rows: dict[bytes, tuple[int, _Row]] = {}
        self._moved: tuple[CutEvent, tuple[int, _Row] | None] | None = None
        self.found: dict[int, bytes] = {}

    def add(self, held: Held, event: CutEvent) -> None:
        moved, self._moved = self._moved, None
        if event.op == "d":
            self._moved = event, self._rows.pop(held.key, None)
            return
        if event.source.dead is not None:
            event = self._older.letter(event)
        before = self._rows.get(held.key)
        if event.op == "c" and moved is not None and halves(moved[0], event):
            before = moved[1]
        row, unsent = decode_row(event.after), event.source.unchanged
        for name in unsent:
            row.pop(name, None)
        taken = decode_row(held.fill) if held.fill is not None else {}
        if held.fill is None and unsent and before is not None:
            known = self._altered(*before, held.seq)
            taken = {name: known[name] for name in unsent if name in known}
        self._rows[held.key] = held.seq, row | taken
        if held.seq in self._wanted:  # empty too: then nothing is looked up a second time
            self.found[held.seq] = encode_row(taken)

    def _altered(self, seq: int, row: _Row, upto: int) -> _Row:
        """Return a row as it is at a later seq."""
        for altered in self._alterations:
            if seq < altered.seq < upto:
                row = decode_row(altered.row(encode_row(row)))
        return row
