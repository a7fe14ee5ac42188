"""A canary becomes an event of the log, and moves the frontier of an idle database."""

from __future__ import annotations

import time
from base64 import b64decode
from typing import Any

import orjson
import pytest
from psycopg.conninfo import make_conninfo

from cdc.config import load
from cdc.log import names, reader
from cdc.log.follower_reports import CANARY, Reports
from cdc.operate.doctor.run import examine
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.reported import reported


def canaries(line: PipelineUnderTest) -> list[dict[str, Any]]:
    found = reader.read_if_there(line.config, names.messages_topic(line.config.prefix))
    events = [orjson.loads(each.value() or b"null") for each in found]
    return [each for each in events if each["message"]["prefix"] == CANARY]


def test_a_canary_is_an_event_with_a_seq_and_the_time_it_was_sent(pipeline: NewPipeline) -> None:
    line = pipeline("CREATE TABLE t (id int PRIMARY KEY)", source={"canary_seconds": 0.2})
    line.start().wait_ready()
    began_us = time.time_ns() // 1_000
    before = line.frontiers()
    # More often than the source is polled.
    wait_until(lambda: len(canaries(line)) >= 5, "few canaries")
    events = canaries(line)
    seqs = [each["source"]["seq"] for each in events]
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
    sent = [int(b64decode(each["message"]["content"])) for each in events]
    assert sent == sorted(sent)
    assert sent[-1] - began_us < 600_000_000
    wait_until(lambda: line.frontiers()[-1].seq >= seqs[-1], "no frontier has them")
    wait_until(lambda: len(line.frontiers()) > len(before), "the frontier does not move")


def test_where_none_may_be_sent_the_daemon_warns_and_continues(pipeline: NewPipeline) -> None:
    """Also if transactions are read-only by default, which does not prevent canaries."""
    line = pipeline("CREATE TABLE t (id int PRIMARY KEY)")
    role = f"r_{line.database.name}"
    emit = "FUNCTION pg_logical_emit_message(boolean, text, text{})"
    flush = ", boolean" if line.query("SHOW server_version_num")[0] >= "170000" else ""
    line.database.execute(
        f"CREATE ROLE {role} LOGIN REPLICATION IN ROLE pg_monitor",
        f"ALTER ROLE {role} SET default_transaction_read_only = on",
        f"GRANT SELECT ON t TO {role}",
        f"REVOKE EXECUTE ON {emit.format(flush)} FROM PUBLIC",
    )
    try:
        dsn = make_conninfo(line.database.dsn, user=role)
        file = line.write("less.yaml", source={"dsn": dsn, "canary_seconds": 0.2})
        daemon = line.start(config_file=file).wait_ready()
        wait_until(lambda: _warned(daemon.health()), "nothing is reported")
        wait_until(lambda: daemon.health()["status"] == 200, "it is not ready")
        shown = line.write("shown.yaml", http__listen=f"127.0.0.1:{daemon.port}")
        found = examine(load(shown, {}))
        [warning] = [each for each in found if "no canary is sent" in each.what]
        assert "GRANT EXECUTE ON FUNCTION pg_logical_emit_message" in warning.fix
        assert not any(each.check == "verdict" for each in found)
        line.database.execute(f"GRANT EXECUTE ON {emit.format(flush)} TO {role}")
        wait_until(lambda: canaries(line), "no canary comes")
        wait_until(lambda: daemon.health().get("warnings") == [], "it is still reported")
        daemon.term()
    finally:
        line.database.execute(
            f"DROP OWNED BY {role}",
            f"GRANT EXECUTE ON {emit.format(flush)} TO PUBLIC",
            f"DROP ROLE {role}",
        )


def _warned(health: dict[str, Any]) -> bool:
    return any("no canary is sent" in each for each in health.get("warnings", []))


@pytest.mark.long("waits for a canary")
def test_a_follower_that_is_added_later_gets_canaries_from_the_daemon_that_runs(
    pipeline: NewPipeline,
) -> None:
    """The daemon's configuration had no followers when it started."""
    line = pipeline("CREATE TABLE t (id int PRIMARY KEY)")
    assert not line.config.followers
    line.start().wait_ready()
    assert canaries(line) == []
    reports = Reports(line.config)

    def arrived() -> bool:
        reports.write(reported(pipeline=line.config.pipeline, at_us=time.time_ns() // 1_000))
        return len(canaries(line)) > 1

    wait_until(arrived, "no canary", 120)
