"""The rows of a slice as changes that a store takes: at the frontier, as DDL has altered them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import pyarrow.compute as pc

from lockstep.jobs.compacting.older import OlderEvents
from lockstep.jobs.compacting.past import newest_rows
from lockstep.jobs.compacting.slices import PastTables
from lockstep.jobs.cuts.in_order import in_order
from lockstep.jobs.cuts.reduce import NULL, Bounds, decode_row, encode_row, lsn_of, parsed
from lockstep.sinks.contract import Change, Changes

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from lockstep.jobs.compacting.slices import Past, Slice
    from lockstep.sinks.contract import Altered

# How many changes are passed to a store at a time.
PIECE_ROWS: Final = 5_000


class PastChanges:
    """Reads the tables of a `Past`, slice by slice."""

    def __init__(self, past: Past) -> None:
        self.past = past

    @cached_property
    def tables(self) -> PastTables:
        """Base and archive."""
        return PastTables(self.past)

    @cached_property
    def older(self) -> OlderEvents:
        """What the fold looks up."""
        return OlderEvents(self.tables)

    def rows(self, part: Slice) -> pa.Table:
        """Return a slice's rows at the frontier: newest events, some of them deletes."""
        return newest_rows(self.past, self.tables, self.older, part)

    def changes(self, part: Slice, *, complete_rows: bool) -> Iterator[Changes]:
        """Yield the rows that exist at the frontier, a few thousand at a time, table by table.

        Of a table without a key these are all its changes after the last truncate, in seq order.
        """
        rows = self.rows(part)
        for topic in sorted(set(rows["topic"].to_pylist())):
            mine = rows.filter(pc.equal(rows["topic"], topic)).sort_by("seq")
            newest = self.older.newest_version(topic)
            alterations = [
                each for each in self.older.alterations(topic) if each.seq <= self.past.seq
            ]
            for at in range(0, len(mine), PIECE_ROWS):
                piece = mine.slice(at, PIECE_ROWS).to_pylist()
                found = (
                    self._keyed(piece)
                    if newest.key
                    else self._keyless(piece, complete_rows=complete_rows)
                )
                altered = [_altered(change, alterations) for change in found]
                ids = {change.schema_id for change in altered} | {newest.schema_id}
                yield Changes(self.older.versions(topic, ids), altered)

    def _keyed(self, rows: list[dict[str, Any]]) -> Iterator[Change]:
        for row in rows:
            if row["op"] == "d":
                continue
            event = parsed(row["value"])
            if event.source.dead is not None:
                event = self.older.letter(event)
            source, before, after = event.source, bytes(event.before), bytes(event.after)
            unknown: tuple[str, ...] = ()
            if source.unchanged:
                fill = decode_row(row["fill"]) if row["fill"] is not None else {}
                known = decode_row(after) | fill
                unknown = tuple(name for name in source.unchanged if name not in fill)
                after = encode_row({n: each for n, each in known.items() if n not in unknown})
            yield Change(
                row["key"],
                source.seq,
                after,
                source.schema_id,
                lsn_of(source.commit_lsn),
                source.ts_us,
                unknown,
                None if before == NULL else before,
                event.op,
            )

    def _keyless(self, rows: list[dict[str, Any]], *, complete_rows: bool) -> list[Change]:
        events = [row["key"] for row in rows], [row["value"] for row in rows]
        return in_order(
            [events],
            Bounds(0, self.past.seq),
            letter=self.older.event,
            rows=lambda *_: {},
            complete_rows=complete_rows,
        ).changes


def _altered(change: Change, alterations: list[Altered]) -> Change:
    """Return a change as one of the version that the table has at the frontier."""
    for altered in alterations:
        if altered.seq > change.seq:
            change = altered.change(change)
    return change
