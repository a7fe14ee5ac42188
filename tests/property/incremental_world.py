"""A table that changes while an incremental snapshot reads it, in every way Postgres allows.

Commits come in another order than their xids. A commit may be in the WAL and not visible yet, for
any time: meanwhile it holds its rows' locks, so whatever is visible at one moment is a state that a
SELECT can see. Rows change their keys without sending their TOAST values. The daemon reads the WAL
late, in any cuts, and dies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, cast

import orjson

from cdc.config import Config
from cdc.decode.binary_copy import row_bytes
from cdc.decode.messages import (
    UNCHANGED,
    Delete,
    Insert,
    KeyTuple,
    LogicalMessage,
    Message,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    Truncate,
    Update,
    Value,
)
from cdc.errors import CDCError, UnavailableError
from cdc.events import LSN
from cdc.sequence.sequencer import Sequencer
from cdc.snapshot.incremental.fetcher import Fetcher
from cdc.snapshot.incremental.governor import Governor
from cdc.snapshot.incremental.job import ChunkSizes
from cdc.snapshot.incremental.manager import IncrementalSnapshots
from cdc.snapshot.incremental.verifier import Verifier
from cdc.source import described
from cdc.source.chunks import Chunk, ChunkRequest, InProgress
from cdc.source.lookups import SentTable, TableFacts
from tests.property.stream import begin, commit, frame

TABLE: Final = 7
KEYS: Final[dict[int, tuple[str, ...]]] = {TABLE: ("id",)}
RELATION: Final = Relation(
    TABLE,
    "public",
    "wide",
    ReplicaIdentity.DEFAULT,
    (
        RelationColumn(key=True, name="id", type_id=20, type_modifier=-1),
        RelationColumn(key=False, name="n", type_id=23, type_modifier=-1),
        RelationColumn(key=False, name="body", type_id=25, type_modifier=-1),
    ),
)
_DESCRIBED: Final = described.DescribedTable(
    oid=TABLE,
    schema="public",
    name="wide",
    replica_identity="d",
    columns=tuple(
        described.SentColumn(c.name, c.type_id, c.type_modifier, c.key) for c in RELATION.columns
    ),
    types={},
    outputs=("id", "n", "body"),
    facts=TableFacts(("id",), {"id": False}),
    published=SentTable((), None),
    heaps=(),
)
SPAN: Final = 50  # keys
_FULL: Final = 2  # how many rows reach a chunk's limit in bytes

Row = tuple[int, str | None]
Op = tuple[int, Row | None]  # a key and its row from then on


@dataclass
class Committed:
    """A transaction in the WAL."""

    xid: int
    lsn: int
    messages: list[Message]
    ops: list[Op] = field(default_factory=list)

    @property
    def end_lsn(self) -> int:
        return self.lsn + 8

    @property
    def frames(self) -> list[bytes]:
        middle = [frame(message, self.lsn - 1) for message in self.messages]
        return [begin(self.lsn, self.xid % 2**32), *middle, commit(self.lsn, self.end_lsn)]


class Database:
    """The source."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.wal: list[Committed] = []
        self.rows: dict[int, Row] = {}  # visible to a SELECT
        self.hung: list[Committed] = []
        self._next_xid = 2**32 - 15  # they wrap around
        self._ended = self._next_xid - 1
        self._open: list[int] = []
        self._lsn = 0x1_0000
        for key in range(0, SPAN, 2):
            self.rows[key] = (0, f"first {key}")

    def commit(self, messages: list[Message], ops: list[Op], *, hangs: bool = False) -> Committed:
        while self.chance.random() < 0.3:
            self._open.append(self._new_xid())
        with_old = self._open and self.chance.random() < 0.4
        xid = self._open.pop(0) if with_old else self._new_xid()
        self._lsn += self.chance.randint(20, 60)
        made = Committed(xid, self._lsn, messages, ops)
        self.wal.append(made)
        if hangs:
            self.hung.append(made)
        else:
            self._show(made)
        return made

    def release(self) -> None:
        """Make a hanging commit visible."""
        if self.hung:
            self._show(self.hung.pop(self.chance.randrange(len(self.hung))))

    def snapshot(self) -> str:
        running = [*self._open, *(each.xid for each in self.hung)]
        xmax = self._ended + 1
        listed = sorted(x for x in running if x < xmax)
        return f"{min([xmax, *running])}:{xmax}:{','.join(map(str, listed))}"

    def write(self) -> None:
        """Commit a transaction of a few changes."""
        rows, messages, ops = dict(self.rows), list[Message](), list[Op]()
        locked = {key for each in self.hung for key, _ in each.ops}
        if not self.hung and self.chance.random() < 0.03:
            messages.append(Truncate((TABLE,), False, False))  # noqa: FBT003 - its options
            ops += [(key, None) for key in rows]
        else:
            for _ in range(self.chance.randint(1, 3)):
                self._change(rows, locked, messages, ops)
        if messages:
            self.commit(messages, ops, hangs=self.chance.random() < 0.15)

    def _change(
        self, rows: dict[int, Row], locked: set[int], messages: list[Message], ops: list[Op]
    ) -> None:
        chance = self.chance
        there = [key for key in rows if key not in locked]
        free = [key for key in range(SPAN) if key not in rows and key not in locked]
        kind = chance.choice("iuuubkkd")
        body: str | None = chance.choice([None, "", "x", f"text {chance.randrange(1_000)}"])
        if kind == "i" and free:
            key = chance.choice(free)
            rows[key] = row = (chance.randrange(100), body)
            messages.append(Insert(TABLE, _tuple(key, row)))
            ops.append((key, row))
        elif kind == "d" and there:
            key = chance.choice(there)
            del rows[key]
            messages.append(Delete(TABLE, KeyTuple((_text(key), None, None))))
            ops.append((key, None))
        elif kind in "ub" and there:
            key = chance.choice(there)
            new = (chance.randrange(100), body if kind == "b" else rows[key][1])
            messages.append(Update(TABLE, None, _tuple(key, new, sent=kind == "b")))
            rows[key] = new
            ops.append((key, new))
        elif kind == "k" and there and free:
            key, to = chance.choice(there), chance.choice(free)
            sent = chance.random() < 0.2
            new = (chance.randrange(100), body if sent else rows[key][1])
            old = KeyTuple((_text(key), None, None))
            messages.append(Update(TABLE, old, _tuple(to, new, sent=sent)))
            del rows[key]
            rows[to] = new
            ops += [(key, None), (to, new)]

    def _new_xid(self) -> int:
        self._next_xid += 1
        return self._next_xid - 1

    def _show(self, each: Committed) -> None:
        self._ended = max(self._ended, each.xid)
        for key, row in each.ops:
            if row is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = row


