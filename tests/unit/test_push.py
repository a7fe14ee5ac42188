"""What a client of a table's stream gets: what its query does not rule out, as the log has it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from cdc.console import channel
from cdc.console.channel import Channel, after, chunk_of
from cdc.console.filters import Sent, StreamFilter, parse
from cdc.console.stream import Client
from cdc.errors import CDCError, ConfigError, GapError, UnavailableError
from cdc.events import LSN
from cdc.log.records import FrontierRecord, SchemaColumn, SchemaRecord
from cdc.log.table_cuts import LoggedChange, ReadStart, TableCut
from tests.fixtures.daemon import wait_until
from tests.unit.test_console import ask


def column(name: str, mask: str | None = None) -> SchemaColumn:
    return SchemaColumn(
        name=name, type_id=25, type="text", type_modifier=-1, nullable=True, mask=mask
    )


VERSION = SchemaRecord(
    schema_id=1,
    relation_id=1,
    schema="public",
    table="t",
    topic="p.public.t",
    replica_identity="d",
    from_lsn=LSN(1),
    key=("id",),
    columns=(column("id"), column("note"), column("card", "fixed")),
)


def change(seq: int, op: str, before: Any = None, after: Any = None, **source: Any) -> LoggedChange:  # noqa: ANN401 - JSON
    event = {
        "before": before,
        "after": after,
        "op": op,
        "ts_us": 5,
        "source": {"seq": seq, "commit_lsn": "0/1", "schema_id": 1, "txId": 7, **source},
    }
    return LoggedChange(seq, b'{"id":1}', orjson.dumps(event))


NOTE = (("column.note", "a"),)


@pytest.mark.parametrize(
    ("wanted", "is_sent", "of"),
    [
        ((), True, change(1, "d", {"id": 1})),
        (NOTE, True, change(1, "c", after={"id": 1, "note": "a"})),
        (NOTE, False, change(1, "c", after={"id": 1, "note": "b"})),
        (NOTE, True, change(1, "u", {"id": 1, "note": "a"}, {"id": 1, "note": "b"})),
        (NOTE, True, change(1, "d", {"id": 1})),
        (NOTE, False, change(1, "d", {"id": 1, "note": None})),
        (NOTE, True, change(1, "t")),
        (NOTE, True, change(1, "u", after={"id": 1, "note": "?"}, unchanged=["note"])),
        ((*NOTE, ("column.note", "b")), True, change(1, "c", after={"id": 1, "note": "b"})),
        ((("column.id", "1"),), True, change(1, "c", after={"id": 1})),
        ((("op", "d,t"),), False, change(1, "c", after={"id": 1})),
        ((("op", "c"),), False, change(1, "t")),
        ((("key", '{"id": 1}'),), True, change(1, "c", after={"id": 1})),
        ((("key", '{"id": 2}'),), False, change(1, "c", after={"id": 1})),
    ],
)
def test_a_change_is_left_out_only_where_it_is_known_not_to_match(
    wanted: tuple[tuple[str, str], ...], is_sent: object, of: LoggedChange
) -> None:
    assert parse(wanted, VERSION).matches(Sent(of)) is is_sent


@pytest.mark.parametrize(
    "query",
    [
        ("op", "evil"),
        ("op", ""),
        ("key", "evil"),
        ("key", "[1]"),
        ("key", '{"evil": 1}'),
        ("column.evil", "1"),
        ("column.card", "evil"),
        ("evil", "1"),
        ("column.note", "evil" * 1_000),
    ],
)
def test_a_query_that_means_nothing_is_refused_and_not_repeated(query: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse([query], VERSION)
    assert "evil" not in f"{refused.value.what} {refused.value.hint}"


def test_values_are_sent_as_the_log_has_them() -> None:
    value = (
        b'{"before":null,"after":{"n":1.0e5,"text":"a\\nb\\u2028"},"op":"c","ts_us":5,'
        b'"source":{"seq":9,"commit_lsn":"0/1","schema_id":1,"txId":null}}'
    )
    sent = Sent(LoggedChange(9, None, value))
    assert sent.body.startswith(b"id: 9\nevent: change\ndata: {")
    assert b'"after":{"n":1.0e5,"text":"a\\nb\\u2028"}' in sent.body
    assert sent.body.count(b"\n") == 4
    assert StreamFilter().matches(sent)


def frontier(seq: int) -> FrontierRecord:
    return FrontierRecord(
        pipeline="p", epoch=1, lsn=LSN(9), seq=seq, committed_at_us=1, partitions=()
    )


def test_what_was_shown_already_is_cut_off_after_a_reconnect_to_the_log() -> None:
    changes = [change(each, "c", after={"id": 1}) for each in (3, 4, 5)]
    cut = TableCut(2, 5, changes, frontier(5))
    left = after(cut, 4)
    assert ([each.seq for each in left.changes], left.low, left.high) == ([5], 4, 5)
    chunk = chunk_of(1, left)
    assert chunk.all.endswith(chunk.frontier)
    assert chunk.frontier.startswith(b"id: 5\nevent: frontier\n")


def test_streams_need_the_token_and_refuse_other_sites_as_all_data() -> None:
    token = "0123456789abcdef0123456789abcdef"
    assert ask("/stream/public.t", token)[0] == 401
    assert ask("/stream/public.t", token, authorization=f"Bearer {token}")[0] == 200
    assert ask("/stream/public.t", sec_fetch_site="cross-site")[0] == 403
    assert ask("/stream/public.t", origin="http://evil.example")[0] == 403
    assert ask("/stream/public.t", host="evil.example")[0] == 421


# -- a table that can't be read ------------------------------------------------------------------

Follow = Callable[[Callable[[], Iterator[TableCut]]], Channel]


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Follow:
    """Follow a table of which each look at the log yields or raises what is given."""

    def followed(read: Callable[[], Iterator[TableCut]]) -> Channel:
        def cuts(*_: object) -> object:
            return SimpleNamespace(read=lambda _: read(), close=lambda: None)

        monkeypatch.setattr(
            channel, "FrontierSearch", lambda _: SimpleNamespace(close=lambda: None)
        )
        monkeypatch.setattr(channel, "start_at", lambda *_: ReadStart(0, 0, None))
        monkeypatch.setattr(channel, "TableCuts", cuts)
        config: Any = None
        return Channel(config, "p.public.t", 1, lambda: None, earlier=False)

    monkeypatch.setattr(channel, "GATHER_SECONDS", 0.001)
    monkeypatch.setattr(channel, "FRONTIER_SECONDS", 0.001)
    monkeypatch.setattr(channel, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(channel, "FAILING_SECONDS", 0.5)
    return followed


def closed(followed: Channel) -> tuple[str, str]:
    """Return the reason and the error with which a client's stream ends."""
    sent: list[Any] = []

    async def send(message: Any) -> None:  # noqa: ANN401 - ASGI
        sent.append(message)

    async def run() -> None:
        at: Any = SimpleNamespace(channel=followed, event=asyncio.Event())
        receive: Any = asyncio.Event().wait
        async with asyncio.timeout(30):
            await Client(
                {"type": "http", "method": "GET"}, receive, send, at, StreamFilter(), 0
            ).follow()

    asyncio.run(run())
    last = orjson.loads(sent[-1]["body"].partition(b"event: closed\ndata: ")[2])
    return last["reason"], last["error"]


