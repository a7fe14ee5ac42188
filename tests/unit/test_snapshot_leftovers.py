"""Which keys a restarted initial snapshot deletes, according to the log's partitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import orjson
import pytest

from cdc.config import Config, Log, Source
from cdc.encode.partition import partition_of
from cdc.log import reader
from cdc.snapshot.initial import leftovers
from cdc.snapshot.initial.records import SnapshotPlan, SnapshotTable, StalePartition

TOPIC = "shop.public.users"
_FIRST = 1_000  # the first of this generation's seqs
Log_ = dict[int, list[tuple[bytes, bytes]]]


class _Schema:
    topic = TOPIC


def key(number: int) -> bytes:
    return b'{"id":%d}' % number


def event(op: str, seq: int) -> bytes:
    return orjson.dumps({"op": op, "source": {"seq": seq}})


def deleted(log: Log_, partitions: int, monkeypatch: pytest.MonkeyPatch) -> set[bytes]:
    """Return the keys that are deleted over all partitions that have older rows."""

    def read(_: Config, __: str, number: int) -> Iterator[tuple[bytes, bytes]]:
        yield from log.get(number, [])

    monkeypatch.setattr(reader, "read_partition", read)
    monkeypatch.setattr(leftovers, "event_format_of", lambda *_: b"")
    config = Config(pipeline="shop", source=Source(dsn=""), log=Log(bootstrap_servers=""))
    tables = [cast("SnapshotTable", type("T", (), {"schema_id": 1, "partitions": partitions})())]
    found: list[bytes] = []
    for number in sorted(log):
        of = StalePartition(schema_id=1, topic=TOPIC, partition=number, events=100, first_seq=5_000)
        fields: Any = {"stale": (of,), "tables": tables, "schemas": {1: _Schema()}}
        plan = cast("SnapshotPlan", type("P", (), {**fields, "first_seq": _FIRST})())
        found += leftovers.LeftoverDeletes(config, plan, 0, cast("Any", None)).left(1, 0)
    assert len(set(found)) == len(found)
    return set(found)


@pytest.mark.parametrize("after", [4, 6])
def test_only_keys_without_a_row_are_deleted_though_the_topic_was_widened(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older rows are partitioned by four, those of this generation by `after`."""
    log: Log_ = {number: [] for number in range(after)}
    for number in range(60):
        log[partition_of(key(number), 4)].append((key(number), event("r", 1 + number)))
    for number in range(0, 60, 3):
        log[partition_of(key(number), after)].append((key(number), event("r", _FIRST + number)))
    without = {key(number) for number in range(60) if number % 3}
    assert deleted(log, after, monkeypatch) == without
