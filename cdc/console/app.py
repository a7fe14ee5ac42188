"""The console's pages and its API: GET, and one POST where actions are allowed.

`/api/status`, `/api/tables`, `/api/chart` answer with what was measured last; `/api/tail` is a
stream of server-sent events; `/api/explain` runs `cdc history`, or searches the topic where there
is no archive; `/api/large` runs `cdc dead list`. `/api/dead` is what was given up; `/api/act` runs
a command (`actions`). `/stream/TABLE` is for programs (`stream`). Everything of the pipeline is
sent as JSON, and the page puts it in place as text, so no name or value becomes markup.
"""

from __future__ import annotations

import asyncio
import time
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from cdc import __version__
from cdc.console.actions import Actions
from cdc.console.collector import STALE_SECONDS
from cdc.console.explain import Explainer
from cdc.console.feed import MOST_KEY_CHARACTERS, MOST_PER_SECOND, Filter
from cdc.console.guard import VIEWER
from cdc.errors import CDCError, ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from cdc.config import Config
    from cdc.console.collector import Collector
    from cdc.console.dead import DeadLetterList
    from cdc.console.feed import Feed
    from cdc.console.key_indexer import KeyIndexer
    from cdc.console.stream import Streams
    from cdc.console.tokens import Viewer

# Each holds a connection, and costs a look at the feed four times a second.
MOST_VIEWERS: Final = 40
_LOOK_SECONDS: Final = 0.25
# How often a stream reports the rate, so that a proxy and the page see that it is alive.
_REPORT_SECONDS: Final = 1.0
_MOST_AT_ONCE: Final = 100
_MOST_BODY_BYTES: Final = 8_192
_EVENTS: Final = "text/event-stream"
_PAGE: Final = {
    "/": ("index.html", "text/html"),
    "/console.css": ("console.css", "text/css"),
    "/console.js": ("console.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/draw.js": ("draw.js", "text/javascript"),
    "/tail.js": ("tail.js", "text/javascript"),
    "/act.js": ("act.js", "text/javascript"),
}


def build(
    config: Config,
    config_path: Path,
    collector: Collector,
    feed: Feed,
    streams: Streams,
    dead: DeadLetterList,
    indexer: KeyIndexer | None,
    *,
    acts: bool,
) -> ASGIApp:
    """Return the application, without its guard; `acts`: whether viewers may run commands."""
    actions = Actions(config, config_path) if acts else None
    explainer = Explainer(config, config_path, indexer)
    console = _Console(config, collector, feed, dead, explainer, actions)
    routes = [
        *(Route(path, _file(*file)) for path, file in _PAGE.items()),
        Route("/api/status", console.status),
        Route("/api/tables", console.tables),
        Route("/api/chart", console.chart),
        Route("/api/tail", console.tail),
        Route("/api/explain", console.explain),
        Route("/api/dead", console.dead),
        Route("/api/large", console.large),
        Route("/api/act", console.act, methods=["POST"]),
        Route("/stream/{table:path}", streams.endpoint),
    ]
    return Starlette(routes=routes)


def _file(name: str, kind: str) -> Any:  # noqa: ANN401 - an endpoint
    body = files("cdc.console").joinpath("page", name).read_bytes()

    async def endpoint(_: Request) -> Response:
        return Response(body, media_type=kind)

    return endpoint


def _json(body: object, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


async def _body(request: Request) -> bytes:
    """Return the request's body; raise ConfigError where it is too long.

    How long it may take is limited where connections are served.
    """
    found = b""
    async for part in request.stream():
        found += part
        if len(found) > _MOST_BODY_BYTES:
            raise ConfigError("the request is too long", hint="load the page again")
    return found


def _asked(body: bytes) -> dict[str, str]:
    """Return the fields of what the page asks for; raise ConfigError where it is another form."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        found = None
    names = {"action", "target", "id", "command"}
    if (
        not isinstance(found, dict)
        or found.keys() != names
        or not all(isinstance(each, str) for each in found.values())
    ):
        raise ConfigError("the request is not the page's", hint="load the page again")
    return found


class _Console:
    def __init__(
        self,
        config: Config,
        collector: Collector,
        feed: Feed,
        dead: DeadLetterList,
        explainer: Explainer,
        actions: Actions | None,
    ) -> None:
        self._config = config
        self._collector = collector
        self._feed = feed
        self._explainer = explainer
        self._dead = dead
        self._actions = actions
        self._viewers = 0

    async def status(self, request: Request) -> Response:
        viewer: Viewer = request.scope[VIEWER]
        newest = self._collector.asked()
        age = None if newest is None else newest.age_seconds
        return _json(
            {
                "version": __version__,
                "pipeline": self._config.pipeline,
                "now_ms": time.time_ns() // 1_000_000,
                "age_seconds": age,
                # What is older says nothing about the present.
                "stale": age is None or age > STALE_SECONDS,
                "failed": self._collector.failed,
                "tail_error": self._feed.error,
                "viewer": viewer.name,
                "may_act": self._actions is not None and viewer.acts,
                "actions": None if self._actions is None else self._actions.listed(),
                "measured": None if newest is None else orjson.Fragment(newest.status),
            }
        )

    async def tables(self, _: Request) -> Response:
        newest = self._collector.asked()
        return _json({"tables": []} if newest is None else orjson.Fragment(newest.tables))

    async def chart(self, _: Request) -> Response:
        newest = self._collector.asked()
        return _json(None if newest is None else orjson.Fragment(newest.chart))

    async def explain(self, request: Request) -> Response:
        given = [request.query_params.get(name, "") for name in ("table", "key", "before")]
        if not all(given[:2]) or max(map(len, given)) > MOST_KEY_CHARACTERS:
            return _json({"error": "give a table (schema.table) and a key"}, 400)
        try:
            return _json(await self._explainer.versions(*given))
        except CDCError as error:
            return _json({"versions": None, "error": f"{error.what}; {error.hint}"})

    async def dead(self, _: Request) -> Response:
        try:
            return _json(await self._dead.given_up())
        except CDCError as error:
            return _json({"events": None, "error": f"{error.what}; {error.hint}"})

    async def large(self, _: Request) -> Response:
        try:
            return _json({"events": await self._dead.large()})
        except CDCError as error:
            return _json({"events": None, "error": f"{error.what}; {error.hint}"})

    async def act(self, request: Request) -> Response:
        """Start a command; the page sees in the status how it ends."""
        if self._actions is None:
            why = "this console is read-only: `cdc console --allow-actions` is another one"
            return _json({"error": why}, 403)
        viewer: Viewer = request.scope[VIEWER]
        if not viewer.acts:
            return _json({"error": "you are not in console.oidc.actors, who run commands"}, 403)
        if self._actions.is_full:
            return _json({"error": "several commands run already: wait for one to end"}, 503)
        try:
            asked = _asked(await _body(request))
            address = request.client.host if request.client else ""
            by = ", ".join(filter(None, (viewer.name, address)))
            number = self._actions.start(asked, by)
        except CDCError as error:
            return _json({"error": f"{error.what}; {error.hint}"}, 400)
        except ClientDisconnect:
            # It ended its request, or took too long for it (`server`): nobody reads an answer.
            return Response(status_code=408)
        return _json({"number": number}, 202)

    async def tail(self, request: Request) -> Response:
        if self._viewers >= MOST_VIEWERS:
            why = f"{MOST_VIEWERS} viewers follow the log already: close one of their pages"
            return _json({"error": why}, 503)
        if request.method == "HEAD":
            return Response(media_type=_EVENTS)
        given = request.query_params
        wanted = Filter(
            given.get("table", ""),
            frozenset(filter(None, given.get("ops", "").split(","))),
            given.get("key", ""),
        )
        return StreamingResponse(self._events(wanted), media_type=_EVENTS)

    async def _events(self, wanted: Filter) -> AsyncIterator[bytes]:
        """Yield events as they arrive. A viewer that reads slowly skips some, and learns of it."""
        self._viewers += 1
        try:
            _, number, _ = self._feed.since(-1, wanted, 0)
            reported_at = 0.0
            while True:
                entries, number, skipped = self._feed.since(number, wanted, _MOST_AT_ONCE)
                for each in entries:
                    yield b"event: change\ndata: " + each.body + b"\n\n"
                now = time.monotonic()
                if skipped or now - reported_at >= _REPORT_SECONDS:
                    reported_at = now
                    yield b"event: rate\ndata: " + self._rate(skipped) + b"\n\n"
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            self._viewers -= 1

    def _rate(self, skipped: int) -> bytes:
        feed = self._feed
        return orjson.dumps(
            {
                "per_second": round(feed.rate(), 1),
                "most_per_second": MOST_PER_SECOND,
                "arrived": feed.arrived,
                "kept": feed.kept,
                "skipped": skipped,
                "error": feed.error,
            }
        )
