"""`GET /stream/TABLE`: one table's changes as server-sent events, resumable by seq.

A client gets `change` events in the order of seq, each once, and `frontier` events: everything of
the table up to that seq has been sent, and no transaction is open. Their id is the seq, so a client
that comes back with `Last-Event-ID` goes on exactly there, from memory or from the log.

The log's reader never waits for a client. One that does not take what is sent within `LAG_SECONDS`
is disconnected, with an event `closed` as its last. In memory a client is a position, and what its
connection has not sent yet: at most `_WRITE_BYTES` and one change.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from cdc.console import filters
from cdc.console.channel import LAG_SECONDS, StreamPart, chunk_of, frontier_event
from cdc.console.hub import Hub, PastError
from cdc.errors import CDCError, CompactedError, ConfigError, GapError, UnavailableError
from cdc.events import LSN

if TYPE_CHECKING:
    from starlette.datastructures import QueryParams
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from cdc.config import Config
    from cdc.console.filters import StreamFilter
    from cdc.console.hub import Backlog, Followed, Table

log = logging.getLogger("cdc.console.stream")

# All tables together; each holds a connection.
MOST_STREAMS: Final = 1_200
# Clients that read the log for themselves, because memory does not have what they ask for.
MOST_BACKLOGS: Final = 4
_BACKLOG_WAIT_SECONDS: Final = 60.0
_WRITE_BYTES: Final = 256 << 10
# A stream without events shows a proxy and the client that it is alive.
_ALIVE_SECONDS: Final = 10.0
# How long the last event may take to a client that was too slow.
_GOODBYE_SECONDS: Final = 10.0
# How long to wait for a seq that another console has shown and this one has not read yet.
_AHEAD_SECONDS: Final = 5.0
_MOST_DIGITS: Final = 18
_RETRY: Final = b"retry: 2000\n\n"
_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),
    (b"connection", b"close"),
)
_CLOSED: Final = {
    "lag": "disconnected a slow client",
    "gap": "ended a stream at a gap",
    "error": "ended a stream that cannot be read",
}
CONNECTION: Final = "lockstep.connection"


class StreamRefusal(Exception):  # noqa: N818 - an answer
    """A request that gets no stream: status, and fields of the JSON."""

    def __init__(self, status: int, error: str, **fields: object) -> None:
        super().__init__(error)
        self.status = status
        self.body = orjson.dumps({"error": error, **fields})


class StreamLagError(Exception):
    """A client has not taken what is older than the stated lag."""


class Opened(NamedTuple):
    """A client's stream: where it starts, and what it wants."""

    table: Table
    followed: Followed
    seq: int
    wanted: StreamFilter
    backlog: Backlog | None


