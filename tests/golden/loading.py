"""Load a recorded log into topics of a broker, each record at the offset that it had.

Frontier records have the offsets at which partitions end, which count the markers of transactions.
So the records between two gaps are written in one transaction, whose marker fills the gap.
"""

from __future__ import annotations

import json
from base64 import b64decode
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from confluent_kafka import Producer

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
    producer = Producer(
        {"bootstrap.servers": bootstrap, "transactional.id": f"load-{log.format}", "linger.ms": 0}
    )
    producer.init_transactions(_SECONDS)
    by_partition = groupby(log.records, key=lambda each: (each["topic"], each["partition"]))
    for (topic, number), found in by_partition:
        if topic not in without:
            _write(producer, topic, number, list(found))


def _write(producer: Producer, topic: str, number: int, found: list[dict[str, Any]]) -> None:
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
        gap = after - each["offset"] - 1
        assert gap in (0, 1), f"{topic} [{number}] {each['offset']}: {gap} markers follow"
        is_open = gap == 0
        if not is_open:
            producer.commit_transaction(_SECONDS)


def _bytes(text: str | dict[str, str] | None) -> bytes | None:
    if isinstance(text, dict):
        return b64decode(text["base64"])
    return None if text is None else text.encode()
