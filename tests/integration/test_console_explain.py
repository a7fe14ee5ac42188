"""A row's versions without an archive: searched from the end of its topic, on a real log."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cdc.console import key_search
from cdc.console.key_search import KeySearch
from cdc.errors import ConfigError
from tests.fixtures.console import ConsoleUnderTest
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.integration.test_topic_cleanup import overwritten

TABLES = (
    "CREATE TABLE users (id int PRIMARY KEY, name text, body text, card text)",
    "ALTER TABLE users ALTER body SET STORAGE EXTERNAL",
)
MASKS = {"public.users": {"mask": {"card": {"fixed": "hidden"}}}}
LONG = "z" * 3_000


def ops(answer: dict[str, Any]) -> list[str]:
    return [each["op"] for each in answer["versions"]]


def explained(shown: ConsoleUnderTest, key: str) -> dict[str, Any]:
    """Return the last answer of a search that went on until it was complete, with all versions.

    An answer comes after 0.6 s, with what was found by then.
    """
    versions, before, events = list[dict[str, Any]](), "", 0
    while True:
        status, answer = shown.get(f"/api/explain?table=public.users&key={key}&before={before}")
        assert status == 200
        assert answer["count"] == len(answer["versions"])
        versions = answer["versions"] + versions
        events += answer["searched"]["events"]
        if answer["searched"]["complete"]:
            answer["searched"]["events"] = events
            return {**answer, "versions": versions}
        assert answer["searched"]["before"] != before, "it does not go on"
        before = answer["searched"]["before"]


def logged(made: PipelineUnderTest, seq: int) -> None:
    """Wait until the log has so many changes."""
    wait_until(lambda: made.resume()[1].seq >= seq, "the changes are not in the log")


@pytest.fixture
def written(pipeline: NewPipeline) -> PipelineUnderTest:
    """A row with every kind of change, among two thousand others."""
    made = pipeline(
        *TABLES,
        tables=MASKS,
        log={"kafka": {"message.max.bytes": 60_000}},
        source={"canary_seconds": 0},
    )
    made.start().wait_ready()
    made.database.execute(
        "TRUNCATE users",
        f"INSERT INTO users VALUES (7, 'a', '{LONG}', '4111')",
        "INSERT INTO users SELECT g, 'x' FROM generate_series(1001, 2000) g",
        "UPDATE users SET name = 'b' WHERE id = 7",
        "INSERT INTO users SELECT g, 'x' FROM generate_series(2001, 3000) g",
        "UPDATE users SET body = repeat('w', 200000) WHERE id = 7",
        "TRUNCATE users",
        "INSERT INTO users VALUES (7, 'c')",
        "DELETE FROM users WHERE id = 7",
        "INSERT INTO users VALUES (8, 'other')",
    )
    logged(made, 2_008)
    return made


def test_the_console_explains_a_value_without_an_archive(
    written: PipelineUnderTest, tmp_path: Path
) -> None:
    shown = ConsoleUnderTest(written.config_file, tmp_path / "console.log")
    try:
        answer = explained(shown, "7")
        # The first truncate was before the row, and is none of its versions.
        assert ops(answer) == ["insert", "update", "update", "truncate", "insert", "delete"]
        first, second, third, cleared, *_ = answer["versions"]
        assert first["after"] == {"id": 7, "name": "a", "body": LONG, "card": "hidden"}
        assert second["after"] == first["after"] | {"name": "b"}  # Postgres did not send the body
        assert (second["unknown"], second["held_by"]) == ([], "topic")
        assert third["unknown"] == ["body"]  # in a dead letter
        assert "body" not in third["after"]
        assert cleared["after"] is None
        assert [each["seq"] for each in answer["versions"]] == sorted(
            each["seq"] for each in answer["versions"]
        )
        searched = answer["searched"]
        assert (searched["before"], searched["lsn"], searched["compacted"]) == ("", None, False)
        assert searched["events"] > 600
        assert explained(shown, "123456")["versions"] == []
        for query, why in (
            ("table=public.nothing&key=7", "has a table public.nothing"),
            ("table=public.users&key=7&before=x", "none"),
            ('table=public.users&key={"x":1}', "has the columns id"),
        ):
            _, refused = shown.get(f"/api/explain?{query}")
            assert refused["versions"] is None
            assert why in refused["error"]
    finally:
        shown.close()


def pages(made: PipelineUnderTest, key: str) -> list[dict[str, Any]]:
    """Return the answers of a search that goes on until it is complete."""
    found, before = list[dict[str, Any]](), ""
    while not found or not found[-1]["searched"]["complete"]:
        found.append(KeySearch(made.config, "public.users", key, before).run())
        assert found[-1]["searched"]["before"] != before, "it does not go on"
        before = found[-1]["searched"]["before"]
    return found


def test_a_search_that_ends_early_says_how_far_it_is_and_goes_on_there(
    written: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_search, "SECONDS", 60.0)
    complete = KeySearch(written.config, "public.users", "7").run()
    monkeypatch.setattr(key_search, "SECONDS", 0.0)  # one chunk each
    monkeypatch.setattr(key_search, "FIRST", 100)
    found = pages(written, "7")
    assert len(found) > 5
    seqs = [each["seq"] for page in reversed(found) for each in page["versions"]]
    assert seqs == [each["seq"] for each in complete["versions"]]
    assert [each["op"] for page in reversed(found) for each in page["versions"]] == ops(complete)
    searched = [page["searched"] for page in found]
    assert all(each["events"] <= 200 for each in searched)  # two partitions at most
    lsns = [each["lsn"] for each in searched[:-1]]
    assert all(lsns)
    assert [each["at"] for each in searched[:-1]] == sorted(
        (each["at"] for each in searched[:-1]), reverse=True
    )
    # Without the version that has it, a value that Postgres did not send is unknown.
    alone = [each for page in found for each in page["versions"] if "body" in each["unsent"]]
    assert [each["unknown"] for each in alone] == [["body"]]


def test_a_row_of_many_versions_is_shown_in_parts(
    pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pipeline(*TABLES, source={"canary_seconds": 0})
    made.start().wait_ready()
    made.database.execute("INSERT INTO users VALUES (7, '0')")
    with made.database.connect() as connection:
        for number in range(1, 60):
            connection.execute("UPDATE users SET name = %s WHERE id = 7", [str(number)])
    logged(made, 60)
    monkeypatch.setattr(key_search, "MOST_HITS", 25)
    found = pages(made, "7")
    assert [len(page["versions"]) for page in found] == [25, 25, 10]
    names = [each["after"]["name"] for page in reversed(found) for each in page["versions"]]
    assert names == [str(number) for number in range(60)]


def test_a_compacted_topic_shows_what_is_left_and_that_it_is_compacted(
    pipeline: NewPipeline,
) -> None:
    line = overwritten(pipeline)
    line.update(12)
    line.compact()
    answer = KeySearch(line.config, "public.users", "3").run()
    assert answer["searched"]["compacted"]
    assert answer["searched"]["complete"]
    assert 0 < answer["count"] < 13
    assert answer["versions"][-1]["after"] == {"id": 3, "n": 12}


def test_it_takes_a_second_however_long_the_topic_is(written: PipelineUnderTest) -> None:
    """And less than that where the machine is not busy: the limit is what a search reads for."""
    made = written
    made.database.execute(
        "INSERT INTO users SELECT g, repeat('y', 100) FROM generate_series(10001, 160000) g"
    )
    logged(made, 152_008)
    began = time.monotonic()
    answer = KeySearch(made.config, "public.users", "159999").run()
    took = time.monotonic() - began
    assert ops(answer) == ["insert"]
    assert answer["searched"]["events"] > 500
    assert took < 60  # of a machine that runs other tests too
    with pytest.raises(ConfigError, match=r"has a table public\.other"):
        KeySearch(made.config, "public.other", "1").run()
