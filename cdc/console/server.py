"""Serve the console on one address, until SIGTERM or Ctrl-C.

An address that other machines reach needs a token, or an issuer of tokens. Headers are limited in
size, requests in time, and connections in number, so that a client that sends slowly keeps nobody
out for long.
"""

from __future__ import annotations

import resource
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from cdc.config import meaning
from cdc.config.meaning import is_loopback
from cdc.console.app import build
from cdc.console.collector import Collector
from cdc.console.dead import DeadLetterList
from cdc.console.feed import Feed
from cdc.console.guard import LOOPBACK, MOST_HEADER_BYTES, Guard
from cdc.console.issuer import Issuer, read_file
from cdc.console.key_indexer import KeyIndexer
from cdc.console.stream import CONNECTION, MOST_STREAMS, Streams
from cdc.console.tokens import keys_of
from cdc.errors import ConfigError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cdc.config import Config
    from cdc.config.oidc import Oidc

# A token that nobody guesses; `openssl rand -hex 16` has as many characters.
LEAST_TOKEN: Final = 32
_CHECKS: Final[dict[str, Callable[[Any, Mapping[str, Any]], Iterator[str]]]] = {
    "issuer": meaning.oidc_issuer,
    "keys": meaning.oidc_keys,
    "viewers": meaning.oidc_people,
    "actors": meaning.oidc_people,
}
_REQUEST_SECONDS: Final = 10.0
_CONNECTIONS: Final = 200 + MOST_STREAMS
# Of them, how many may be without a complete request: with more the oldest is closed, so that
# clients who send nothing keep nobody out. Not before it has had some time: a thousand that connect
# at once are accepted together, before any of their requests is read.
_MOST_WAITING: Final = 100
_LEAST_SECONDS: Final = 1.0
# For files and the brokers' connections.
_OTHER_FILES: Final = 600
# The default of 5 ms lets a measurement delay answers: a request takes its turns with it.
_SWITCH_SECONDS: Final = 0.0005


class _Protocol(H11Protocol):
    """Closes a connection whose request, body included, takes longer than `_REQUEST_SECONDS`.

    Or earlier, if too many others wait for theirs, the first or the next one.
    """

    _waiting: ClassVar[dict[_Protocol, float]] = {}  # since when; the oldest first
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 - as the base class
        super().connection_made(transport)
        self._deadline = self.loop.call_later(_REQUEST_SECONDS, self._close_if_waiting)
        self._wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.scope is not None:
            scope: Any = self.scope  # a TypedDict
            scope[CONNECTION] = self  # its task has not started yet
        if self._has_request():
            self._waiting.pop(self, None)
            self._cancel()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(_REQUEST_SECONDS, self._close_if_waiting)

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.pop(self, None)
        self._cancel()
        super().connection_lost(exc)

    def close_after(self, seconds: float) -> None:
        """Let everything be sent although the client reads nothing, and close at the latest then.

        For the last event of a stream: what is waiting in the connection is limited already.
        """
        self.flow.resume_writing()
        self.loop.call_later(seconds, self.transport.abort)

    def _wait(self) -> None:
        self._waiting[self] = self.loop.time()
        if len(self._waiting) > _MOST_WAITING:
            self.loop.call_later(_LEAST_SECONDS, self._close_oldest)

    def _close_oldest(self) -> None:
        latest = self.loop.time() - _LEAST_SECONDS
        for each, since in list(self._waiting.items())[
            : max(0, len(self._waiting) - _MOST_WAITING)
        ]:
            if since <= latest:
                del self._waiting[each]
                each.transport.close()

    def _has_request(self) -> bool:
        """Return whether a request has arrived completely and is being answered."""
        cycle = self.cycle
        return bool(cycle) and not cycle.more_body and not cycle.response_complete

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_if_waiting(self) -> None:
        self._deadline = None
        if not self._has_request():
            self.transport.close()


