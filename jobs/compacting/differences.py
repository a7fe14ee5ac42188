"""What changed in a table between two frontiers: the net effect, key by key.

Both states are read slice by slice, so memory holds one slice of the table. A key counts as changed
if its newest event is another one, even if that wrote the same row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cdc.errors import ConfigError
from cdc.log import names
from lockstep.jobs.compacting import past
from lockstep.jobs.compacting.changes import PastChanges
from lockstep.jobs.cuts.direct_tables import direct

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from cdc.config import Config
    from lockstep.jobs.compacting.past import PastState
    from lockstep.jobs.compacting.slices import Slice
    from lockstep.jobs.cuts.frontiers import Position
    from lockstep.sinks.contract import Change


class RowDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A row that is not the same at both frontiers. A row that is missing at one is None."""

    key: dict[str, Any]
    op: str  # insert, update, delete
    before: dict[str, Any] | None
    after: dict[str, Any] | None


def differences(
    config: Config,
    table: tuple[str, str],
    first: Position,
    last: Position,
    known: Collection[str] = (),
) -> Iterator[RowDifference]:
    """Yield what differs, in any order; raise ConfigError if the table can't be compared by key.

    `known` has the topics of tables that were copied directly: the archive lacks rows of those.
    Raises GapError if the archive does not hold one of the frontiers.
    """
    topic = names.data_topic(config.prefix, *table)
    before, after = _found(config, first), _found(config, last)
    if before.past.seq > after.past.seq:
        raise ConfigError(f"{first} is after {last}", hint="give the earlier one to --from")
    old, new = PastChanges(before.past), PastChanges(after.past)
    # By its versions: a state that starts from a base does not list a table that is empty there.
    if topic not in new.older.topics():
        raise ConfigError(
            f"the archive has no table {'.'.join(table)} up to {last}",
            hint="write schema.table, as `cdc table list` does",
        )
    if topic in after.past.uncompacted:
        raise ConfigError(
            f"{'.'.join(table)} has no key, or had another one before: its rows can't be compared",
            hint="`cdc tail` prints its events while the topic has them",
        )
    if direct(config, [topic], known):
        raise ConfigError(
            f"{'.'.join(table)} was copied directly, not through the log: the archive lacks its"
            " first rows",
            hint="`cdc history TABLE KEY` shows what the log has of a row",
        )
    larger = max(before, after, key=lambda state: state.rows.get(topic, 0))
    for part in larger.slices(frozenset({topic})):
        mine = _rows(old, part, topic)
        for key, (seq, row) in _rows(new, part, topic).items():
            seq_before, row_before = mine.pop(key, (0, None))
            if seq != seq_before:
                yield _difference(key, row_before, row)
        for key, (_, row) in mine.items():
            yield _difference(key, row, None)


def _found(config: Config, wanted: Position) -> PastState:
    found = past.find(config, wanted)
    if found is None:
        raise past.missing_frontier(wanted)
    return found


def _rows(reader: PastChanges, part: Slice, topic: str) -> dict[bytes, tuple[int, bytes | None]]:
    """Return a slice's rows of a table, by key; without those of others in the same slice."""
    found: dict[bytes, tuple[int, bytes | None]] = {}
    changes: list[Change] = [
        change
        for each in reader.changes(part, complete_rows=True)
        if each.version.topic == topic
        for change in each.changes
    ]
    for change in changes:
        assert change.key is not None, "the table has a key"
        found[change.key] = change.seq, change.row
    return found


def _difference(key: bytes, before: bytes | None, after: bytes | None) -> RowDifference:
    op = "insert" if before is None else "delete" if after is None else "update"
    return RowDifference(
        key=msgspec.json.decode(key),
        op=op,
        before=None if before is None else msgspec.json.decode(before),
        after=None if after is None else msgspec.json.decode(after),
    )
