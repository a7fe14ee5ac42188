"""Encrypted columns on real servers: unreadable everywhere, readable by key, forgotten for good."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import orjson
import pytest

import lockstep
from cdc.cli.main import run
from cdc.log import reader
from cdc.operate.doctor.run import examine
from cdc.operate.findings import Severity
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.witness import data_records
from tests.integration.test_incremental_snapshot import begin, wait_state
from tests.integration.test_masks import caught_up, everything

TABLES = (
    "CREATE TABLE users (id int PRIMARY KEY, email text, note text)",
    "ALTER TABLE users ALTER note SET STORAGE EXTERNAL",
    """CREATE TABLE orders (
        id uuid PRIMARY KEY DEFAULT gen_random_uuid(), address text, user_id int, total int)""",
    "ALTER TABLE orders REPLICA IDENTITY FULL",
)
MASKS: dict[str, Any] = {
    "public.users": {"mask": {"email": {"encrypt": "user:id"}, "note": {"encrypt": "user:id"}}},
    "public.orders": {"mask": {"address": {"encrypt": "user:user_id"}}},
}
KEYRING = {"path": "keys.sqlite"}
ENCRYPTED = ("email", "note", "address")
UNSENT = "__debezium_unavailable_value"


def encrypting(pipeline: NewPipeline, *rows: str, **sections: Any) -> PipelineUnderTest:  # noqa: ANN401
    line = pipeline(*TABLES, *rows, tables=MASKS, keyring=KEYRING, **sections)
    assert cdc(line, "create") == 0
    return line


def cdc(line: PipelineUnderTest, *given: str) -> int:
    return run(["keys", given[0], "--config", str(line.config_file), *given[1:]])


def rows(line: PipelineUnderTest, table: str) -> list[dict[str, Any] | None]:
    """Return before or after of a table's events, in order of seq, decrypted."""
    decrypt = lockstep.decryptor(line.config_file)
    found = [r.event for r in data_records(line) if r.value is not None]
    return [
        {
            name: decrypt(value) if name in ENCRYPTED and value != UNSENT else value
            for name, value in row.items()
        }
        for event in sorted(found, key=lambda event: event["source"]["seq"])
        if event["source"]["table"] == table
        for row in (event["before"], event["after"])
        if row is not None
    ]


def test_a_forgotten_subject_is_unreadable_in_every_record(pipeline: NewPipeline) -> None:
    """By initial snapshot, stream and incremental snapshot; of two tables; old rows too."""
    line = encrypting(
        pipeline,
        "INSERT INTO users SELECT i, 'secret' || i, repeat('secret', 800)"
        " FROM generate_series(1, 50) i",
        "INSERT INTO orders (address, user_id, total)"
        " SELECT 'secret street ' || i, nullif(i % 5, 0), i FROM generate_series(1, 20) i",
        snapshot={"mode": "initial", "runner": "local"},
    )
    line.start().wait_ready()
    with line.database.connect() as connection:
        # The note is not sent again.
        connection.execute("UPDATE users SET email = 'secret again ' || id WHERE id < 5")
        connection.execute("UPDATE orders SET user_id = 4 WHERE user_id = 3")
        connection.execute("DELETE FROM orders WHERE user_id = 2")
    caught_up(line, 50 + 20 + 4 + 4 + 4)
    wait_state(line, begin(line, "public.users"))
    assert b"secret" not in everything(line)
    users = rows(line, "users")
    assert {row["email"] for row in users if row and row["id"] == 7} == {"secret7"}
    assert {row["email"] for row in users if row and row["id"] == 3} == {
        "secret3", "secret again 3",
    }  # fmt: skip
    addresses = {(row["user_id"], row["address"]) for row in rows(line, "orders") if row}
    assert {f"secret street {i}" for i in range(1, 21)} == {address for _, address in addresses}
    assert {user for user, _ in addresses} == {None, 1, 2, 3, 4}

    assert cdc(line, "forget", "user", "3", "--yes") == 0
    line.database.execute(
        "UPDATE users SET email = 'secret once more' WHERE id IN (3, 7)",
        "INSERT INTO orders (address, user_id, total) VALUES ('secret lane', 3, 1)",
    )
    wait_until(lambda: len(rows(line, "orders")) == 33, "the last order is not in the log")
    users = rows(line, "users")
    assert {row["email"] for row in users if row and row["id"] == 3} == {None}
    assert {row["email"] for row in users if row and row["id"] == 7} == {
        "secret7", "secret once more",
    }  # fmt: skip
    # Those that were another's at the time are readable: their key is that of their row.
    readable = {row["user_id"]: row["address"] for row in rows(line, "orders") if row}
    assert readable[3] is None
    assert readable[4] is not None
    assert cdc(line, "status", "--json") == 0
    assert line.daemon.term() == 0
    assert b"secret" not in everything(line)


