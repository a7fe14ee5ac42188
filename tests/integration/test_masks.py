"""Masked on a real server: in every topic, in the daemon's log, through renames and restarts."""

from __future__ import annotations

import hashlib
import hmac
import random
from typing import Any

import orjson
import pytest

from cdc.cli.main import run
from cdc.log import names
from cdc.log.records import is_schema_key
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.topic_settings import set_limit
from tests.fixtures.witness import data_records, records_of

KEY = "a key of the tests' own"
USERS = (
    "CREATE TABLE users (id text PRIMARY KEY, email text, name text, note text, salary int8,"
    " tags text[], document jsonb, plain text)"
)
MASKS: dict[str, Any] = {
    "public.users": {
        "mask": {
            "id": {"hmac": KEY},
            "email": {"hmac": KEY},
            "name": {"truncate": 2},
            "note": None,
            "salary": {"fixed": 0},
            "tags": None,
            "document": {"fixed": "***"},
        }
    }
}


def digest(value: str) -> str:
    return hmac.new(KEY.encode(), value.encode(), hashlib.sha256).hexdigest()


def caught_up(line: PipelineUnderTest, events: int) -> list[dict[str, Any]]:
    """Return this many events, by seq, once the log holds them."""

    def found() -> list[dict[str, Any]]:
        return [record.event for record in data_records(line) if record.value is not None]

    wait_until(lambda: len(found()) >= events, f"the log lacks events: {len(found())} of {events}")
    return sorted(found(), key=lambda event: event["source"]["seq"])


def everything(line: PipelineUnderTest) -> bytes:
    """Return the bytes of every record of every topic, aborted ones too, and the daemons' logs."""
    prefix = f"{line.config.prefix}."
    records = records_of(line, lambda t: t.startswith(prefix), isolation="read_uncommitted")
    logs = [daemon.log.encode() for daemon in line.daemons]
    return b"\n".join([*((r.key or b"") + (r.value or b"") for r in records), *logs])


