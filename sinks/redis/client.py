"""Connections to Redis, one server or a cluster, and translation of its errors.

The only module that uses the client library. It retries only calls that a cluster redirects while
slots move: a call may have been applied before its answer was lost, and the follower, which knows
that calls can be repeated, decides.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha1
from typing import Any, Final, NamedTuple

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry

from cdc.errors import (
    CDCError,
    ConfigError,
    OvertakenError,
    PermissionDeniedError,
    StoreLostError,
    SwitchedError,
    UnavailableError,
)
from lockstep.sinks.redis.names import SLOTS

_CONNECT_SECONDS: Final = 10.0
# How many calls are in flight before their answers are read: the server works while we encode.
# Answers are a few bytes each, so that they never fill a socket before they are read.
_WINDOW: Final = 8


_RUN: Final = re.compile(rb"run_id:(\w+)")


class Script:
    """A script and the digest by which a server caches it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = sha1(text.encode(), usedforsecurity=False).hexdigest().encode()


class Call(NamedTuple):
    """A script's call; its keys are all in one slot, which is 0 if there are no slots."""

    slot: int
    keys: Sequence[bytes]
    arguments: Sequence[bytes]


class RedisClient:
    """One connection per server, opened at the first use."""

    def __init__(self, url: str, *, cluster: bool, answer_seconds: float) -> None:
        self._url, self._cluster, self._seconds = url, cluster, answer_seconds
        self._client: redis.Redis | RedisCluster | None = None
        self._lines: dict[redis.Redis, Any] = {}  # one connection per server

    def close(self) -> None:
        """Close connections; the next call opens new ones."""
        for server, line in self._lines.items():
            line.disconnect()
            server.connection_pool.release(line)
        self._lines.clear()
        if self._client is not None:
            client, self._client = self._client, None
            if isinstance(client, RedisCluster):
                # These stay open after its own close.
                client.disconnect_connection_pools()  # type: ignore[no-untyped-call]
            client.close()

    def ask(self, *command: bytes | str | int) -> Any:  # noqa: ANN401 - as many forms as commands
        """Return the answer to one command, in a cluster from the server of its key."""
        with self._translated():
            return self._any().execute_command(*command)

    def ask_all(self, commands: Sequence[Sequence[bytes]], slots: Sequence[int]) -> list[Any]:
        """Return the answers to commands that can all be repeated, each from its slot's server."""
        answers: list[Any] = [None] * len(commands)
        with self._translated():
            for server, mine in self._by_server(slots).items():
                line = self._line(server)
                for start in range(0, len(mine), 512):
                    part = mine[start : start + 512]
                    packed = [_packed(commands[at]) for at in part]
                    line.send_packed_command((b"".join(packed),), check_health=False)
                    for at in part:
                        answers[at] = _answer(line)
            for at, answer in enumerate(answers):
                if isinstance(answer, (exceptions.MovedError, exceptions.AskError)):
                    name, *rest = commands[at]
                    answers[at] = self._any().execute_command(name.decode(), *rest)
                elif isinstance(answer, Exception):
                    raise answer
        return answers

    def run(self, script: Script, calls: Iterable[Call]) -> list[Any]:
        """Return the answers to calls of a script, which can all be repeated."""
        answers: list[Any] = []
        in_flight: deque[tuple[Call, Any]] = deque()
        failed: list[Call] = []

        def read_answer() -> None:
            call, line = in_flight.popleft()
            answer = _answer(line)
            if isinstance(answer, _REPEATED):
                failed.append(call)
            elif isinstance(answer, Exception):
                raise answer
            else:
                answers.append(answer)

        with self._translated():
            for call in calls:
                line = self._line(self._server(call.slot))
                head = (b"EVALSHA", script.digest, b"%d" % len(call.keys))
                packed = _packed(head, call.keys, call.arguments)
                line.send_packed_command((packed,), check_health=False)
                in_flight.append((call, line))
                if len(in_flight) >= _WINDOW:
                    read_answer()
            while in_flight:
                read_answer()
            answers += [self._repeat(script, call) for call in failed]
        return answers

    def servers(self) -> list[redis.Redis]:
        """Return a client for each primary."""
        with self._translated():
            client = self._connected()
            if isinstance(client, redis.Redis):
                return [client]
            return [client.get_redis_connection(node) for node in client.get_primaries()]  # type: ignore[no-untyped-call]

    def runs(self) -> list[str]:
        """Return each primary's run id, which changes with a restart."""
        found = []
        for server in self.servers():
            with self._translated():
                line = self._line(server)
                line.send_packed_command((_packed((b"INFO", b"server")),), check_health=False)
                answer = _answer(line)
                if isinstance(answer, Exception):
                    raise answer
                match = _RUN.search(answer)
            found.append(match[1].decode() if match else "")
        return found

    def first_slots(self) -> list[int]:
        """Return the first slot of each contiguous range of slots of one primary."""
        with self._translated():
            client = self._connected()
            assert isinstance(client, RedisCluster)
            owners = [_node(client, slot).name for slot in range(SLOTS)]
        return [slot for slot in range(SLOTS) if slot == 0 or owners[slot - 1] != owners[slot]]

    def scan(self, pattern: bytes, count: int = 1000) -> Iterator[list[Any]]:
        """Yield the names that match, in the servers' order, some twice."""
        for server in self.servers():
            cursor = 0
            while True:
                with self._translated():
                    cursor, found = server.scan(cursor, match=pattern, count=count)
                if found:
                    yield found
                if not cursor:
                    break

    def info(self, section: str) -> list[dict[str, Any]]:
        """Return the INFO section of every primary."""
        with self._translated():
            return [server.info(section) for server in self.servers()]

    def _connected(self) -> redis.Redis | RedisCluster:
        if self._client is None:
            options: dict[str, Any] = {
                "socket_connect_timeout": _CONNECT_SECONDS,
                "socket_timeout": self._seconds,
                "protocol": 2,
            }
            if self._cluster:
                self._client = RedisCluster.from_url(self._url, **options)
            else:
                options["retry"] = Retry(NoBackoff(), 0)
                self._client = redis.Redis.from_url(self._url, **options)
        return self._client

    def _any(self) -> Any:  # noqa: ANN401 - the library leaves this one method untyped
        return self._connected()

    def _server(self, slot: int) -> redis.Redis:
        client = self._connected()
        if isinstance(client, redis.Redis):
            return client
        return client.get_redis_connection(_node(client, slot))

    def _by_server(self, slots: Sequence[int]) -> dict[redis.Redis, list[int]]:
        found = defaultdict(list)
        servers = {slot: self._server(slot) for slot in set(slots)}
        for at, slot in enumerate(slots):
            found[servers[slot]].append(at)
        return found

    def _line(self, server: redis.Redis) -> Any:  # noqa: ANN401 - the library's connections
        """Return the connection to a server for calls, which this client keeps."""
        line = self._lines.get(server)
        if line is None:
            line = self._lines[server] = server.connection_pool.get_connection()
        return line

    def _repeat(self, script: Script, call: Call) -> Any:  # noqa: ANN401 - what the script returns
        """Run a call again, with the script's text, on the server that now has its slot."""
        return self._any().execute_command(
            "EVAL", script.text, len(call.keys), *call.keys, *call.arguments
        )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate the library's errors into ours, and drop half-used connections."""
        try:
            yield
        except (redis.RedisError, exceptions.RedisClusterException, OSError) as error:
            self.close()
            raise translated(error) from error
        except BaseException:
            self.close()
            raise


