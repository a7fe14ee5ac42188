"""The page of costs shows what was measured, and its stages are those of the daemon's row path."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import costs_page, kinds, result, stages
from benchmarks.recording import Recording
from cdc.decode.frames import HEADER_SIZE, PAD
from cdc.decode.messages import Insert, Relation, RelationColumn, ReplicaIdentity
from cdc.log.batch import Batch
from tests.property.stream import begin, chunk, commit, frame

ITEMS = Relation(
    7,
    "public",
    "items",
    ReplicaIdentity.DEFAULT,
    (
        RelationColumn(key=True, name="id", type_id=20, type_modifier=-1),
        RelationColumn(key=False, name="name", type_id=25, type_modifier=-1),
    ),
)
ROWS = 500


def recorded() -> Recording:
    """Return one transaction of `ROWS` rows."""
    inserts = [frame(Insert(7, (b"%d" % number, b"name"))) for number in range(ROWS)]
    complete = chunk(begin(), frame(ITEMS), *inserts, commit())
    recording = Recording(chunks=[complete])
    assert recording.take(complete, no_other) == len(complete) - PAD
    return recording


def no_other(_chunk: bytes, at: int) -> int:
    raise AssertionError(f"at {at} is no frame")


def test_a_recording_feeds_every_row_into_the_batch() -> None:
    recording, batch = recorded(), Batch()
    sequencer = recording.sequencer(batch)
    recording.feed(sequencer, batch, recording.chunks[0], "items")
    assert sequencer.events == ROWS == recording.count
    values = [message["value"] for place in batch.waiting() for message in place.take()]
    assert len({json.loads(value)["after"]["id"] for value in values}) == ROWS


def test_a_recorded_row_is_encoded_alone_as_in_the_stream() -> None:
    recording = recorded()
    new = recording.encoder("items").new
    key, value = new(*recording.rows["items"][3], b"c", 1, 1, b'"txId":1', b'"ts_ms":1')
    assert key == b'{"id":3}'
    assert json.loads(value)["after"] == {"id": 3, "name": "name"}
    keyless = recording.encoder("items", key=()).new
    assert keyless(*recording.rows["items"][3], b"c", 1, 1, b'"txId":1', b'"ts_ms":1')[0] is None


def test_a_part_costs_less_than_the_total() -> None:
    recording = recorded()
    rows = recording.rows["items"]
    new = recording.encoder("items").new
    assert 0 < stages.encode(new, rows) < stages.feed(recording, "items")
    assert stages.partition(new, rows) > 0


def test_a_frame_that_is_no_row_of_ours_is_passed_over() -> None:
    """The stream answers a keepalive between rows, and it is not timed."""
    recording, batch = recorded(), Batch()
    body = b"k" + bytes(17)
    keepalive = b"d" + (len(body) + 4).to_bytes(4, "big") + body
    assert len(keepalive) == HEADER_SIZE + len(body)
    sequencer = recording.sequencer(batch)
    recording.feed(sequencer, batch, keepalive + recording.chunks[0], "items")
    assert sequencer.events == ROWS


def test_each_kind_has_a_table_of_its_own() -> None:
    assert len(set(kinds.TABLES)) == len(kinds.KINDS) + 1
    assert all(name.isidentifier() for name in kinds.TABLES)


def measured() -> dict[str, Any]:
    names = ("receive", "walk", "encode", "key", "partition", "hand_over", "send")
    return {
        "machine": {"cores": 2, "cpu": "AMD EPYC"},
        "commit": "abc",
        "rows": 300_000,
        "stages_us": dict.fromkeys(names, 0.5),
        "total_us": 5.0,
        "postgres_us": 3.0,
        "broker_us": 2.0,
        "value_ns": {"int": 111, "text[] of 3": 222},
        "transaction_us": 4.25,
        "kafka_transaction": {
            "p50_ms": 6.0,
            "p99_ms": 9.0,
            "acknowledged_p50_ms": 4.0,
            "cpu_us": 800.0,
        },
        "runs": {"ours": [{}, {}, {}]},
    }


def test_the_page_shows_every_stage_and_what_they_leave() -> None:
    page = costs_page.render(measured())
    for name in ("receive", "walk", "encode", "partition", "hand over", "send"):
        assert f"| {name} | 0.50 | 10 % |" in page
    # Six stages of half a microsecond; the key's is within encoding.
    assert "| the rest | 2.00 | 40 % |" in page
    assert "200,000 rows/s" in page
    assert "| text[] of 3 | 222 |" in page


def test_the_page_in_the_docs_is_what_was_measured() -> None:
    kept = json.loads((result.RESULTS / "costs.json").read_text())
    assert costs_page.PAGE.read_text() == costs_page.render(kept), (
        "docs/COSTS.md is generated: python -m benchmarks costs"
    )