class Streams:
    """The endpoint, and the streams that are open."""

    def __init__(self, config: Config) -> None:
        self.hub = Hub(config)
        self._open = 0
        self._backlogs: asyncio.Semaphore | None = None

    def close(self) -> None:
        self.hub.close()

    async def endpoint(self, request: Request) -> _Answer:
        return _Answer(self, request)

    async def answer(self, request: Request, receive: Receive, send: Send) -> None:
        """Answer one request, until its client or the log ends it."""
        if self._open >= MOST_STREAMS:
            await _refuse(send, StreamRefusal(503, f"{MOST_STREAMS} streams are open already"))
            return
        self._open += 1
        try:
            await self._answer(request, receive, send)
        finally:
            self._open -= 1

    async def _answer(self, request: Request, receive: Receive, send: Send) -> None:
        if self._backlogs is None:
            self._backlogs = asyncio.Semaphore(MOST_BACKLOGS)
        followed: Followed | None = None
        try:
            table, wanted, seq = await self._wanted(request)
            loop = asyncio.get_running_loop()
            followed = await asyncio.to_thread(
                self.hub.followed, table, loop, earlier=seq is not None
            )
            followed.clients += 1
            channel = followed.channel
            if seq is None:
                seq = max(channel.high, channel.newest)
            await self._reached(followed, seq)
            client = Client(request.scope, receive, send, followed, wanted, seq)
            if channel.number_after(seq) is None:
                await client.read_backlog(self.hub, table, self._backlogs)
            await client.follow()
        except StreamRefusal as refusal:
            await _refuse(send, refusal)
        except PastError as error:
            await _refuse(
                send, StreamRefusal(410, f"{error.what}: {error.hint}", oldest=error.oldest)
            )
        except CompactedError as error:
            await _refuse(send, StreamRefusal(410, f"{error.what}: {error.hint}"))
        except ConfigError as error:
            await _refuse(send, StreamRefusal(400, f"{error.what}: {error.hint}"))
        except CDCError as error:
            await _refuse(send, StreamRefusal(503, f"{error.what}: {error.hint}"))
        finally:
            if followed is not None:
                followed.leave()

    async def _wanted(self, request: Request) -> tuple[Table, StreamFilter, int | None]:
        table = await asyncio.to_thread(self.hub.table, request.path_params["table"])
        if table is None:
            raise StreamRefusal(404, "the log has no such table; /api/tables lists them by name")
        wanted = filters.parse(request.query_params.multi_items(), table.version)
        last = request.headers.getlist("last-event-id")
        if last:
            return table, wanted, _seq(last)
        return table, wanted, await self._from(request.query_params)

    async def _from(self, query: QueryParams) -> int | None:
        """Return the seq after which a stream is to start by its query."""
        given = query.getlist("from")
        if len(given) == 1 and "/" in given[0]:
            try:
                lsn = LSN.parse(given[0])
            except ValueError:
                raise StreamRefusal(400, "from is no seq and no LSN such as 0/16E9088") from None
            return await asyncio.to_thread(self.hub.seq_at, lsn)
        return _seq(given) if given else None

    @staticmethod
    async def _reached(followed: Followed, seq: int) -> None:
        """Refuse a seq that the log does not reach."""
        deadline = time.monotonic() + _AHEAD_SECONDS
        while max(followed.channel.high, followed.channel.newest) < seq:
            left = deadline - time.monotonic()
            if left <= 0:
                newest = max(followed.channel.high, followed.channel.newest)
                raise StreamRefusal(
                    410,
                    f"the log ends at seq {newest}, before this seq: it was started over",
                    newest=newest,
                )
            await _wait(followed.event, left)


def _seq(given: list[str]) -> int:
    text = given[0] if len(given) == 1 else ""
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise StreamRefusal(400, "Last-Event-ID or from is no seq: a number, the id of an event")
    return int(text)


class _Answer:
    """What Starlette calls: it sends by itself, because a slow client must not hold it up."""

    def __init__(self, streams: Streams, request: Request) -> None:
        self._streams, self._request = streams, request

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        await self._streams.answer(self._request, receive, send)


