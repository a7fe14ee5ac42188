"""A large cut's events, as the tasks that write Delta mirrors take them; made by executors.

Each is complete, although the log has a pointer to its dead letter. Where the cut alters a table,
its earlier events are as the alterations leave them. And a row has one key, where the log may have
several (`sinks.delta.key_forms`). A cut that needs none of this is not passed through Python here.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.functions import expr

from cdc.log.dead_letters import DeadLetterAssembler
from lockstep.jobs.cuts.altered import as_altered
from lockstep.jobs.cuts.reduce import parsed
from lockstep.jobs.spark.map_in_arrow import in_arrow
from lockstep.sinks.delta.key_forms import KeyForms

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame

    from lockstep.sinks.contract import Altered, Version
    from lockstep.sinks.delta.targets import Target

_SEQ: Final = "CAST(get_json_object(CAST(value AS STRING), '$.source.seq') AS LONG)"
_MARK: Final = '"dead":{"id":'
_EVENTS: Final = "topic string, key binary, value binary, seq long"
_SCHEMA: Final = pa.schema(
    [("topic", pa.string()), ("key", pa.binary()), ("value", pa.binary()), ("seq", pa.int64())]
)


class TableShare(NamedTuple):
    """A table's part of a cut."""

    target: Target
    versions: Mapping[int, Version]  # up to the newest that the table has at the cut's end
    truncated: int | None
    bytes: int
    has_old: bool = False  # rows without a key are updated or deleted
    altered: Sequence[Altered] = ()

    @property
    def changes_form(self) -> bool:
        """Whether tasks take other keys or values than the log has."""
        return bool(self.altered) or self.target.keys_vary


def prepared(
    events: DataFrame, shares: Mapping[str, TableShare], letters: DataFrame | None
) -> DataFrame:
    """Return the events that no truncate removes as tasks take them, with `seq`.

    `events` has `topic`, `key` and `value`, of tables that all have a key, or all have none;
    `letters` are the cut's records of dead letters, with `offset`, `key` and `value`, if an event
    points to one.
    """
    has_key = any(share.target.key for share in shares.values())
    events = events.where("key IS NOT NULL" if has_key else "key IS NULL")
    events = events.selectExpr("topic", "key", "value", f"{_SEQ} seq")
    for topic, share in shares.items():
        if share.truncated is not None and not share.target.is_history:
            events = events.where(f"NOT ({among([topic])} AND seq <= {share.truncated})")
    if letters is not None:
        events = _with_letters(events, letters)
    elif not any(share.changes_form for share in shares.values()):
        return events
    return in_arrow(events, partial(_prepared, dict(shares)), _EVENTS)


def among(topics: Iterable[str]) -> str:
    """Return the condition that an event is of one of the topics, for Spark."""
    escaped = (topic.replace("\\", "\\\\").replace("'", "\\'") for topic in topics)
    return "topic IN ({})".format(", ".join(f"'{topic}'" for topic in escaped))


def _with_letters(events: DataFrame, letters: DataFrame) -> DataFrame:
    """Return events with the column `letter`: the records of the dead letter that one points to."""
    by_id = letters.groupBy(expr("get_json_object(CAST(key AS STRING), '$.id') id")).agg(
        expr("sort_array(collect_list(struct(offset, key, value))) letter")
    )
    # An event without a letter gets an id of its own, so that they are divided among tasks.
    pointed = events.selectExpr(
        "*",
        f"""IF(contains(CAST(value AS STRING), '{_MARK}'),
            get_json_object(CAST(value AS STRING), '$.source.dead.id'),
            concat('-', seq)) id""",
    )
    return pointed.join(by_id, "id", "left").select(*events.columns, "letter")


def _prepared(
    shares: Mapping[str, TableShare], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Prepare a task's events; runs in an executor."""
    forms = {topic: NewestForm(share) for topic, share in shares.items() if share.changes_form}
    for batch in batches:
        rows = zip(*batch.to_pydict().values(), strict=True)
        for topic, some in groupby(rows, itemgetter(0)):
            _, keys, values, seqs, *letters = zip(*some, strict=True)
            values = tuple(map(complete, values, *letters))
            if topic in forms:
                keys, values = forms[topic].of(keys, values)
            columns = [[topic] * len(keys), keys, values, seqs]
            yield pa.RecordBatch.from_arrays(
                [pa.array(each, kind) for each, kind in zip(columns, _SCHEMA.types, strict=True)],
                schema=_SCHEMA,
            )


def complete(value: bytes, letter: list[dict[str, Any]] | None = None) -> bytes:
    """Return an event: that of the dead letter that it points to, whose records are given."""
    if _MARK.encode() not in value:
        return value
    letters = DeadLetterAssembler()
    for record in letter or ():
        letters.add(record["key"], record["value"])
    pointer = parsed(value).source.dead
    assert pointer is not None, "text inside a row has its quotes escaped"
    return letters.event(pointer)


class NewestForm:
    """Gives events of a table the form that it has at the cut's end."""

    def __init__(self, share: TableShare) -> None:
        self._altered = share.altered
        versions = [share.versions[each] for each in sorted(share.versions)]
        self._keys = KeyForms(share.target, versions) if share.target.key else None

    def of(
        self, keys: Iterable[bytes | None], values: Iterable[bytes]
    ) -> tuple[tuple[bytes | None, ...], tuple[bytes, ...]]:
        """Return the keys and values of events in that form."""
        events = [as_altered(*each, self._altered) for each in zip(keys, values, strict=True)]
        new = tuple(value for _, value, _ in events)
        if self._keys is None:
            return (None,) * len(new), new
        return tuple(self._keys.of([(key, id_) for key, _, id_ in events if key])), new
