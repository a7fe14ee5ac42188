"""Load a recorded log into topics of a broker, each record at the offset that it had.

Frontier records have the offsets at which partitions end, which count the markers of transactions.
So the records between two gaps are written in one transaction, whose marker fills the gap; a longer
gap is filled with aborted transactions.
"""

from __future__ import annotations

import json
from base64 import b64decode
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from tests.fixtures.daemon import wait_until

if TYPE_CHECKING:
    from collections.abc import Collection

_LOGS: Final = Path(__file__).parent / "logs"
_SECONDS: Final = 60.0


class RecordedLog(NamedTuple):
    """What a version wrote: the rows of its database, and each record of its topics."""

    format: int
    rows: dict[str, list[dict[str, Any]]]
    records: list[dict[str, Any]]  # by topic, partition and offset; a partition's last has its end

    def newest(self, topic: str, **key: str) -> dict[str, Any]:
        """Return the newest value of a topic, of a key with these fields."""
        values = [
            json.loads(each["value"])
            for each in self.records
            if each["topic"] == topic
            and each.get("value")
            and key.items() <= json.loads(each["key"]).items()
        ]
        newest: dict[str, Any] = values[-1]
        return newest


def prefix_of(format_: int) -> str:
    """Return the pipeline of a recording, and the prefix of its topics."""
    return f"golden{format_}"


def file_of(format_: int) -> Path:
    return _LOGS / f"format-{format_}.jsonl"


def read(format_: int) -> RecordedLog:
    head, *records = map(json.loads, file_of(format_).read_text("utf-8").splitlines())
    return RecordedLog(head["format"], head["rows"], records)


def load(log: RecordedLog, bootstrap: str, without: Collection[str] = ()) -> None:
    """Write the records into topics that exist and are empty, but those of some topics."""
    producer, gaps = _producer(bootstrap, f"load-{log.format}"), _Gaps(bootstrap)
    by_partition = groupby(log.records, key=lambda each: (each["topic"], each["partition"]))
    for (topic, number), found in by_partition:
        if topic not in without:
            _write(producer, gaps, topic, number, list(found))


def _producer(bootstrap: str, name: str) -> Producer:
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": name, "linger.ms": 0})
    producer.init_transactions(_SECONDS)
    return producer


def _write(
    producer: Producer, gaps: _Gaps, topic: str, number: int, found: list[dict[str, Any]]
) -> None:
    records = found[:-1]
    following = [each.get("offset", each.get("end")) for each in found[1:]]
    is_open = False
    for each, after in zip(records, following, strict=True):
        if not is_open:
            producer.begin_transaction()
        producer.produce(
            topic,
            _bytes(each["value"]),
            _bytes(each["key"]),
            partition=number,
            timestamp=each["ms"],
        )
        # A transaction that was tried again may have left more than its marker.
        pairs, markers = divmod(after - each["offset"] - 1, 2)
        if pairs:
            producer.flush(_SECONDS)
            gaps.fill(topic, number, each["offset"] + 1, pairs)
        is_open = markers == 0
        if not is_open:
            producer.commit_transaction(_SECONDS)
    if is_open:
        producer.commit_transaction(_SECONDS)


class _Gaps:
    """Fills gaps with transactions that are aborted, each of a record and its marker."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = _producer(bootstrap, "load-gaps")
        self._admin = AdminClient({"bootstrap.servers": bootstrap})

    def fill(self, topic: str, number: int, start: int, pairs: int) -> None:
        """Fill two offsets a pair from `start`, the partition's end."""
        for _ in range(pairs):
            self._producer.begin_transaction()
            self._producer.produce(topic, b"aborted", partition=number)
            self._producer.flush(_SECONDS)
            self._producer.abort_transaction(_SECONDS)
        partition = TopicPartition(topic, number)
        # The broker answers before it has written the marker.
        wait_until(lambda: self._end(partition) >= start + 2 * pairs, "no marker follows")

    def _end(self, partition: TopicPartition) -> int:
        asked = {partition: OffsetSpec.latest()}  # type: ignore[no-untyped-call]
        found = self._admin.list_offsets(asked, request_timeout=_SECONDS)
        offset: int = found[partition].result().offset
        return offset


def _bytes(text: str | dict[str, str] | None) -> bytes | None:
    if isinstance(text, dict):
        return b64decode(text["base64"])
    return None if text is None else text.encode()
