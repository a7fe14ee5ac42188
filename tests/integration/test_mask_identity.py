"""A masked name that moves to another column: no hidden value is shown, and the remedy works.

Each test changes a table with the statements that people use, and reads every byte of every topic.
"""

from __future__ import annotations

from typing import Any

import pytest

from cdc.cli.main import run
from cdc.errors import ConfigError
from cdc.operate.commands import tables
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.integration.test_masks import caught_up, digest, everything

KEY = "a key of the tests' own"
USERS = "CREATE TABLE users (id int PRIMARY KEY, nick text, email text)"
HMAC = {"hmac": KEY}
MASKED = {"public.users": {"mask": {"email": HMAC}}}

# The transactions of each change; `CHANGES` adds the name that hidden values have afterwards.
RENAME_AND_ADD = [
    (
        "BEGIN; ALTER TABLE users RENAME email TO email_old; ALTER TABLE users ADD email text;"
        " UPDATE users SET email = lower(email_old); COMMIT"
    )
]
SWAP_IN_ONE = [
    (
        "BEGIN; ALTER TABLE users RENAME email TO x; ALTER TABLE users RENAME nick TO email;"
        " ALTER TABLE users RENAME x TO nick; UPDATE users SET id = id + 100; COMMIT"
    )
]
SWAP_IN_THREE = [
    "ALTER TABLE users RENAME email TO x",
    "ALTER TABLE users RENAME nick TO email",
    "ALTER TABLE users RENAME x TO nick",
    "UPDATE users SET id = id + 100",
]
# The relation message is the same as before.
SAME_LIST = [
    (
        "BEGIN; ALTER TABLE users DROP nick; ALTER TABLE users RENAME email TO nick;"
        " ALTER TABLE users ADD email text; UPDATE users SET id = id + 100; COMMIT"
    )
]
SAME_LIST_IN_THREE = [
    "ALTER TABLE users DROP nick",
    "ALTER TABLE users RENAME email TO nick",
    "ALTER TABLE users ADD email text",
    "UPDATE users SET id = id + 100",
]
CHANGES = {
    "rename_and_add": (RENAME_AND_ADD, "email_old"),
    "swap_in_one": (SWAP_IN_ONE, "nick"),
    "swap_in_three": (SWAP_IN_THREE, "nick"),
    "same_list": (SAME_LIST, "nick"),
    "same_list_in_three": (SAME_LIST_IN_THREE, "nick"),
}
each_change = pytest.mark.parametrize("change", CHANGES)


def insert(line: PipelineUnderTest, number: int, column: str = "email") -> None:
    line.database.execute(
        f"INSERT INTO users (id, {column}) VALUES ({number}, 'Secret{number}@x.org')"
    )


def shows_nothing(line: PipelineUnderTest) -> None:
    assert b"secret" not in everything(line).lower()


def goes_on(line: PipelineUnderTest, name: str, events: int) -> dict[str, Any]:
    """Apply the remedy: hide the column by its new name too; return the new row's event.

    A requested snapshot continues alongside, before or after it.
    """
    masks = {"public.users": {"mask": {"email": HMAC, name: HMAC}}}
    line.config_file = line.write("remedy.yaml", tables=masks)
    line.set_up()
    line.start().wait_ready()
    insert(line, 50, name)
    found: list[dict[str, Any]] = []

    def inserted() -> bool:
        found[:] = [e for e in caught_up(line, events) if e["after"] and e["after"]["id"] == 50]
        return bool(found)

    wait_until(inserted, "the row does not arrive")
    assert found[-1]["after"][name] == digest("Secret50@x.org")
    assert line.daemon.term() == 0
    shows_nothing(line)
    return found[-1]


@pytest.mark.long("the other changes", sample=["same_list_in_three"])
@each_change
def test_while_the_daemon_runs(pipeline: NewPipeline, change: str) -> None:
    statements, name = CHANGES[change]
    line = pipeline(USERS, tables=MASKED)
    line.start().wait_ready()
    insert(line, 1)
    caught_up(line, 1)
    line.database.execute(*statements)
    line.ends(line.daemon, 78, "would show a hidden column", f" {name};", "mask")
    shows_nothing(line)
    with pytest.raises(ConfigError, match=f"would be shown as {name}"):
        line.set_up()
    goes_on(line, name, 3)


