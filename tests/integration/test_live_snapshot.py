"""Tables read again while they change: nothing lost, nothing old, TOAST whole."""

from __future__ import annotations

import json
import uuid

from cdc.snapshot import commands, live_topic
from cdc.snapshot.live_records import LiveRecord
from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.load import TABLES, Load


def say(line: PipelineUnderTest, **command: object) -> str:
    """Emit a command; return the snapshot's id."""
    number = command.setdefault("id", uuid.uuid4().hex[:8])
    with line.database.connect(options="-c synchronous_commit=local") as connection:
        connection.execute(
            "SELECT pg_logical_emit_message(true, %s, %s::bytea)",
            (commands.COMMAND, json.dumps(command)),
        )
    return str(number)


def begin(line: PipelineUnderTest, *tables: str, **more: object) -> str:
    of = [dict(zip(("schema", "table"), name.split(".", 1), strict=True)) for name in tables]
    return say(line, do="start", tables=of, **more)


def found(line: PipelineUnderTest, number: str) -> LiveRecord | None:
    return next((r for r in live_topic.read(line.config) if r.id == number), None)


def wait_state(line: PipelineUnderTest, number: str, state: str = "done") -> LiveRecord:
    def reached() -> bool:
        record = found(line, number)
        if record is not None and record.state != state:
            assert record.active or state == record.state, record
        return record is not None and record.state == state

    wait_until(reached, f"{number} is {found(line, number)}", 90)
    record = found(line, number)
    assert record is not None
    return record


# Rows that the log never saw: what it holds of them in the end, a snapshot has told.
_BEFORE = (
    "INSERT INTO users SELECT i, 1, 'u', repeat(md5(i::text), 80) FROM generate_series(1, 3000) i",
    "INSERT INTO pairs SELECT i, 1, chr(65 + i % 58) || i, i FROM generate_series(1, 2000) i",
    "INSERT INTO whole SELECT i, 1, repeat(md5(i::text), 80) FROM generate_series(1, 500) i",
    "INSERT INTO named SELECT i, 1, 'c' || i, now() FROM generate_series(1, 500) i",
)


def test_tables_older_than_the_log_are_read_under_load(pipeline: NewPipeline) -> None:
    """Several at once, with keys of several types that change, and TOAST that is not sent."""
    line = pipeline(*TABLES, *_BEFORE, batch={"max_events": 2_000, "max_wait_ms": 50})
    line.start().wait_ready()
    with Load(line.database.dsn, seed=3, truncates=0.0003) as load:
        wait_until(lambda: load.commits > 50, "no load")
        tables = ("users", "pairs", "whole", "named")
        numbers = {name: begin(line, f"public.{name}") for name in tables}
        rows = {name: wait_state(line, number).rows for name, number in numbers.items()}
        seen = load.commits
        wait_until(lambda: load.commits > seen + 50, "no load")
    assert all(rows.values())
    converge(line.config)
    assert line.daemon.term() == 0