def _text(value: object) -> bytes:
    return str(value).encode()


def _tuple(key: int, row: Row, *, sent: bool = True) -> tuple[Value, ...]:
    n, body = row
    # A NULL is always sent; only a TOASTed value can be left out.
    kept = UNCHANGED if not sent and body else None if body is None else body.encode()
    return _text(key), _text(n), kept


class Source:
    """A connection to the model, which keeps changing meanwhile."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self, schema: str, table: str) -> tuple[int, int]:
        assert (schema, table) == (RELATION.namespace, RELATION.name)
        self._continue()
        return TABLE, SPAN

    def write_message(self, prefix: str, content: bytes) -> None:
        self._continue()
        emit(self._database, prefix, content)
        self._continue()
        self._may_fail()  # written, and the answer was lost

    def in_progress(self) -> InProgress:
        waiting = frozenset(each.xid for each in self._database.hung)
        return InProgress(self._database.snapshot(), waiting, hidden=False)

    def cancel(self) -> None:
        """Nothing to cancel or close."""

    close = end = cancel

    def _may_fail(self) -> None:
        if self._database.chance.random() < 0.02:
            raise UnavailableError("the connection was lost", hint="retry")

    def _continue(self) -> None:
        while self._database.chance.random() < 0.6:
            self._database.write()
        if self._database.chance.random() < 0.3:
            self._database.release()

    def read(self, asked: ChunkRequest) -> Chunk:
        assert asked.relation_id == TABLE
        self._may_fail()
        rows = self._database.rows
        to = asked.to
        if to is None and not asked.keys:
            to = (str(max(rows)),) if rows else None
        after = int(asked.after[0]) if asked.after else -1
        if asked.keys:
            wanted = [
                k for k in sorted({int(key) for (key,) in asked.keys} & rows.keys()) if k > after
            ]
        else:
            wanted = [key for key in sorted(rows) if to and after < key <= int(to[0])]
        found = wanted[: min(asked.rows, _FULL)]
        copied = [
            b"\0\3" + row_bytes((_text(k), _text(n), None if body is None else body.encode()))
            for k, (n, body) in ((key, rows[key]) for key in found)
        ]
        ended = len(found) < min(asked.rows, _FULL)
        to = to if asked.rows else None
        snapshot = self._database.snapshot()
        return Chunk(_DESCRIBED, ("id",), snapshot, copied, to, ended, len(copied), 0.04)


def emit(database: Database, prefix: str, content: bytes) -> None:
    database.commit([LogicalMessage(True, LSN(1), prefix, content)], [])  # noqa: FBT003 - transactional


class Future:
    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self._over, self._result = call, False, None
        self._error: CDCError | None = None

    def run(self) -> None:
        try:
            self._result = self._call()
        except CDCError as error:
            self._error = error
        self._over = True

    def done(self) -> bool:
        return self._over

    def result(self) -> Any:  # noqa: ANN401 - a call's own
        if self._error is not None:
            raise self._error
        return self._result


class Worker:
    """Runs its calls when the schedule says."""

    def __init__(self) -> None:
        self.calls: list[Future] = []

    def submit(self, call: Callable[[], Any]) -> Future:
        self.calls.append(Future(call))
        return self.calls[-1]

    def run_one(self) -> None:
        if self.calls:
            self.calls.pop(0).run()


class Clock:
    """Time passes whenever it is read."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 0.2
        return self._now

    def time_ns(self) -> int:
        return int(self.monotonic() * 1e9)