# Errors to repeat: the server does not have the script cached, or slots are moving.
_REPEATED: Final = (
    exceptions.NoScriptError,
    exceptions.MovedError,
    exceptions.AskError,
    exceptions.TryAgainError,
)


def _packed(*groups: Sequence[bytes]) -> bytes:
    """Return a command encoded for the protocol; the library is slow with many parts."""
    parts = [b"*%d\r\n" % sum(map(len, groups))]
    for group in groups:
        parts += [b"$%d\r\n%b\r\n" % (len(each), each) for each in group]
    return b"".join(parts)


def _node(client: RedisCluster, slot: int) -> ClusterNode:
    return client.nodes_manager.get_node_from_slot(slot)


def _answer(line: Any) -> Any:  # noqa: ANN401 - as many forms as commands
    """Return an answer, even if it is an error; raise errors that end the connection."""
    try:
        return line.read_response()
    except exceptions.ResponseError as error:
        return error


_CAUSES: Final[tuple[tuple[str, type[CDCError], str, str], ...]] = (
    (
        "LOST",
        StoreLostError,
        "is not the data that was opened: flushed, or replaced by another generation",
        "",
    ),
    ("SWITCHED", SwitchedError, "shows readers another generation", ""),
    (
        "OVERTAKEN",
        OvertakenError,
        "is at another cut, of another copy of the follower",
        "",
    ),
    (
        "OLDER",
        UnavailableError,
        "is at an older frontier than was written to it: it lost its last writes in a crash",
        "the follower opens it again and continues from there; `appendfsync always` loses none",
    ),
    (
        "OOM",
        UnavailableError,
        "has no memory left for writes",
        "raise `maxmemory`, or follow fewer tables or columns; the follower retries",
    ),
    (
        "READONLY",
        UnavailableError,
        "is a replica that accepts no writes",
        "point `url` to the primary; after a failover the follower finds it by itself",
    ),
    ("LOADING", UnavailableError, "is loading its data", "it answers when it has; nothing to do"),
    (
        "MISCONF",
        UnavailableError,
        "accepts no writes, because it can't save its data",
        "see its log: usually the disk is full; the follower retries",
    ),
    (
        "MOVED",
        ConfigError,
        "is a node of a cluster",
        "set `cluster: true` in the follower's section `redis`",
    ),
    (
        "CROSSSLOT",
        ConfigError,
        "is a cluster behind one address, or a template spreads a row over hash slots",
        "set `cluster: true` in the follower's section `redis`",
    ),
    (
        "WRONGTYPE",
        ConfigError,
        "has another type of value at a key of the follower",
        "give it a `prefix` and templates that nothing else uses, then `cdc rebuild` it",
    ),
)
_PASSING: Final = ("BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED")