@pytest.mark.parametrize("failpoint", ["after_flush:2", "before_commit:2", "after_commit:2"])
def test_what_a_killed_daemon_has_committed_is_readable(
    pipeline: NewPipeline, failpoint: str
) -> None:
    """Its keys are in the keyring before a record that they encrypted is in the log."""
    line = encrypting(pipeline, batch={"max_events": 40, "max_wait_ms": 20})
    daemon = line.start(failpoint)
    daemon.wait_ready()
    line.database.execute(
        *(f"INSERT INTO users VALUES ({i}, 'ada{i}', 'n')" for i in range(120))
    )  # fmt: skip
    assert daemon.wait_exit() == -signal.SIGKILL
    line.start().wait_ready()
    caught_up(line, 120)
    assert [row and row["email"] for row in rows(line, "users")] == [f"ada{i}" for i in range(120)]


def test_without_its_keyring_nothing_is_encrypted_by_another(
    pipeline: NewPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    line = encrypting(pipeline)
    line.start().wait_ready()
    line.database.execute("INSERT INTO users VALUES (1, 'ada', 'n')")
    caught_up(line, 1)
    assert line.daemon.term() == 0
    keys = line.config_file.parent / "keys.sqlite"
    kept = keys.rename(keys.with_name("moved.sqlite"))
    line.refused(78, "there is no keyring at", "restore it from a backup")
    assert not keys.exists()
    wrong = [each.check for each in examine(line.config) if each.severity is Severity.ERROR]
    assert "keyring" in wrong
    capsys.readouterr()
    assert cdc(line, "status") == 78
    assert "cdc keys create" in capsys.readouterr().err
    kept.rename(keys)
    line.start().wait_ready()
    assert [row and row["email"] for row in rows(line, "users")] == ["ada"]


def test_a_default_of_an_encrypted_column_is_in_no_alteration(pipeline: NewPipeline) -> None:
    """Each older row would need it by its own subject's key: they are copied again."""
    # By a pattern, which may name a column before a table has it.
    masks = {**MASKS, "public.users": {"mask": {"phone*": {"encrypt": "user:id"}}}}
    line = pipeline(*TABLES, tables=masks, keyring=KEYRING)
    assert cdc(line, "create") == 0
    line.start().wait_ready()
    line.database.execute(
        "INSERT INTO users VALUES (1, 'ada', 'n')",
        "ALTER TABLE users ADD phone text DEFAULT 'secret number'",
        "UPDATE users SET email = 'eve' WHERE id = 1",
    )
    caught_up(line, 2)
    assert b"secret number" not in everything(line)
    newest = max(reader.read_schemas(line.config), key=lambda each: each.schema_id)
    assert newest.stale == "the value of column phone in older rows is not known"
    last = max(
        (r.event for r in data_records(line) if r.value), key=lambda e: e["source"]["seq"]
    )  # fmt: skip
    assert lockstep.decryptor(line.config_file)(last["after"]["phone"]) == "secret number"


def test_a_subject_that_is_dropped_stops_the_daemon(pipeline: NewPipeline) -> None:
    line = encrypting(pipeline)
    line.start().wait_ready()
    line.database.execute(
        "ALTER TABLE orders DROP user_id",
        "INSERT INTO orders (address, total) VALUES ('secret street', 1)",
    )
    assert line.daemon.wait_exit() == 78
    assert "address is encrypted by the key of user_id" in line.daemon.log
    assert b"secret street" not in everything(line)


@pytest.mark.parametrize(
    ("mask", "what"),
    [
        ({"email": {"encrypt": "user:note"}}, "is encrypted by the key of note"),
        ({"email": {"encrypt": "user:nothing"}}, "is encrypted by the key of nothing"),
        ({"id": {"encrypt": "user:id"}}, "its mask encrypt would make rows alike"),
    ],
)
def test_a_mask_that_fits_no_table_is_refused_by_setup_and_doctor(
    bare: PipelineUnderTest, mask: dict[str, Any], what: str
) -> None:
    line = bare
    line.database.execute("DROP TABLE IF EXISTS users", TABLES[0])
    line.config_file = line.write(
        "lockstep.yaml", tables={"public.users": {"mask": mask}}, keyring=KEYRING
    )
    assert cdc(line, "create") == 0
    with pytest.raises(lockstep.ConfigError, match=what):
        line.set_up()
    assert any(what in finding.what for finding in examine(line.config))


def test_the_commands_say_what_they_did(
    pipeline: NewPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    line = encrypting(pipeline)
    line.start().wait_ready()
    line.database.execute("INSERT INTO users VALUES (1, 'ada', NULL)")
    (event,) = caught_up(line, 1)
    value = event["after"]["email"]
    assert event["after"]["note"] is None
    capsys.readouterr()

    def printed(*given: str) -> Any:  # noqa: ANN401 - JSON's
        assert cdc(line, *given, "--json") == 0
        return orjson.loads(capsys.readouterr().out)

    assert printed("decrypt", value) == ["ada"]
    assert printed("forget", "user", "1", "--yes") == {"forgotten": True, "had_key": True}
    assert printed("decrypt", value) == [None]
    status = printed("status")
    assert (status["keys"], status["forgotten"]) == (0, 1)
    assert printed("allow", "user", "1") == {"was_forgotten": True}
    assert cdc(line, "forget", "customer", "1", "--yes") == 78
    assert "the masks have user" in capsys.readouterr().err
    assert cdc(line, "create") == 78
    assert Path(line.config.keyring.path or "").exists()
