"""`/stream/TABLE` on real servers: every change once, in order, whatever is killed."""

from __future__ import annotations

import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pytest
from confluent_kafka import TopicPartition

from cdc.console.channel import LAG_SECONDS
from cdc.events import table_name
from cdc.log import names, table_cuts, topics
from cdc.log.frontier_search import FrontierSearch
from cdc.log.reader import read_partition
from tests.fixtures.console import ConsoleUnderTest
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.event_crowd import Crowd
from tests.fixtures.event_source import Event, EventSource, query
from tests.fixtures.writing import Writing

_TABLE = "CREATE TABLE t (id int PRIMARY KEY, note text, card text)"
_FULL = "ALTER TABLE t REPLICA IDENTITY FULL"
_EVIL = '../"<img src=x onerror=alert(1)>%2F'
_MASKS = {"public.t": {"mask": {"card": {"fixed": "hidden"}}}}

# Of the crowd.
_RATE = 500
_CROWDED_SECONDS = 20.0

NewConsole = Callable[..., ConsoleUnderTest]


@pytest.fixture
def console(tmp_path: Path) -> Iterator[NewConsole]:
    """Start consoles that end with the test."""
    with ExitStack() as stack:

        def start(line: PipelineUnderTest, *options: str) -> ConsoleUnderTest:
            found = ConsoleUnderTest(line.config_file, tmp_path / "console.log", *options)
            stack.callback(found.close)
            return found

        yield start


def newest(line: PipelineUnderTest) -> int:
    return max((each.seq for each in line.frontiers()), default=0)


def reached(line: PipelineUnderTest, seq: int) -> int:
    """Return a frontier's seq of at least `seq`, once the log has it."""
    wait_until(lambda: newest(line) >= seq, f"the log does not reach seq {seq}")
    return newest(line)


def read(
    shown: ConsoleUnderTest, last: int | None, seq: int, table: str = "public.t", asked: str = ""
) -> list[Event]:
    assert shown.port is not None
    with closing(EventSource(shown.port, table, last, query=asked)) as source:
        assert source.status == 200, source.refused
        return source.until(seq)


def changes(events: list[Event]) -> list[Any]:
    found = [each.data for each in events if each.kind == "change"]
    assert [each.id for each in events if each.kind == "change"] == [each["seq"] for each in found]
    return found


def test_each_change_is_sent_once_and_resumes_after_any_seq(
    pipeline: NewPipeline, console: NewConsole
) -> None:
    line = pipeline(_TABLE, _FULL, "CREATE TABLE other (id int PRIMARY KEY)", tables=_MASKS)
    line.start().wait_ready()
    shown = console(line)
    with line.database.connect() as connection:
        for number in range(40):
            with connection.transaction():
                connection.execute("INSERT INTO t VALUES (%s, 'x', '4111')", (number,))
                connection.execute("INSERT INTO other VALUES (%s)", (number,))
                if number % 3 == 0:
                    connection.execute("UPDATE t SET note = 'y' WHERE id = %s", (number,))
                if number % 5 == 0:
                    connection.execute("DELETE FROM t WHERE id = %s", (number,))
    end = reached(line, 40 + 40 + 14 + 8)
    complete = changes(read(shown, 0, end))
    assert len(complete) == 62
    assert [each["seq"] for each in complete] == sorted({each["seq"] for each in complete})
    assert {each["after"]["card"] for each in complete if each["after"]} == {"hidden"}
    for seq in random.Random(1).sample(range(end), 12):
        left = [each for each in complete if each["seq"] > seq]
        assert changes(read(shown, seq, end)) == left
    again = read(shown, end, end)
    assert [each.kind for each in again] == ["frontier"]