class Client:
    """One stream: from its position on, until it ends."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        followed: Followed,
        wanted: StreamFilter,
        seq: int,
    ) -> None:
        self._connection: Any = scope.get(CONNECTION)
        self._head_only = scope["method"] == "HEAD"
        self._receive, self._send = receive, send
        self._followed, self._wanted, self._seq = followed, wanted, seq
        self._started = False
        self._over = False
        self._since = 0.0  # when it had the channel's first chunk to send

    async def read_backlog(self, hub: Hub, table: Table, turns: asyncio.Semaphore) -> None:
        """Send what memory does not have, read from the log."""
        try:
            async with asyncio.timeout(_BACKLOG_WAIT_SECONDS):
                await turns.acquire()
        except TimeoutError:
            raise UnavailableError(
                f"{MOST_BACKLOGS} clients read the log already", hint="try again"
            ) from None
        watch = asyncio.ensure_future(self._disconnected())
        try:
            backlog = await asyncio.to_thread(hub.backlog, table, self._seq)
            try:
                await self._read_backlog(backlog, watch)
            finally:
                await asyncio.to_thread(backlog.close)
        except StreamLagError:
            await self._close("lag", self._lag())
        except CDCError as error:
            if not self._started:
                raise
            reason = "gap" if isinstance(error, GapError) else "error"
            await self._close(reason, f"{error.what}: {error.hint}")
        finally:
            turns.release()
            watch.cancel()

    async def _read_backlog(self, backlog: Backlog, watch: asyncio.Future[None]) -> None:
        """Send cuts until the channel has the next."""
        if backlog.record is not None or self._head_only:
            await self._begin(frontier_event(backlog.record) if backlog.record else b"")
        while not (self._over or watch.done() or self._is_in_memory):
            cut = await asyncio.to_thread(backlog.next)
            if cut is not None:
                chunk = await asyncio.to_thread(chunk_of, 0, cut)
                # How long it waits for its client is counted from when it can be sent.
                await self._write([chunk._replace(at=time.monotonic())])

    @property
    def _is_in_memory(self) -> bool:
        return self._followed.channel.number_after(self._seq) is not None

    async def follow(self) -> None:
        """Send what the channel has and gets."""
        if self._over:
            return
        watch = asyncio.ensure_future(self._disconnected())
        try:
            await self._follow(watch)
        except StreamLagError:
            await self._close("lag", self._lag())
        finally:
            watch.cancel()

    async def _follow(self, watch: asyncio.Future[None]) -> None:
        channel = self._followed.channel
        number = channel.number_after(self._seq)
        self._since = time.monotonic()
        await self._begin(channel.frontier_at(self._seq))
        while not (self._over or watch.done()):
            event = self._followed.event
            chunks = None if number is None else channel.since(number, _WRITE_BYTES)
            if chunks is None:
                raise StreamLagError
            if chunks:
                number = chunks[-1].number + 1
                await self._write(chunks)
            elif channel.error:
                await self._close(channel.reason, channel.error)
                return
            elif not await _wait(event, _ALIVE_SECONDS):
                await self._put(b":\n\n", time.monotonic() + LAG_SECONDS)

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # --- writing ---

    async def _begin(self, frontier: bytes) -> None:
        """Send the head, and the frontier that the client is at; a HEAD request ends with it."""
        if not self._started:
            self._started = True
            start = {"type": "http.response.start", "status": 200, "headers": list(_HEADERS)}
            await self._send(start)
            if self._head_only:
                self._over = True
                await self._send({"type": "http.response.body", "more_body": False})
                return
            await self._put(_RETRY + frontier, time.monotonic() + LAG_SECONDS)

    async def _write(self, chunks: list[StreamPart]) -> None:
        await self._begin(b"")
        deadline = max(chunks[0].at, self._since) + LAG_SECONDS
        parts: list[bytes] = []
        size = 0
        for chunk in chunks:
            for part in self._parts(chunk):
                parts.append(part)
                size += len(part)
                if size >= _WRITE_BYTES:
                    await self._put(b"".join(parts), deadline)
                    parts, size = [], 0
            self._seq = max(self._seq, chunk.high)
        if parts:
            await self._put(b"".join(parts), deadline)

    def _parts(self, chunk: StreamPart) -> list[bytes]:
        """Return what the client gets of a chunk."""
        if chunk.high < self._seq:
            return []  # a frontier that it has passed would take it back
        if self._wanted.is_empty and chunk.low >= self._seq and len(chunk.all) <= _WRITE_BYTES:
            return [chunk.all]
        found = [
            each.body
            for each in chunk.changes
            if each.seq > self._seq and self._wanted.matches(each)
        ]
        return [*found, chunk.frontier] if chunk.frontier else found

    async def _put(self, body: bytes, deadline: float) -> None:
        """Send; raise LagError if the client has not taken what came before by the deadline."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError:
            raise StreamLagError from None

    def _lag(self) -> str:
        return (
            f"the client has not taken what was sent {LAG_SECONDS:.0f} s ago: connect again"
            " with Last-Event-ID"
        )

    async def _close(self, reason: str, why: str) -> None:
        """End the stream with an event that says why, however full the connection is."""
        log.warning("%s", _CLOSED[reason], extra={"fields": {"error": why}})
        self._over = True
        fields = orjson.dumps({"reason": reason, "error": why})
        body = b"event: closed\ndata: " + fields + b"\n\n"
        if self._connection is not None:
            self._connection.close_after(_GOODBYE_SECONDS)
        await self._begin(b"")
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Return whether an event was set in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def _refuse(send: Send, refusal: StreamRefusal) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": refusal.body})
