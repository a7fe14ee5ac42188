"""The console answers its own page alone, and shows what it knows, never more."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from msgspec import structs

from cdc.config import Config, Log, Source, load
from cdc.config.followers import Follower
from cdc.config.webhooks import Webhook
from cdc.console import actions, commands, dead, explain, feed, flow, server
from cdc.console.collector import stale
from cdc.console.dead import DeadLetterList
from cdc.console.guard import HEADERS, LOOPBACK, Guard, name_of
from cdc.console.incidents import Incidents
from cdc.console.latency import Lateness
from cdc.errors import ConfigError, UnavailableError
from cdc.events import LSN
from cdc.log.completeness import IncompleteTopic
from cdc.log.sample import Arrivals, Sample
from cdc.log.tail import Arrived
from cdc.operate.findings import Level
from cdc.operate.followers import FollowerStatus
from cdc.operate.status import Status
from cdc.operate.verdict import Verdict
from tests.fixtures.reported import reported

_TOKEN = "0123456789abcdef0123456789abcdef"
_ACTS = Config(
    pipeline="p",
    source=Source(dsn=""),
    log=Log(bootstrap_servers=""),
    followers={"cache": Follower()},
    webhooks={"hook": Webhook(url="https://x", secrets=("s",), tables=("public.t",))},
)
_PAGE = Path(explain.__file__).parent / "page"


def ask(path: str = "/api/status", token: str | None = None, **headers: str) -> tuple[int, Any]:
    """Return status and headers of a guarded application that answers everything with 200."""

    async def app(_: Any, __: Any, send: Any) -> None:  # noqa: ANN401 - ASGI
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    sent: list[Any] = []

    async def send(message: Any) -> None:  # noqa: ANN401 - as above
        sent.append(message)

    async def receive() -> Any:  # noqa: ANN401 - as above
        return {"type": "http.disconnect"}

    named = {"host": "localhost:8600", **headers}
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()]
    scope = {"type": "http", "path": path, "headers": given}
    asyncio.run(Guard(app, {*LOOPBACK, "cdc.example"}, token)(scope, receive, send))
    return sent[0]["status"], sent[0]["headers"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:8600", "CDC.example:443"])
def test_the_console_answers_to_its_own_names(host: str) -> None:
    assert ask(host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:8600", "127.0.0.1.evil.example", "", "[::2]"]
)
@pytest.mark.parametrize("path", ["/", "/api/status"])
def test_a_name_that_was_rebound_to_loopback_is_refused(host: str, path: str) -> None:
    assert ask(path, host=host)[0] == 421


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "file://", "http://["]
)
def test_a_page_of_another_origin_is_refused(origin: str) -> None:
    assert ask(origin=origin)[0] == 403
    assert ask(origin="http://localhost:8600")[0] == 200


def test_a_page_of_another_site_gets_no_data_even_without_an_origin() -> None:
    assert ask(sec_fetch_site="cross-site")[0] == 403
    assert ask(sec_fetch_site="same-site")[0] == 403
    assert ask(sec_fetch_site="same-origin")[0] == 200
    assert ask("/", sec_fetch_site="cross-site")[0] == 200  # a link to the console


def test_what_changes_something_is_asked_for_by_the_page() -> None:
    """A form of another site sends none of these headers, and its own origin."""
    page = {
        "origin": "http://localhost:8600",
        "content_type": "application/json",
        "x_lockstep_console": "1",
    }
    assert ask("/api/act", **page)[0] == 200
    assert ask("/api/act", **page, sec_fetch_site="same-origin")[0] == 200
    for name in page:
        lacking = {each: value for each, value in page.items() if each != name}
        assert ask("/api/act", **lacking)[0] == 403, name
    for name, value in (
        ("origin", "http://evil.example"),
        ("content_type", "text/plain"),
        ("x_lockstep_console", "0"),
    ):
        assert ask("/api/act", **page | {name: value})[0] == 403, name
    assert ask("/api/act", **page, sec_fetch_site="none")[0] == 403
    assert ask("/api/act", _TOKEN, **page)[0] == 401


def test_data_needs_the_token_and_the_page_does_not() -> None:
    assert ask("/", _TOKEN)[0] == 200
    for given in ("", "Bearer", f"Basic {_TOKEN}", f"Bearer {_TOKEN[:-1]}", f"Bearer {_TOKEN}é"):
        assert ask(token=_TOKEN, authorization=given)[0] == 401
    assert ask(token=_TOKEN, authorization=f"Bearer {_TOKEN}")[0] == 200


def test_every_answer_forbids_inline_scripts_and_other_servers() -> None:
    for answer in (ask("/"), ask(), ask(host="evil.example"), ask(token=_TOKEN)):
        assert set(HEADERS) <= set(answer[1])
    policy = dict(HEADERS)[b"content-security-policy"].decode()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


def test_the_page_makes_no_markup_of_text_and_asks_nobody_else() -> None:
    """What its policy would refuse is not in it; what turns text into markup is not, either."""
    for file in _PAGE.iterdir():
        text = file.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, file.name
        for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
            assert word not in text, file.name
        if file.suffix == ".html":
            assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", text)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.0.0.1:0", "cdc.example:0"])
def test_an_address_that_others_reach_needs_a_token(listen: str) -> None:
    with pytest.raises(ConfigError, match="no token"):
        server.bind(listen, is_guarded=False)


@pytest.mark.parametrize("listen", ["", "8600", "localhost:", "localhost:http", "localhost:65536"])
def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        server.bind(listen, is_guarded=False)


def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for bad in ("", "short", "a" * 31, "a" * 16 + " " + "b" * 16, "a" * 32 + "\nb"):
        file.write_text(bad, "utf-8")
        with pytest.raises(ConfigError, match="32 or more"):
            server.read_token(file)
    with pytest.raises(ConfigError, match="cannot read"):
        server.read_token(tmp_path / "missing")
    file.write_text(f"{_TOKEN}\n", "utf-8")
    assert server.read_token(file) == _TOKEN
    assert server.read_token(None) is None


def test_host_names_are_read_without_their_ports() -> None:
    assert [name_of(host) for host in ("A.b:1", "a.b", "[::1]:8", "[::1]", "::1")] == [
        *("a.b", "a.b", "::1", "::1", "::1"),
    ]


def test_the_error_of_a_command_is_shown_and_a_bugs_places_are_not() -> None:
    found = commands.error_of(
        "history", b"noise: 1\ncdc: no such key\nwhat to do: give all columns\n"
    )
    assert (found.what, found.hint) == ("no such key", "give all columns")
    assert commands.error_of("history", b"archived: a bug in Lockstep:\n/x.py:1\n").what == (
        "cdc history has failed"
    )


@pytest.mark.parametrize(
    ("action", "target", "number", "command"),
    [
        ("snapshot", "public.t", "", "cdc snapshot start public.t"),
        ("snapshot", "public.<img src=x>", "", "cdc snapshot start 'public.<img src=x>'"),
        ("pause", "", "", "cdc snapshot pause"),
        ("resume", "", "3f9a", "cdc snapshot resume 3f9a"),
        ("rebuild", "cache", "", "cdc rebuild cache"),
        ("send", "hook", "p-1-7", "cdc webhook send hook p-1-7"),
        ("discard", "queue.a.b", "p-1-7", "cdc queue discard --yes a.b p-1-7"),
        ("retry", "a.b", "p-1-7", "cdc queue retry a.b p-1-7"),
    ],
)
def test_an_action_is_a_command(action: str, target: str, number: str, command: str) -> None:
    assert shlex.join(("cdc", *actions.words_of(_ACTS, action, target, number))) == command


@pytest.mark.parametrize(
    ("action", "target", "number"),
    [
        ("snapshot", "", ""),
        ("snapshot", "--initial", ""),
        ("snapshot", "a.b\nc", ""),
        ("snapshot", "x" * 1_001, ""),
        ("pause", "", "--help"),
        ("pause", "", "a b"),
        ("rebuild", "other", ""),
        ("rebuild", "cache", "--drop-old"),
        ("send", "other", "p-1-7"),
        ("send", "hook", ""),
        ("discard", "group.x", "p-1-7"),
        ("retry", "", "p-1-7"),
        ("retry", "--json", "p-1-7"),
        ("retry", "mail", ""),
        ("discard", "webhook.", "p-1-7"),
        ("discard", "webhook.other", "p-1-7"),
        ("discard", "webhook.-cother.yaml", "hook"),
        ("discard", "queue.--json", "mail"),
        ("teardown", "", ""),
        ("", "", ""),
    ],
)
def test_what_is_no_action_is_refused(action: str, target: str, number: str) -> None:
    with pytest.raises(ConfigError):
        actions.words_of(_ACTS, action, target, number)


def test_viewers_share_one_reading_of_dead_letters_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = 0

    class Readings:
        def __init__(self, _: Config) -> None:
            """Need no broker."""

        def read_new(self) -> None:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise UnavailableError("no broker answers", hint="wait")

        def undelivered(self) -> list[Any]:
            return []

    async def run() -> None:
        found = DeadLetterList(_ACTS, Path())
        asked = (found.given_up() for _ in range(5))
        for each in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(each, UnavailableError)
        assert tries == 1
        monkeypatch.setattr(dead, "SHARED_SECONDS", 0.0)
        assert (await found.given_up())["count"] == 0

    monkeypatch.setattr(dead, "GroupReadings", Readings)
    asyncio.run(run())


# -- the feed ------------------------------------------------------------------------------------


@pytest.fixture
def followed(tmp_path: Path) -> feed.Feed:
    """A feed that reads nothing by itself."""
    file = tmp_path / "lockstep.yaml"
    file.write_text(
        "pipeline: p\nsource: {dsn: host=localhost}\n"
        "log: {bootstrap_servers: 'localhost:9092', prefix: p}\n",
        "utf-8",
    )
    return feed.Feed(load(file, {}))


def arrived(seq: int, op: str = "c", table: str = "t", **row: object) -> Arrived:
    source = {"seq": seq, "commit_lsn": "0/1", "schema": "public", "table": table}
    event = {"op": op, "source": source, "ts_ms": 1_000, "before": None, "after": row}
    return Arrived(f"p.public.{table}", 0, seq, 1_005, b'{"id":%d}' % seq, event)


def take(followed: feed.Feed, *found: Arrived, events: int = 0, now: float = 0.0) -> None:
    topics = {each.topic: Arrivals(events or len(found), 1_005) for each in found}
    followed.note(Sample(topics, list(found)), now)


def test_a_viewer_gets_each_kept_event_once_and_in_order(followed: feed.Feed) -> None:
    numbers, at = [], 0
    for seq in range(1, 301):
        take(followed, arrived(seq))
        if seq % 7 == 0 or seq == 300:
            entries, at, skipped = followed.since(at, feed.Filter(), 100)
            numbers += [each.number for each in entries]
            assert skipped == 0
    assert numbers == list(range(1, 301))


def test_a_slow_viewer_skips_events_and_learns_how_many(followed: feed.Feed) -> None:
    for seq in range(1, 5_001):
        take(followed, arrived(seq))
    entries, at, skipped = followed.since(0, feed.Filter(), 100)
    assert [each.number for each in entries] == list(range(4_901, 5_001))
    assert (at, skipped) == (5_000, 4_900)


def test_events_are_filtered_by_table_operation_and_key(followed: feed.Feed) -> None:
    take(followed, arrived(1), arrived(2, "d"), arrived(3, table="users"))

    def found(**wanted: Any) -> list[int]:  # noqa: ANN401 - a filter's fields
        return [each.number for each in followed.since(0, feed.Filter(**wanted), 9)[0]]

    assert found() == [1, 2, 3]
    assert found(table="public.t") == [1, 2]
    assert found(ops=frozenset("d")) == [2]
    assert found(key=":3}") == [3]
    assert found(table="t", ops=frozenset("c"), key="1") == [1]


def test_events_that_are_not_shown_are_counted(followed: feed.Feed) -> None:
    take(followed, arrived(1), events=1_000, now=5.0)
    assert (followed.arrived, followed.kept) == (1_000, 1)
    assert followed.rate() == 100.0
    assert followed.tables()["p.public.t"]["events"] == 1_000
    take(followed, now=20.0)
    assert followed.rate() == 0.0


def test_a_long_value_is_cut_and_a_short_one_is_as_it_is(followed: feed.Feed) -> None:
    row = {"a": "x" * 5_000, "b": "<img>", "c": None, "d": True, "e": [1, "z" * 900]}
    cut = feed.shortened(row)
    assert isinstance(cut, dict)
    assert len(cut["a"]) == len(cut["e"]) == 401
    assert (cut["b"], cut["c"], cut["d"]) == ("<img>", None, True)


def test_an_integer_that_a_browser_would_round_is_text_and_the_key_is_the_logs(
    followed: feed.Feed,
) -> None:
    key = b'{"id":9007199254740993,"doc":{"n":-9007199254740995}}'
    row: dict[str, Any] = {
        "id": 9_007_199_254_740_993,
        "low": -(1 << 63),
        "small": 1 << 53,
        "is": True,
    }
    take(followed, arrived(1, **row)._replace(key=key))
    body = orjson.loads(followed.since(0, feed.Filter(), 9)[0][0].body)
    assert body["key_text"] == key.decode()
    assert body["key"]["id"] == "9007199254740993"
    assert body["after"] == row | {"id": "9007199254740993", "low": str(-(1 << 63))}
    assert feed.exact([row, {"doc": [key.decode(), {"n": 1 << 60}]}]) == [
        body["after"], {"doc": [key.decode(), {"n": str(1 << 60)}]}
    ]  # fmt: skip


def test_a_key_that_is_too_long_to_be_asked_for_is_shown_alone(followed: feed.Feed) -> None:
    for number, length in enumerate((500, feed.MOST_KEY_CHARACTERS)):
        key = orjson.dumps({"id": "x" * length})
        take(followed, arrived(number)._replace(key=key))
    texts = [orjson.loads(each.body)["key_text"] for each in followed.since(0, feed.Filter(), 9)[0]]
    assert texts == [orjson.dumps({"id": "x" * 500}).decode(), None]


# -- rates ---------------------------------------------------------------------------------------


def point(at: float, seq: int | None, lag: float | None = 0.0) -> flow.Point:
    followers = {} if seq is None else {"cache": (seq, lag)}
    return flow.Point(at, seq, seq, seq, lag, followers, Lateness({0: 1}))


def test_a_rate_is_over_ten_seconds_and_unknown_is_not_zero() -> None:
    measured = flow.Measured()
    measured.add(point(0.0, 100))
    assert measured.rates()["log_events_per_second"] is None
    measured.add(point(10.0, 300))
    assert measured.rates()["log_events_per_second"] == 20.0
    assert measured.rates()["followers"] == {"cache": 20.0}
    measured.add(point(20.0, None, None))
    assert measured.rates()["log_events_per_second"] is None
    measured.add(point(30.0, 5))  # a log that was started over
    measured.add(point(40.0, 15))
    assert measured.rates()["log_events_per_second"] == 1.0


def test_the_chart_is_of_the_last_hour_and_ends_with_the_newest() -> None:
    measured = flow.Measured()
    for at in range(0, 9_000, 2):
        measured.add(point(float(at), at * 3, float(at)))
    chart = measured.chart()
    assert len(chart["seconds_ago"]) <= 180
    assert chart["seconds_ago"][-1] == 0
    assert max(chart["seconds_ago"]) <= 3_600
    assert set(chart["events_per_second"]) == {3.0}
    assert chart["follower_lag_seconds"]["cache"][-1] == 8_998.0
    assert chart["hour"] == {
        "seconds": 3_600.0, "events_per_second": 3.0, "late_p50_ms": 1.0, "late_p99_ms": 1.0
    }  # fmt: skip


def test_throughput_begins_where_the_log_is_known_and_outlives_a_new_log() -> None:
    measured = flow.Measured()
    measured.add(point(0.0, None, None))
    measured.add(point(10.0, 100))
    assert measured.chart()["hour"]["events_per_second"] is None
    measured.add(point(20.0, 300))
    assert measured.chart()["hour"]["events_per_second"] == 20.0
    measured.add(point(30.0, 5))
    measured.add(point(40.0, 105))
    assert measured.chart()["hour"]["events_per_second"] == 10.0


def test_percentiles_of_parts_are_those_of_all_and_right_to_a_tenth() -> None:
    parts = [Lateness(), Lateness()]
    for number in range(1, 1_001):
        parts[number % 2].note(float(number))
    both = Lateness(parts[0])
    both.update(parts[1])
    assert both.percentile(0.5) == pytest.approx(500, rel=0.1)
    assert both.percentile(0.99) == pytest.approx(990, rel=0.1)
    both.note(-5.0)  # a clock that was set back
    both.note(1e15)
    assert len(both) < 150
    assert Lateness().percentile(0.5) is None


# -- tables that stores do not have as they are ----------------------------------------------------


def test_a_follower_names_those_of_its_tables_whose_topics_are_incomplete() -> None:
    schemas = [
        SimpleNamespace(schema="public", table=name) for name in ("t", "users", "old", "well")
    ]
    incomplete = [
        IncompleteTopic(name, "", LSN(1), "it was renamed", "", captured)
        for name, captured in (("public.users", True), ("public.t", True), ("public.old", False))
    ]
    followers = {
        "all": Follower(),
        "some": Follower(tables=("public.u*",)),
        "none": Follower(tables=("public.well", "other.*")),
    }
    config = structs.replace(_ACTS, followers=followers)
    found = measured(Level.FAILED, schemas=schemas, incomplete_topics=incomplete)
    assert stale(config, found) == {"all": ["public.t", "public.users"], "some": ["public.users"]}
    assert stale(config, measured(Level.OK, schemas=schemas)) == {}


# -- incidents -----------------------------------------------------------------------------------


def measured(level: Level, **changed: Any) -> Status:  # noqa: ANN401 - a status's fields
    fields: dict[str, Any] = dict.fromkeys(Status._fields)
    lists = ("followers", "incremental_snapshots", "incomplete_topics")
    fields |= {name: [] for name in lists}
    return Status(**fields | {"verdict": Verdict(level, f"{level.value}: a sentence")} | changed)


def follower(**changed: Any) -> FollowerStatus:  # noqa: ANN401 - a report's fields
    return FollowerStatus("cache", reported(**changed), None, None)


def test_incidents_are_listed_once_with_their_cause_the_newest_first() -> None:
    found = Incidents()
    daemon = {"incidents": [{"at_us": 5, "kind": "reconnect", "what": "Kafka does not answer"}]}
    for _ in range(3):
        found.add(measured(Level.OK, daemon=daemon, followers=[follower()]))
    [only] = found.listed()
    assert only == {"at_us": 5, "kind": "reconnect", "what": "Kafka does not answer"}
    full = follower(state="halted", what="the store is full", generation=2)
    for _ in range(2):
        found.add(measured(Level.FAILED, followers=[full]))
    kinds = {each["kind"]: each["what"] for each in found.listed()}
    assert kinds["verdict"] == "failed: a sentence"
    assert kinds["rebuild"].endswith("as generation 2")
    assert kinds["follower"] == "cache is halted: the store is full"
    assert found.listed()[-1] == only
    assert len(found.listed()) == 4


def test_the_first_generation_and_the_first_daemon_are_no_incidents() -> None:
    found = Incidents()
    log = SimpleNamespace(epoch=1, timeline=1)
    owners = ("here:1:setup", "here:1:snapshot", "here:2:5f0c")
    for generation, owner in zip((0, 0, 1), owners, strict=True):
        resume = (log, SimpleNamespace(owner=owner))
        found.add(measured(Level.OK, resume=resume, followers=[follower(generation=generation)]))
    assert found.listed() == []
    found.add(measured(Level.OK, resume=(log, SimpleNamespace(owner="there:1:77aa"))))
    assert [each["kind"] for each in found.listed()] == ["fencing"]


def test_incidents_are_bounded_and_the_newest_stay() -> None:
    found = Incidents()
    for at in range(1_000):
        daemon = {"incidents": [{"at_us": at, "kind": "reconnect", "what": "again"}]}
        found.add(measured(Level.OK, daemon=daemon))
    assert [each["at_us"] for each in found.listed()] == list(range(999, 799, -1))