@pytest.mark.long("as while it runs")
@each_change
def test_while_the_daemon_is_stopped(pipeline: NewPipeline, change: str) -> None:
    statements, name = CHANGES[change]
    line = pipeline(USERS, tables=MASKED)
    line.start().wait_ready()
    insert(line, 1)
    caught_up(line, 1)
    assert line.daemon.term() == 0
    insert(line, 2)
    line.database.execute(*statements)
    line.refused(78, "would show a hidden column", "mask")
    shows_nothing(line)
    goes_on(line, name, 4)


@pytest.mark.long("as while the daemon runs")
@each_change
def test_between_setup_and_the_first_run(pipeline: NewPipeline, change: str) -> None:
    statements, name = CHANGES[change]
    line = pipeline(USERS, tables=MASKED)
    insert(line, 1)
    line.database.execute(*statements)
    line.refused(78, "would show a hidden column", "mask")
    shows_nothing(line)
    goes_on(line, name, 3)


@pytest.mark.long("as while the daemon runs")
@each_change
def test_before_an_initial_snapshot(pipeline: NewPipeline, change: str) -> None:
    statements, name = CHANGES[change]
    line = pipeline(
        USERS, "INSERT INTO users VALUES (1, 'n', 'Secret1@x.org')",
        tables=MASKED, snapshot={"mode": "initial"},
    )  # fmt: skip
    line.database.execute(*statements)
    line.refused(78, "would show a hidden column", "mask")
    shows_nothing(line)
    goes_on(line, name, 2)


@pytest.mark.long("as while the daemon runs")
@each_change
def test_by_a_snapshot_of_the_running_daemon(pipeline: NewPipeline, change: str) -> None:
    """Only the snapshot makes the daemon look at the table."""
    statements, name = CHANGES[change]
    line = pipeline(USERS, tables=MASKED)
    line.start().wait_ready()
    insert(line, 1)
    caught_up(line, 1)
    for statement in statements:
        if not statement.startswith("UPDATE"):
            before, update, _ = statement.partition("; UPDATE")
            line.database.execute(f"{before}; COMMIT" if update else before)
    assert run(["snapshot", "public.users", "-c", str(line.config_file)]) == 0
    line.ends(line.daemon, 78, "would show a hidden column", f" {name};", "mask")
    shows_nothing(line)
    goes_on(line, name, 2)


def test_a_mask_is_not_recorded_alongside_a_daemon_that_does_not_have_it(
    pipeline: NewPipeline,
) -> None:
    """It masks by the configuration that it started with: the values would be sent in clear."""
    line = pipeline(USERS)
    line.start().wait_ready()
    line.config_file = line.write("masked.yaml", tables=MASKED)
    with pytest.raises(ConfigError, match=r"public\.users \(email\); and the daemon that runs"):
        line.set_up()
    later = {"public.later": {"mask": {"word": "null"}}}
    line.database.execute("CREATE TABLE later (id int PRIMARY KEY, word text)")
    line.config_file = line.write("later.yaml", tables=later)
    with pytest.raises(ConfigError, match=r"public\.later \(word\); and the daemon that runs"):
        tables.add(line.config, ["public.later"])
    assert line.daemon.term() == 0
    line.config_file = line.write("masked.yaml", tables=MASKED | later)
    line.set_up()
    line.start().wait_ready()
    insert(line, 1)
    (found,) = caught_up(line, 1)
    assert found["after"]["email"] == digest("Secret1@x.org")
    shows_nothing(line)


@pytest.mark.long("tests/property/test_column_identity.py renames there and back")
def test_a_column_that_was_renamed_there_and_back(pipeline: NewPipeline) -> None:
    """No column has the name any more that the daemon must hide: `cdc run` alone takes it."""
    line = pipeline(USERS, tables=MASKED)
    line.start().wait_ready()
    insert(line, 1)
    caught_up(line, 1)
    line.database.execute(
        "ALTER TABLE users RENAME email TO other",
        "INSERT INTO users (id, other) VALUES (2, 'Secret2@x.org')",
        "ALTER TABLE users RENAME other TO email",
    )
    line.ends(line.daemon, 78, "hide other too", "refuses it: only `cdc run`")
    line.config_file = line.write(
        "remedy.yaml", tables={"public.users": {"mask": {"email": HMAC, "other": HMAC}}}
    )
    with pytest.raises(ConfigError, match="only `cdc run` takes it"):
        line.set_up()
    line.start().wait_ready()
    assert [each["after"]["id"] for each in caught_up(line, 2)] == [1, 2]
    assert line.daemon.term() == 0
    line.config_file = line.write("lockstep.yaml")
    line.set_up()
    line.start().wait_ready()
    insert(line, 3)
    assert caught_up(line, 3)[-1]["after"]["email"] == digest("Secret3@x.org")
    shows_nothing(line)