@pytest.mark.parametrize(
    ("error", "reason", "shown", "least_seconds"),
    [
        (GapError("it lacks", hint="look"), "gap", "it lacks; look", 0.0),
        (CDCError("no event", hint="look"), "error", "no event; look", 0.0),
        (UnavailableError("damaged", hint="look"), "error", "damaged; look", 0.5),
        (ValueError("evil"), "error", "a bug: ValueError", 0.0),
    ],
)
def test_a_table_that_cannot_be_read_ends_its_streams_with_the_reason(
    error: Exception,
    reason: str,
    shown: str,
    least_seconds: float,
    follow: Follow,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def read() -> Iterator[TableCut]:
        raise error

    began = time.monotonic()
    followed = follow(read)
    wait_until(lambda: followed.error, "the streams stay open", pause=0.01)
    assert time.monotonic() - began >= least_seconds
    assert [each.message for each in caplog.records].count("cannot follow a table") == (
        reason == "error"
    )
    assert closed(followed) == (reason, shown)


def test_a_table_that_can_be_read_again_keeps_its_streams(follow: Follow) -> None:
    seq = 0

    def read() -> Iterator[TableCut]:
        nonlocal seq
        seq += 1
        if seq % 2:
            raise UnavailableError("no broker answers", hint="wait")
        yield TableCut(seq - 1, seq, [], frontier(seq))

    followed = follow(read)
    wait_until(lambda: seq > 150, "it is not tried again", pause=0.01)
    assert followed.error == ""
    followed.close()
