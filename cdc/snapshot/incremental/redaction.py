"""What of an incremental snapshot must not be in its record: values of hidden columns. Pure.

Positions in a table are key values, and a condition quotes values of the columns that it names.
Where such a column is hidden they stay only in this process's memory. The next session of the
process reads the table again from its start, or the same keys again; another process does not know
them, so a snapshot of given keys, or with a condition, ends there with the request to run it again.

What is hidden is certain only once a chunk is published, because only then has the stream agreed
with the catalog on the table's columns. Until then everything is withheld of a table that has
hidden columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from cdc.publication.column_identity import hides, hides_something
from cdc.source import conditions

if TYPE_CHECKING:
    from cdc.config import Config, TableSelection
    from cdc.snapshot.incremental.records import IncrementalRecord
    from cdc.source.chunks import Chunk

GIVE_AGAIN: Final = (
    "the daemon was restarted, and the keys or the condition are not in the log, because the table"
    " has hidden columns; run the same `cdc snapshot` again, with its --keys or --where"
)


class Withheld(NamedTuple):
    """What of a record stays out of the log."""

    keys: bool
    where: bool


NOTHING: Final = Withheld(keys=False, where=False)


def before_publishing(config: Config, record: IncrementalRecord) -> Withheld:
    """Return what is withheld until a chunk is published."""
    selection = config.selection.of((record.schema, record.table))
    # A partition hides what its root table hides, and which table that is, is not known yet.
    by_root = config.source.partitions == "leaf" and config.hides
    return Withheld(
        keys=by_root or hides_something(selection),
        where=by_root or _quotes_hidden(selection, record.where),
    )


def of_published(config: Config, chunk: Chunk, where: str | None) -> Withheld:
    """Return what is withheld of a table as the stream knows it."""
    table = chunk.described
    selection = config.selection.of((table.schema, table.name), *table.published.ancestors)
    return Withheld(
        keys=any(hides(selection, name) for name in chunk.key),
        where=_quotes_hidden(selection, where),
    )


def logged(record: IncrementalRecord, withheld: Withheld) -> IncrementalRecord:
    """Return the record as the log may have it."""
    if withheld.keys:  # another session reads from the start
        record = replace(
            record, last=None, up_to=None, range_done=False, pending_keys=(),
            withheld=record.withheld or record.keys,
        )  # fmt: skip
    if withheld.where and record.where is not None:
        record = replace(record, where=None, withheld=True)
    return record


def restored(
    record: IncrementalRecord, given: IncrementalRecord | None
) -> IncrementalRecord | None:
    """Return the log's record of a snapshot with what is withheld; None where that is lost."""
    if not record.withheld:
        return record
    if given is None:
        return None
    pending_keys = given.pending_keys if record.keys else record.pending_keys
    return replace(record, where=given.where, pending_keys=pending_keys, withheld=False)


def _quotes_hidden(selection: TableSelection, where: str | None) -> bool:
    """Whether a condition may hold values of hidden columns."""
    if where is None:
        return False
    try:
        condition = conditions.parse(where)
    except conditions.ConditionError:
        return hides_something(selection)  # it is refused, and which columns it names is not known
    return any(hides(selection, name) for name in condition.columns)