def test_a_large_transaction_is_merged_from_its_partitions_in_parts(
    pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = pipeline(_TABLE)
    line.start().wait_ready()
    line.database.execute(
        "INSERT INTO t SELECT g FROM generate_series(1, 100) g",
        "DELETE FROM t WHERE id < 50",
        "INSERT INTO t SELECT g FROM generate_series(1, 3) g",
    )
    end = reached(line, 152)
    monkeypatch.setattr(table_cuts, "MOST_CHANGES", 20)
    for seq in (0, 100, 149):
        found = cuts_after(line, seq, end)
        assert max(len(each.changes) for each in found) <= 20
        assert seqs(found) == list(range(found[0].low + 1, 153))


def test_changes_of_many_bytes_are_read_in_parts(
    pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = pipeline(_TABLE, log={"partitions": 2})
    line.start().wait_ready()
    insert = "INSERT INTO t SELECT g, repeat('x', 10000) FROM generate_series({}, {}) g"
    line.database.execute(
        *(insert.format(first, first + 4) for first in range(0, 60, 5)),
        insert.format(100, 159),
        insert.format(200, 201),
    )
    end = reached(line, 122)
    monkeypatch.setattr(table_cuts, "MOST_BYTES", 200_000)
    monkeypatch.setattr(table_cuts, "PART_BYTES", 50_000)
    for seq in (0, 30, 119):
        found = cuts_after(line, seq, end)
        sizes = [sum(len(change.value) for change in each.changes) for each in found]
        assert max(sizes) <= 200_000
        assert seqs(found) == list(range(found[0].low + 1, 123))


def cuts_after(line: PipelineUnderTest, seq: int, end: int) -> list[table_cuts.TableCut]:
    """Return the cuts of the table from the frontier of a seq on, without a gap between them."""
    topic = names.data_topic(line.config.prefix, "public", "t")
    with closing(FrontierSearch(line.config)) as search:
        start = table_cuts.start_at(search, seq)
    assert start is not None
    found: list[table_cuts.TableCut] = []
    with closing(table_cuts.TableCuts(line.config, topic, start)) as cuts:
        while not found or found[-1].high < end:
            found += cuts.read(1.0)
    assert found[0].low == start.seq
    assert [each.low for each in found[1:]] == [each.high for each in found[:-1]]
    return found


def seqs(found: list[table_cuts.TableCut]) -> list[int]:
    return [change.seq for each in found for change in each.changes]


def in_log(line: PipelineUnderTest) -> list[int]:
    """Return the seqs of the table's events, read from its topic."""
    topic = names.data_topic(line.config.prefix, "public", "t")
    count = line.resume()[0].partitions[topic]
    values = [value for n in range(count) for _, value in read_partition(line.config, topic, n)]
    return sorted(orjson.loads(value)["source"]["seq"] for value in values if value)


class Inserts(Writing):
    """Inserts rows, some transactions of several, at most so many rows a second."""

    def __init__(self, dsn: str, per_second: float) -> None:
        super().__init__("inserts")
        self._dsn, self._pause = dsn, 10 / per_second
        self._rows = 0

    def _write(self) -> None:
        with psycopg.connect(self._dsn) as connection:
            due = time.monotonic()
            while not self._over.wait(max(0.0, due - time.monotonic())):
                due += self._pause
                statement = (
                    "INSERT INTO t SELECT g, 'a note' FROM generate_series(%s::int, %s::int) g"
                )
                connection.execute(statement, (self._rows, self._rows + 9))
                connection.commit()
                self._rows += 10
                self._commits += 1


@pytest.mark.commit("the path of pushed changes")
@pytest.mark.long("what else may be killed", sample=["server"])
@pytest.mark.parametrize("killed", ["connection", "server", "daemon"])
def test_nothing_is_lost_or_repeated_when_something_is_killed(
    killed: str, pipeline: NewPipeline, console: NewConsole
) -> None:
    line = pipeline(_TABLE, log={"partitions": 3, "direct": "off"})
    line.start().wait_ready()
    shown = console(line)
    drawn = random.Random(killed)
    seen: list[int] = []
    last = 0
    with Inserts(line.database.dsn, 400) as load:
        for _ in range(3):
            assert shown.port is not None
            with closing(EventSource(shown.port, "public.t", last)) as source:
                assert source.status == 200, source.refused
                for event in islice(source, drawn.randrange(50, 300)):
                    if event.id is not None:
                        last = event.id
                    if event.kind == "change":
                        seen.append(event.data["seq"])
            if killed == "server":
                shown.process.kill()
                shown.process.wait(60)
                shown = console(line)
            elif killed == "daemon":
                line.daemon.kill()
                # This one dies with batches that are acknowledged and not committed: they abort.
                line.start("after_flush:5").wait_exit()
                line.start().wait_ready()
        wait_until(lambda: load.commits > 100, "nothing is written")
    end = reached(line, line_rows(line))
    seen += [each["seq"] for each in changes(read(shown, last, end))]
    assert seen == in_log(line)


def line_rows(line: PipelineUnderTest) -> int:
    return int(line.query("SELECT count(*) FROM t")[0])


def test_a_query_leaves_out_only_what_does_not_match(
    pipeline: NewPipeline, console: NewConsole
) -> None:
    line = pipeline(_TABLE, tables=_MASKS)
    line.start().wait_ready()
    line.database.execute(
        "INSERT INTO t VALUES (1, 'a', '4111'), (2, 'b', '4111')",
        "UPDATE t SET note = 'b' WHERE id = 1",
        "DELETE FROM t WHERE id = 2",
        "TRUNCATE t",
    )
    end = reached(line, 5)
    shown = console(line)

    def found(*conditions: tuple[str, str]) -> list[int]:
        events = read(shown, 0, end, asked=query(*conditions))
        assert events[-1].kind == "frontier"
        return [each["seq"] for each in changes(events)]

    assert found() == [1, 2, 3, 4, 5]
    assert found(("op", "c,d")) == [1, 2, 4]
    # The delete has only the key, so it may have been the row of any note.
    assert found(("column.note", "b")) == [2, 3, 4, 5]
    assert found(("column.note", "a"), ("op", "c")) == [1]
    assert found(("key", '{"id": 1}')) == [1, 3, 5]
    assert found(("column.id", "2"), ("column.note", "b"), ("op", "c")) == [2]


def test_hostile_requests_are_refused_and_repeat_nothing(
    pipeline: NewPipeline, console: NewConsole
) -> None:
    line = pipeline(_TABLE, f"CREATE TABLE {quoted(_EVIL)} (id int PRIMARY KEY)", tables=_MASKS)
    line.start().wait_ready()
    line.database.execute("INSERT INTO t VALUES (1)", f"INSERT INTO {quoted(_EVIL)} VALUES (7)")
    end = reached(line, 2)
    shown = console(line)
    assert shown.port is not None
    [change] = changes(read(shown, 0, end, table=table_name("public", _EVIL)))
    assert change["after"] == {"id": 7}
    refused = [
        (404, "public.none", None, ""),
        (404, "../../etc/passwd", None, ""),
        (404, '"><script>alert(1)</script>', None, ""),
        (404, "", None, ""),
        (400, "public.t", "evil<b>", ""),
        (400, "public.t", "-1", ""),
        (400, "public.t", "9" * 30, ""),
        (410, "public.t", "999999", ""),
        (400, "public.t", None, "from=evil<b>"),
        (400, "public.t", None, "from=0/evil"),
        (400, "public.t", None, "op=evil"),
        (400, "public.t", None, "key=evil"),
        (400, "public.t", None, "key=%7B%22evil%22%3A1%7D"),
        (400, "public.t", None, "column.evil=1"),
        (400, "public.t", None, "column.card=hidden"),
        (400, "public.t", None, "evil=1"),
        (400, "public.t", None, "&".join("op=c" for _ in range(50))),
    ]
    for status, table, last, asked in refused:
        with closing(EventSource(shown.port, table, last, query=asked)) as source:
            assert source.status == status, (table, last, asked, source.refused)
            assert not re.search("evil|script|passwd|999999", str(source.refused))
    with closing(EventSource(shown.port, "public.t", origin="http://evil.example")) as source:
        assert source.status == 403
    with closing(EventSource(shown.port, "public.t", host="evil.example")) as source:
        assert source.status == 421


def test_head_answers_as_get_does_without_a_stream(
    pipeline: NewPipeline, console: NewConsole
) -> None:
    line = pipeline(_TABLE)
    line.start().wait_ready()
    line.database.execute("INSERT INTO t VALUES (1), (2)")
    end = reached(line, 2)
    shown = console(line)
    assert shown.port is not None
    table = "/stream/public.t"
    asked = [
        (200, table, {}),
        (200, table, {"Last-Event-ID": "0"}),  # from the log: memory starts later
        (200, table, {"Last-Event-ID": str(end)}),
        (410, table, {"Last-Event-ID": "999999"}),
        (404, "/stream/public.none", {}),
        (400, f"{table}?op=none", {}),
        (200, "/api/tail", {}),
    ]
    for status, path, headers in asked:
        with socket.create_connection(("127.0.0.1", shown.port), timeout=30) as client:
            head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            head += "Host: localhost\r\nConnection: close\r\n"
            client.sendall(f"HEAD {path} HTTP/1.1\r\n{head}\r\n".encode())
            answer = b""
            while got := client.recv(1 << 16):
                answer += got
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), (path, headers, answer)
        assert answer.partition(b"\r\n\r\n")[2] == b"", "an answer to HEAD has no body"
        assert (b"\r\ncontent-type: text/event-stream" in answer) is (status == 200)
    # Nothing is left open of them, so as many streams as before may be opened.
    assert [each["seq"] for each in changes(read(shown, 0, end))] == [1, 2]


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def test_what_retention_has_taken_is_refused_with_the_oldest_seq(
    pipeline: NewPipeline, console: NewConsole
) -> None:
    line = pipeline(_TABLE, log={"partitions": 1})
    line.start().wait_ready()
    for number in range(10):
        line.database.execute(f"INSERT INTO t VALUES ({number})")
        reached(line, number + 1)
    topic = names.data_topic(line.config.prefix, "public", "t")
    values = [value for _, value in read_partition(line.config, topic, 0)]
    assert len(values) == 10
    client = topics.admin(line.config)
    for done in client.delete_records([TopicPartition(topic, 0, 5)]).values():
        done.result(timeout=30)
    left = in_log(line)
    shown = console(line)
    assert shown.port is not None
    with closing(EventSource(shown.port, "public.t", 0)) as source:
        assert source.status == 410
        assert source.refused["oldest"] == left[0] - 1
    assert [each["seq"] for each in changes(read(shown, left[0] - 1, 10))] == left


def test_a_slow_client_is_disconnected_and_another_is_not_held_up(
    pipeline: NewPipeline, console: NewConsole
) -> None:
    line = pipeline(_TABLE)
    line.start().wait_ready()
    shown = console(line)
    assert shown.port is not None
    line.database.execute("INSERT INTO t VALUES (0)")
    reached(line, 1)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        slow.settimeout(120)
        slow.connect(("127.0.0.1", shown.port))
        slow.sendall(b"GET /stream/public.t HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert slow.recv(15) == b"HTTP/1.1 200 OK"
        line.database.execute(
            "INSERT INTO t SELECT g, repeat(md5(g::text), 300) FROM generate_series(1, 3000) g"
        )
        end = reached(line, 3_001)
        # The other one has it all while the slow one reads nothing.
        assert len(changes(read(shown, 1, end))) == 3_000
        received = b""
        wait_until(lambda: "disconnected a slow client" in shown.log, "the slow one is kept")
        while got := slow.recv(1 << 20):
            received += got
    assert received.rstrip().endswith(b"0")  # the end of the chunked encoding: nothing is cut off
    last = received.rsplit(b"event: closed\ndata: ", 1)[1]
    assert b'"reason":"lag"' in last


@pytest.mark.long("a thousand clients take a machine of their own", sample=["50"])
@pytest.mark.parametrize("number", [50, 1_000], ids=str)
def test_no_client_of_many_loses_a_change_within_the_stated_lag(
    number: int,
    pipeline: NewPipeline,
    console: NewConsole,
) -> None:
    line = pipeline(_TABLE, source={"canary_seconds": 0})
    line.start().wait_ready()
    shown = console(line)
    assert shown.port is not None
    line.database.execute("INSERT INTO t VALUES (-1)")
    start = reached(line, 1)
    alone = number > 50  # on this machine, which others' tests may slow down
    rate = _RATE if alone else _RATE // 10
    with Crowd(shown.port, "public.t", start, number) as crowd:
        began = time.monotonic()
        with Inserts(line.database.dsn, rate):
            while time.monotonic() - began < _CROWDED_SECONDS:
                crowd.read_for(0.5)
        seconds, end = time.monotonic() - began, line_rows(line)
        assert end / seconds > (0.95 if alone else 0.5) * rate
        wait_until(lambda: crowd.reaches(end), "a client lags", pause=0)
        assert 0 < crowd.worst_seconds < LAG_SECONDS
