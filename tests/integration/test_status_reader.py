"""The state, read again and again: what is kept open, and what a new reader would find."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any, Final

import psycopg
import pytest

from cdc.config import load
from cdc.events import LSN
from cdc.operate import status
from cdc.operate.status import Status, StatusReader, read_status
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.proxy import Proxy

# What does not change while nothing is committed.
_LASTING: Final = ("schemas", "snapshot", "incremental_snapshots", "incomplete_topics")


def _lasting(found: Status) -> dict[str, Any]:
    return {name: getattr(found, name) for name in _LASTING}


def _sessions(line: PipelineUnderTest) -> set[int]:
    """Return the sessions that have asked what only a status asks."""
    return set(
        line.query(
            "SELECT array_agg(pid) FROM pg_stat_activity WHERE query LIKE %s"
            " AND datname = current_database() AND pid <> pg_backend_pid()",
            "%FROM pg_prepared_xacts%LIMIT 20%",
        )[0]
        or ()
    )


def test_a_reader_that_is_kept_finds_what_a_new_one_finds(pipeline: NewPipeline) -> None:
    """Rows, new versions, a table that is renamed, and a session that is ended meanwhile."""
    line = pipeline("CREATE TABLE t (id int PRIMARY KEY)")
    line.start().wait_ready()
    changes = (
        "INSERT INTO t VALUES (1)",
        "ALTER TABLE t ADD note text",
        "INSERT INTO t VALUES (2, 'a')",
        "SELECT pg_terminate_backend({session}, 10000)",
        "ALTER TABLE t RENAME TO u",
        "INSERT INTO u VALUES (3, 'b')",
    )
    with closing(StatusReader(line.config)) as kept:
        found = kept.read()
        for change in changes:
            line.database.execute(change.format(session=max(_sessions(line), default=0)))
            wal_end = LSN.parse(line.query("SELECT pg_current_wal_lsn()::text")[0])
            wait_until(
                lambda: _has_all(kept.read(), wal_end),  # noqa: B023 - at once
                f"{change} is not read",
            )
            found = kept.read()
            assert _lasting(found) == _lasting(read_status(line.config)), change
            assert found.frontier
            assert found.frontier.seq == line.frontiers()[-1].seq
    assert [each.name for each in found.incomplete_topics] == ["public.t", "public.u"]


def _has_all(found: Status, wal_end: LSN) -> bool:
    """Return whether the log has it, and the frontier after it."""
    return found.resume is not None and (
        found.resume[1].end_lsn >= wal_end and not found.resume[1].pending
    )


def test_one_session_serves_many_readings_until_it_is_replaced(
    pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of its server may lead to another by then."""
    line = pipeline("CREATE TABLE t (id int PRIMARY KEY)")
    for seconds, many in ((3_600.0, 1), (0.0, 3)):
        monkeypatch.setattr(status, "SOURCE_SECONDS", seconds)
        sessions, before = set[int](), _sessions(line)
        with closing(StatusReader(line.config)) as kept:
            for _ in range(3):
                kept.read()
                sessions |= _sessions(line) - before
        assert len(sessions) == many


def test_a_source_that_does_not_answer_any_more_is_asked_again_and_named(
    pipeline: NewPipeline,
    new_proxy: Callable[[str, int], Proxy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernel still acknowledges what is sent, so nothing but time shows it."""
    monkeypatch.setattr(status, "ANSWER_SECONDS", 5.0)
    line = pipeline("CREATE TABLE t (id int PRIMARY KEY)")
    with line.database.connect() as connection:
        proxy = new_proxy(connection.info.host, connection.info.port)
    dsn = psycopg.conninfo.make_conninfo(line.database.dsn, host="127.0.0.1", port=proxy.port)
    config = load(line.write("proxied.yaml", source__dsn=dsn), {})
    with closing(StatusReader(config)) as kept:
        assert kept.read().server
        proxy.freeze()
        assert kept.read().server, "others pass"
        proxy.freeze()
        proxy.refusing = True
        found = kept.read()
        assert found.server is None
        assert any(str(proxy.port) in each.what for each in found.verdict.causes)
        proxy.refusing = False
        assert kept.read().server