def read_token(path: Path | None) -> str | None:
    """Return the token in a file; raise ConfigError where it is too short to be one."""
    if path is None:
        return None
    try:
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the token in {path}: {getattr(error, 'strerror', None) or 'not text'}",
            hint=f"umask 077 && openssl rand -hex 32 > {path}",
        ) from error
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token in {path} is not {LEAST_TOKEN} or more characters on one line",
            hint=f"umask 077 && openssl rand -hex 32 > {path}",
        )
    return token


def checked(oidc: Oidc, *, acts: bool) -> Oidc | None:
    """Return the section, None where it has no issuer; raise ConfigError where it is not usable.

    `acts`: whether viewers may run commands.
    """
    if oidc.issuer is None:
        if oidc.actors or oidc.viewers or oidc.audience or oidc.keys:
            raise ConfigError(
                "console.oidc has no issuer, so nobody is asked for a token of one",
                hint="--oidc-issuer URL, or remove the others",
            )
        return None
    fields = {name: getattr(oidc, name) for name in oidc.__struct_fields__}
    wrong = [
        f"{name}: {what}"
        for name, check in _CHECKS.items()
        if fields[name] is not None
        for what in check(fields[name], fields)
    ]
    if wrong:
        raise ConfigError(
            "console.oidc is wrong: " + "; ".join(wrong), hint="see `cdc console --help`"
        )
    if acts and not oidc.actors:
        raise ConfigError(
            "nobody may run commands: console.oidc.actors is empty",
            hint="--actor email:ann@example.com or --actor group:oncall, or no --allow-actions",
        )
    if oidc.keys is not None and not meaning.is_url(oidc.keys):
        keys_of(read_file(Path(oidc.keys)))
    return oidc


def bind(listen: str, *, is_guarded: bool) -> socket.socket:
    """Return a listening socket; raise ConfigError.

    Also where other machines reach it, and it `is_guarded` neither by a token nor by an issuer.
    """
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65_535:  # noqa: PLR2004 - the last port
        raise ConfigError(f"{listen} is no address", hint="give host:port, such as 127.0.0.1:8600")
    if not is_guarded and not is_loopback(host):
        raise ConfigError(
            f"{host} is reached by other machines, and the console has no token and no issuer",
            hint="--token-file FILE or --oidc-issuer URL, behind a proxy that speaks TLS; or "
            "--listen 127.0.0.1:8600",
        )
    try:
        family, *_, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), int(port)), family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {listen}: {error.strerror or error}",
            hint="choose another --listen (port 0 takes a free one), or stop what listens there",
        ) from error


def serve(
    config: Config,
    config_path: Path,
    listening: socket.socket,
    names: Sequence[str],
    token: str | None,
    oidc: Oidc | None,
    *,
    acts: bool = False,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal; `names` are those of a proxy in front of it, `oidc` is `checked`.

    `acts`: whether viewers may run commands.
    """
    host = str(listening.getsockname()[0])
    feed = Feed(config)
    feed.start()
    collector = Collector(config, feed)
    streams = Streams(config)
    dead = DeadLetterList(config, config_path)
    indexer = None if config.archive.path else KeyIndexer(config)
    if indexer is not None:
        indexer.start()
    hosts = {*LOOPBACK, host, *names}
    app = build(config, config_path, collector, feed, streams, dead, indexer, acts=acts)
    server = uvicorn.Server(
        uvicorn.Config(
            Guard(app, hosts, token, None if oidc is None else Issuer(oidc)),
            http=_Protocol,
            ws="none",
            lifespan="off",
            access_log=False,  # it would have the keys that viewers look for
            log_config=None,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            limit_concurrency=_CONNECTIONS,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=1,
        )
    )
    _allow_files()
    sys.setswitchinterval(_SWITCH_SECONDS)
    started()
    try:
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
    finally:
        collector.close()
        feed.close()
        streams.close()
        dead.close()
        if indexer is not None:
            indexer.close()


def _allow_files() -> None:
    """Raise the limit of open files to what the connections need, as far as it can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _CONNECTIONS + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
