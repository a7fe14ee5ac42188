"""The doctor on real servers: it finds what is wrong, and what it prints fixes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from cdc.cli.main import run
from cdc.config import load
from cdc.errors import Exit
from cdc.operate.commands.setup import set_up
from cdc.operate.doctor.run import examine
from cdc.operate.findings import Finding, Severity
from tests.fixtures.daemon import wait_until
from tests.fixtures.servers import Database, KafkaServer


@pytest.fixture
def path(tmp_path: Path, database: Database, kafka_server: KafkaServer, topic_prefix: str) -> Path:
    path = tmp_path / "lockstep.yaml"
    path.write_text(
        f"pipeline: {topic_prefix}\n"
        f"source: {{dsn: '{database.dsn}'}}\n"
        f"log: {{bootstrap_servers: '{kafka_server.bootstrap}', partitions: 2}}\n",
        encoding="utf-8",
    )
    return path


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    """A role that may only log in."""
    role = f"r_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN")
    yield role
    database.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def findings(path: Path, **env: str) -> dict[str, Finding]:
    return {each.check: each for each in examine(load(path, env))}


def bad(found: dict[str, Finding]) -> set[str]:
    worse = (Severity.WARNING, Severity.ERROR)
    return {name for name, each in found.items() if each.severity in worse}


@pytest.mark.long("the findings have unit tests")
def test_a_source_in_order_is_reported_so_before_and_after_setup(
    path: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    before = findings(path)
    assert not bad(before) - {"max_slot_wal_keep_size", "wal_sender_timeout"}
    assert before["slot"].fix == "cdc setup"
    assert run(["doctor", "-c", str(path)]) == Exit.OK
    assert "next: cdc setup" in capsys.readouterr().err
    list(set_up(load(path, {})))
    after = findings(path)
    assert not bad(after) - {"max_slot_wal_keep_size", "wal_sender_timeout"}
    assert "continuity" in after
    assert run(["doctor", "-c", str(path)]) == Exit.OK
    assert "next: cdc run" in capsys.readouterr().err


def fix(database: Database, found: dict[str, Finding], *checks: str) -> None:
    for check in checks:
        for fix in found[check].fix.split(";"):
            if statement := re.sub(r"--.*", "", fix).strip():
                database.execute(statement)


@pytest.mark.commit("what `cdc doctor` advises")
def test_the_sql_that_it_prints_mends_what_it_finds(
    path: Path, database: Database, role: str
) -> None:
    database.execute(
        "CREATE SCHEMA app",
        'CREATE TABLE app."Odd Name" (id int PRIMARY KEY)',
        "CREATE TABLE app.keyless (x text)",
        "CREATE TABLE app.nothing (id int PRIMARY KEY)",
        "ALTER TABLE app.nothing REPLICA IDENTITY NOTHING",
        "CREATE UNLOGGED TABLE app.fleeting (id int PRIMARY KEY)",
    )
    env = {
        "LOCKSTEP_SOURCE_DSN": make_conninfo(database.dsn, user=role),
        "LOCKSTEP_SOURCE_TABLES": "app.*",
    }
    checks = {"replication", "create", "select", "replica_identity"}
    found = findings(path, **env)
    assert checks <= bad(found)
    fix(database, found, "unlogged")
    found = findings(path, **env)
    assert "unlogged" not in found
    fix(database, found, *checks)
    assert not checks & bad(findings(path, **env))


def test_an_open_transaction_that_writes_is_found(path: Path, database: Database) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    with database.connect() as connection, connection.transaction():
        connection.execute("INSERT INTO users VALUES (1)")
        pid = connection.info.backend_pid
        from cdc.source.connection import connect  # noqa: PLC0415
        from cdc.source.server import open_transactions  # noqa: PLC0415 - one test's

        with connect(load(path, {})) as asking:
            assert pid in [each.pid for each in open_transactions(asking)]


def test_it_examines_the_one_server_while_the_other_is_away(
    path: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    found = findings(path, LOCKSTEP_LOG_BOOTSTRAP_SERVERS="127.0.0.1:1")
    assert found["kafka"].severity is Severity.ERROR
    assert "127.0.0.1:1" in found["kafka"].what
    assert found["wal_level"].severity is Severity.OK
    found = findings(path, LOCKSTEP_SOURCE_DSN="postgresql://u:hunter2@127.0.0.1:1/x")
    assert found["postgres"].severity is Severity.ERROR
    assert "hunter2" not in found["postgres"].what
    assert found["transactions"].severity is Severity.OK


def test_its_json_has_every_finding(
    path: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    database.execute("CREATE TABLE keyless (x text)")
    assert run(["doctor", "--json", "-c", str(path)]) == Exit.OK
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert {"check", "severity", "what", "fix"} == set(report["findings"][0])
    identity = next(each for each in report["findings"] if each["check"] == "replica_identity")
    assert identity["fix"].startswith('ALTER TABLE "public"."keyless" REPLICA IDENTITY FULL')


def test_a_changed_partition_count_is_found(
    path: Path, database: Database, kafka_server: KafkaServer, topic_prefix: str
) -> None:
    from confluent_kafka.admin import (  # type: ignore[attr-defined] # noqa: PLC0415
        AdminClient,
        NewPartitions,
    )

    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    list(set_up(load(path, {})))
    admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap})
    topic = f"{topic_prefix}.public.users"
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(120)
    # The broker learns of them from the controller.
    wait_until(lambda: findings(path)["log"].severity is Severity.ERROR, "nothing is found")
    found = findings(path)
    assert "has 3 partitions, the resume record pins 2" in found["log"].what
    assert "cdc topics acknowledge" in found["log"].fix