def snapshots(
    config: Config,
    worker: Worker,
    sequencer: Sequencer,
    verifier: Verifier,
    connect: Callable[[], Source],
) -> IncrementalSnapshots:
    """Return the incremental snapshots of a session that reads the model, in small chunks."""
    clock = Clock()
    return IncrementalSnapshots(
        config, Fetcher(cast("Any", worker), cast("Any", connect), clock), sequencer, verifier, {},
        clock=clock, sizes=ChunkSizes(first=4, least=2, most=5, keys=4),
        governor=Governor(added_seconds=(1e9, 1e9)),
    )  # fmt: skip


def folded(values: list[bytes]) -> dict[int, Row]:
    """Return the table that the events produce, in `seq` order; every value must have been sent."""
    rows: dict[int, dict[str, Any]] = {}
    moved: tuple[tuple[str, int], dict[str, Any]] | None = None
    for event in sorted(map(orjson.loads, values), key=lambda event: event["source"]["seq"]):
        source, place = event["source"], (event["source"]["commit_lsn"], event["source"]["ordinal"])
        if event["op"] == "t":
            rows.clear()
        elif event["op"] == "d":
            key = event["before"]["id"]
            moved = place, rows.pop(key, {})
        else:
            after = event["after"]
            earlier = rows.get(after["id"], {})
            if event["op"] == "c":
                earlier = moved[1] if moved and moved[0] == place else {}
            for column in source.get("unchanged", ()):
                after[column] = earlier.get(column, "UNTOLD")
            rows[after["id"]] = after
    return {key: (row["n"], row["body"]) for key, row in rows.items()}
