"""The brokers as one writer sees them: partition leaders, its coordinator, a connection to each.

Every request may raise `LostError`: then what was known about that broker is forgotten, and
requested again when it is next needed.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final, TypeVar

from cdc.log.direct import requests
from cdc.log.direct.connection import Connection, LoginError, LostError
from cdc.log.direct.requests import API_VERSIONS, FIND_COORDINATOR, METADATA, Broker, Error
from cdc.log.direct.wire import MalformedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from cdc.log.direct.requests import Api
    from cdc.log.direct.security import Security
    from cdc.log.direct.wire import AnswerReader
    from cdc.log.partitions import Partition

T = TypeVar("T")

_DEFAULT_PORT: Final = 9092
_ADDRESS: Final = re.compile(r"(?:\w+://)?(?:\[([^\]]+)\]|([^:\[\]]+))(?::(\d+))?")


def addresses(servers: str) -> list[Broker]:
    """Return the brokers named in `log.bootstrap_servers`."""
    found = [_ADDRESS.fullmatch(each.strip()) for each in servers.split(",") if each.strip()]
    return [Broker(m[1] or m[2], int(m[3] or _DEFAULT_PORT)) for m in found if m]


class Brokers:
    """Used by one thread at a time; `cut` by any."""

    def __init__(self, servers: str, security: Security, client_id: str, seconds: float) -> None:
        """An answer may take `seconds`."""
        self._first = addresses(servers)
        self._security = security
        self._client_id = client_id
        self._seconds = seconds
        self._nodes: dict[int, Broker] = {}
        self._leaders: dict[Partition, int] = {}
        self._errors: Mapping[Partition, int] = {}
        self._coordinator: Broker | None = None
        self.connections: dict[Broker, Connection] = {}
        self.lost_at: dict[Broker, float] = {}
        self._ended = False

    def connection(self, node: Broker) -> Connection:
        """Return a connection to the node, with no request in flight."""
        known = self.connections.get(node)
        if known is not None and not known.stale:
            return known
        self._close(node)
        made = Connection(node, self._security, self._client_id, self._seconds)
        self.connections[node] = made
        if self._ended:
            self.lost(node)
            raise LostError("the writer has been abandoned")
        return made

    def _close(self, node: Broker) -> None:
        if connection := self.connections.pop(node, None):
            connection.close()

    def lost(self, node: Broker) -> None:
        """Forget the connection, and what depends on the node being available."""
        self._close(node)
        self.lost_at[node] = time.monotonic()
        if self._coordinator == node:
            self._coordinator = None
        self._leaders = {
            partition: leader
            for partition, leader in self._leaders.items()
            if self._nodes[leader] != node
        }

    def ask(self, node: Broker, api: Api, body: bytes, read: Callable[[AnswerReader], T]) -> T:
        """Return a node's answer as decoded by `read`."""
        try:
            return read(self.connection(node).ask(api, body))
        except MalformedError as error:
            self.lost(node)
            raise LostError(f"{node.host}:{node.port}: {error}") from error
        except LostError:
            self.lost(node)
            raise

    def any(self, api: Api, body: bytes, read: Callable[[AnswerReader], T]) -> T:
        """Return the first answer that any broker gives."""
        nodes = dict.fromkeys((*self.connections, *self._nodes.values(), *self._first))
        # One that hangs accepts a connection and does not answer: it is asked last.
        for_now = sorted(nodes, key=lambda node: self.lost_at.get(node, 0.0))
        why = LostError("log.bootstrap_servers names no broker")
        for node in for_now:
            try:
                return self.ask(node, api, body, read)
            except LoginError:
                raise
            except LostError as error:
                why = error
        raise why

    def features(self) -> requests.Features | Error:
        """Return what one broker supports: finalized features hold for all brokers."""
        return self.any(API_VERSIONS, requests.api_versions(), requests.read_api_versions)

    # -- leaders -----------------------------------------------------------------------------------

    def leader(self, partition: Partition) -> Broker | None:
        """Return the partition's leader, if it is known."""
        return self._nodes.get(self._leaders.get(partition, -1))

    def why(self, partition: Partition) -> int | None:
        """Return why the partition's leader is not known: the brokers' latest error code."""
        return self._errors.get(partition) or self._errors.get((partition[0], -1))

    def moved(self, partition: Partition) -> None:
        """Forget the partition's leader."""
        self._leaders.pop(partition, None)

    def learn(self, partitions: Iterable[Partition]) -> None:
        """Request the leaders that are not known."""
        topics = sorted({topic for topic, number in partitions if not self.leader((topic, number))})
        if topics:
            found = self.any(METADATA, requests.metadata(topics), requests.read_metadata)
            self._nodes.update(found.nodes)
            self._errors = found.errors
            known = found.leaders.items()
            self._leaders.update({at: node for at, node in known if node in found.nodes})

    # -- the coordinator ---------------------------------------------------------------------------

    def coordinator(self, transactional_id: str) -> Broker | Error:
        """Return the coordinator of the id's transactions."""
        if self._coordinator is None:
            body = requests.find_coordinator(transactional_id)
            found = self.any(FIND_COORDINATOR, body, requests.read_find_coordinator)
            if isinstance(found, Error):
                return found
            self._coordinator = found
        return self._coordinator

    def coordinator_moved(self) -> None:
        self._coordinator = None

    # -- the end -----------------------------------------------------------------------------------

    def cut(self) -> None:
        """Interrupt every wait for an answer. From any thread."""
        self._ended = True
        for connection in list(self.connections.values()):
            connection.cut()

    def close(self) -> None:
        self._ended = True
        for node in list(self.connections):
            self._close(node)