def translated(error: Exception) -> CDCError:
    """Return our error for the library's, without its text about keys and arguments."""
    text = str(error)
    if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError):
        return PermissionDeniedError(
            "Redis refuses the follower's user or password, or a command to it",
            hint="correct `url` (redis://user:password@host), or the user's rights: it needs every "
            "command but those of administration, on its keys (~*)",
        )
    word = (
        "OOM"
        if isinstance(error, exceptions.OutOfMemoryError)
        else text.removeprefix("ERR ").split(" ", maxsplit=1)[0]
    )
    word = next((ours for kind, ours in _KINDS.items() if isinstance(error, kind)), word)
    for cause, meaning, what, hint in _CAUSES:
        # In a script's error the server puts the cause after the location.
        if word == cause or f": {cause} " in text or f"-{cause} " in text:
            return meaning(f"Redis {what}", hint=hint or "the follower recovers without help")
    if "cluster support disabled" in text or "luster mode is not enabled" in text:
        return ConfigError(
            "Redis is no cluster", hint="remove `cluster` from the follower's section `redis`"
        )
    if word in _PASSING or not isinstance(error, exceptions.ResponseError):
        return UnavailableError(
            f"Redis can't be reached or gave no answer ({type(error).__name__})",
            hint="check that it runs and that `url` names it; the follower retries",
        )
    return ConfigError(
        f"Redis refuses a command: {text.partition(', with args')[0][:200]}",
        hint="Lockstep needs Redis 6.2 or newer, or what speaks its protocol with scripts",
    )


_KINDS: Final[dict[type[Exception], str]] = {
    exceptions.BusyLoadingError: "LOADING",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.MovedError: "MOVED",
    exceptions.AskError: "TRYAGAIN",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.ClusterCrossSlotError: "CROSSSLOT",
}