class Secrets:
    """Random values that do not occur by chance."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.reported: list[str] = []

    def text(self) -> str:
        self.reported.append(f"secret{self._random.getrandbits(80):020x}")
        return self.reported[-1]

    def number(self) -> int:
        value = self._random.randrange(10**17, 10**18)
        self.reported.append(str(value))
        return value

    def row(self) -> tuple[Any, ...]:
        text = self.text
        long = "".join(text() for _ in range(200))  # long enough to be stored out of line
        document = orjson.dumps({"a": text()}).decode()
        return text(), text(), text(), long, self.number(), [text(), text()], document


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_no_clear_value_is_in_any_topic_or_in_the_log(pipeline: NewPipeline, identity: str) -> None:
    seed = 20_260_101
    secrets = Secrets(seed)
    line = pipeline(
        USERS,
        "ALTER TABLE users ALTER note SET STORAGE EXTERNAL",
        f"ALTER TABLE users REPLICA IDENTITY {identity}",
        tables=MASKS,
        log={"partitions": 3},
    )
    line.start(config_file=line.write("debug.yaml", log_level="debug")).wait_ready()
    rows = [secrets.row() for _ in range(30)]
    with line.database.connect() as connection:
        for row in rows:
            connection.execute("INSERT INTO users VALUES (%s, %s, %s, %s, %s, %s, %s, 'seen')", row)
        for row in rows[:10]:
            # The note is not sent again: it is unchanged.
            connection.execute(
                "UPDATE users SET email = %s, salary = %s WHERE id = %s",
                (secrets.text(), secrets.number(), row[0]),
            )
        for row in rows[10:20]:
            connection.execute("UPDATE users SET id = %s WHERE id = %s", (secrets.text(), row[0]))
        for row in rows[20:]:
            connection.execute("DELETE FROM users WHERE id = %s", (row[0],))
    events = caught_up(line, 30 + 10 + 2 * 10 + 10)
    assert [event["op"] for event in events] == ["c"] * 30 + ["u"] * 10 + ["d", "c"] * 10 + [
        "d"
    ] * 10
    assert line.daemon.term() == 0
    reported = everything(line)
    assert b"seen" in reported
    leaked = [text for text in secrets.reported if text.encode() in reported]
    assert not leaked, f"seed {seed}"
    first = events[0]["after"]
    assert first == {
        "id": digest(rows[0][0]),
        "email": digest(rows[0][1]),
        "name": "se",
        "note": None,
        "salary": 0,
        "tags": None,
        "document": "***",
        "plain": "seen",
    }


def test_a_masked_key_is_one_key_for_one_row(pipeline: NewPipeline) -> None:
    """Partition, tombstone and changed key follow the masked key, as they would the clear one."""
    line = pipeline(USERS, tables=MASKS)
    line.start().wait_ready()
    line.database.execute(
        "INSERT INTO users (id, plain) VALUES ('ada', 'x')",
        "UPDATE users SET plain = 'y' WHERE id = 'ada'",
        "UPDATE users SET id = 'eve' WHERE id = 'ada'",
        "DELETE FROM users WHERE id = 'eve'",
    )
    caught_up(line, 5)
    keys = {name: orjson.dumps({"id": digest(name)}) for name in ("ada", "eve")}
    found = [r for r in data_records(line) if r.key == keys["ada"]]
    assert [r.value and r.event["op"] for r in found] == ["c", "u", "d", None]
    assert len({r.partition for r in found}) == 1
    found = [r for r in data_records(line) if r.key == keys["eve"]]
    assert [r.value and r.event["op"] for r in found] == ["c", "d", None]
    assert found[-2].event["before"] == {"id": digest("eve")}


def test_the_schema_record_names_the_masked_columns(pipeline: NewPipeline) -> None:
    line = pipeline(USERS, tables=MASKS)
    line.start().wait_ready()
    line.database.execute("INSERT INTO users (id) VALUES ('ada')")
    caught_up(line, 1)
    topic = f"{line.config.prefix}.cdc.schema"
    (record,) = [
        r for r in records_of(line, lambda name: name == topic) if is_schema_key(r.key or b"")
    ]
    masks = {column["name"]: column.get("mask") for column in record.event["columns"]}
    assert masks["id"] == masks["email"]
    assert masks["id"].startswith("hmac:")
    assert masks | {"id": 0, "email": 0} == {
        "id": 0,
        "email": 0,
        "name": "truncate:2",
        "note": "null",
        "salary": "fixed",
        "tags": "null",
        "document": "fixed",
        "plain": None,
    }
    assert KEY.encode() not in everything(line)


def test_null_stays_null_but_where_the_mask_says_otherwise(pipeline: NewPipeline) -> None:
    line = pipeline(USERS, tables=MASKS)
    line.start().wait_ready()
    line.database.execute("INSERT INTO users (id) VALUES ('ada')")
    (event,) = caught_up(line, 1)
    after = event["after"]
    assert (after["email"], after["name"], after["salary"]) == (None, None, 0)


@pytest.mark.long("the other rename", sample=["column"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("ALTER TABLE users RENAME email TO mail", "a hidden column: email (column 2) is mail"),
        ("ALTER TABLE users RENAME TO people", "so far, and no longer names them"),
    ],
    ids=["column", "table"],
)
def test_a_rename_does_not_show_what_was_hidden(
    pipeline: NewPipeline, change: str, says: str
) -> None:
    line = pipeline(USERS, tables=MASKS)
    line.start().wait_ready()
    line.database.execute("INSERT INTO users (id, email) VALUES ('ada', 'secret one')")
    caught_up(line, 1)
    line.database.execute(change)
    table = "people" if "people" in change else "users"
    column = "mail" if "mail" in change else "email"
    line.database.execute(f"INSERT INTO {table} (id, {column}) VALUES ('eve', 'secret two')")
    line.ends(line.daemon, 78, says, "keep")
    assert b"secret" not in everything(line)
    # Masked by its new name, the daemon continues where it stopped.
    rule = MASKS["public.users"]["mask"]
    section = {f"public.{table}": {"mask": {**rule, column: {"hmac": KEY}}}}
    line.start(config_file=line.write("renamed.yaml", tables=section)).wait_ready()
    events = caught_up(line, 2)
    assert events[-1]["after"][column] == digest("secret two")
    assert b"secret" not in everything(line)


def test_a_mask_taken_away_by_a_slip_of_the_pen_stops_the_daemon(pipeline: NewPipeline) -> None:
    line = pipeline(USERS, tables=MASKS)
    line.start().wait_ready()
    line.database.execute("INSERT INTO users (id, email) VALUES ('ada', 'secret one')")
    caught_up(line, 1)
    assert line.daemon.term() == 0
    line.database.execute("INSERT INTO users (id, email) VALUES ('eve', 'clear')")
    kept = MASKS["public.users"]["mask"] | {"email": None}
    del kept["email"]
    without = line.write("without.yaml", tables={"public.users": {"mask": kept}})
    line.refused(78, "hid email so far, and no longer names them", config_file=without)
    meant = line.write("meant.yaml", tables={"public.users": {"mask": kept | {"email": "keep"}}})
    line.start(config_file=meant).wait_ready()
    assert caught_up(line, 2)[-1]["after"]["email"] == "clear"


@pytest.mark.pg(">= 15")
def test_an_excluded_column_that_postgres_still_sends_is_null(pipeline: NewPipeline) -> None:
    """In rows from before the publication excluded it, and with REPLICA IDENTITY FULL."""
    line = pipeline(USERS, "CREATE TABLE full_rows (id int PRIMARY KEY, a text)",
                    "ALTER TABLE full_rows REPLICA IDENTITY FULL")  # fmt: skip
    line.database.execute(
        "INSERT INTO users (id, email) VALUES ('ada', 'secret one')",
        "INSERT INTO full_rows VALUES (1, 'secret two')",
    )
    line.config_file = line.write(
        "lockstep.yaml",
        tables={"public.users": {"exclude": ["email"]}, "public.full_rows": {"exclude": ["a"]}},
    )
    line.set_up()
    line.database.execute(
        "INSERT INTO users (id) VALUES ('eve')", "UPDATE full_rows SET a = 'secret'"
    )
    line.start().wait_ready()
    events = caught_up(line, 4)
    assert [event["after"].get("email", "absent") for event in events[::2]] == [None, "absent"]
    assert (events[1]["after"], events[3]["before"]) == ({"id": 1, "a": None}, {"id": 1, "a": None})
    assert b"secret" not in everything(line)


def test_a_dead_letter_is_masked_as_the_event_is(
    pipeline: NewPipeline, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    line = pipeline(USERS, tables=MASKS)
    set_limit(line.bootstrap, names.data_topic(line.config.prefix, "public", "users"), 1_100_000)
    line.start().wait_ready()
    line.database.execute(
        "INSERT INTO users (id, email, note, plain) SELECT 'secret id', 'secret mail',"
        " repeat('secret', 10000), string_agg(md5(i::text), '') FROM generate_series(1, 40000) i"
    )
    (event,) = caught_up(line, 1)
    assert "dead" in event["source"]
    capsysbinary.readouterr()
    assert run(["dead", "show", event["source"]["dead"]["id"], "-c", str(line.config_file)]) == 0
    letter = capsysbinary.readouterr().out
    complete = orjson.loads(letter)["after"]
    assert (complete["id"], complete["email"], complete["note"]) == (
        digest("secret id"),
        digest("secret mail"),
        None,
    )
    assert len(complete["plain"]) == 1_280_000
    assert b"secret" not in letter + everything(line)
