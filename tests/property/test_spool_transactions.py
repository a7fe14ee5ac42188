"""The spool returns exactly what survives, however transactions nest, interleave and abort.

Backends are simulated as Postgres runs them: savepoints nest, an xid is assigned with the first
write and the parents' before it, an abort includes the children that were released into it. What is
streamed lags what was written; what is aborted before it was streamed is never reported. The
model is a list of runs, each with its writer.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from cdc.sequence import spool
from cdc.sequence.spool import Spool


class Sub:
    """A transaction or savepoint; `xid` is None until it writes."""

    def __init__(self, parent: Sub | None) -> None:
        self.parent = parent
        self.xid: int | None = None
        self.streamed = False
        self.children: list[Sub] = []
        if parent:
            parent.children.append(self)

    def family(self) -> list[Sub]:
        return [self, *(sub for child in self.children for sub in child.family())]


class Backend:
    """One session's open transaction, and what of it the spool must return."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stack = [Sub(None)]
        self.waiting: list[tuple[Sub, bytes]] = []
        self.kept: list[tuple[Sub, bytes]] = []

    def xid(self, sub: Sub) -> int:
        if sub.xid is None:
            if sub.parent:
                self.xid(sub.parent)
            sub.xid = self.world.next_xid()
        return sub.xid

    @property
    def top(self) -> int:
        return self.xid(self.stack[0])

    def write(self, length: int) -> None:
        self.xid(self.stack[-1])
        self.waiting.append((self.stack[-1], self.world.chance.randbytes(length)))

    def stream(self) -> None:
        """Send what is waiting, in runs of one subtransaction, as one append or several."""
        for sub, data in self.waiting:
            sub.streamed = True
            self.world.spool.append(self.top, self.xid(sub), memoryview(data))
            self.world.check_limits()
        self.kept += self.waiting
        self.waiting = []

    def savepoint(self) -> None:
        self.stack.append(Sub(self.stack[-1]))

    def release(self) -> None:
        if len(self.stack) > 1:
            self.stack.pop()

    def rollback(self) -> None:
        """Roll back to the innermost savepoint: it and everything released into it."""
        if len(self.stack) == 1:
            return
        sub = self.stack.pop()
        aborted = sub.family()
        sub.parent.children.remove(sub)  # type: ignore[union-attr]
        self.waiting = [run for run in self.waiting if run[0] not in aborted]
        self.kept = [run for run in self.kept if run[0] not in aborted]
        reported = [each for each in aborted if each.streamed]
        self.world.chance.shuffle(reported)
        for each in reported:
            self.world.spool.abort(self.top, self.xid(each))

    def commit(self) -> None:
        self.stream()
        chunks = list(self.world.spool.commit(self.top))
        assert b"".join(chunks) == b"".join(data for _, data in self.kept)
        assert all(chunks)
        ends, at = set(), 0
        for _, data in self.kept:
            at += len(data)
            ends.add(at)
        at = 0
        for chunk in chunks:
            at += len(chunk)
            assert at in ends  # no message is split
            longest = max(len(data) for _, data in self.kept)
            assert len(chunk) < spool.CHUNK_BYTES + longest
        assert all(len(chunk) >= spool.CHUNK_BYTES for chunk in chunks[:-1])

    def abort(self) -> None:
        if any(sub.streamed for sub in self.stack[0].family()):
            self.world.spool.abort(self.top, self.top)

    def drop_midway(self) -> None:
        reader = self.world.spool.commit(self.top)
        next(reader, None)
        del reader


class World:
    """Some backends that share one spool."""

    def __init__(self, directory: Path, memory_bytes: int, seed: int, first_xid: int) -> None:
        self.spool = Spool(directory, memory_bytes=memory_bytes)
        self.limit = memory_bytes
        self.chance = Random(seed)
        self.xid = first_xid
        self.backends: dict[int, Backend] = {}

    def next_xid(self) -> int:
        self.xid = self.xid + 1 & 0xFFFFFFFF
        # As in Postgres, the first three are never a transaction's.
        self.xid = max(self.xid, 3)
        return self.xid

    def check_limits(self) -> None:
        assert self.spool.memory_bytes <= self.limit
        for path in self.spool.folder.iterdir():
            assert path.stat().st_size == self.spool._open[int(path.name)].written

    def do(self, what: str, which: int, amount: int) -> None:
        backend = self.backends.setdefault(which, Backend(self))
        if what == "write":
            backend.write(amount)
        else:
            getattr(backend, what)()
        if what in {"commit", "abort", "drop_midway"}:
            del self.backends[which]
        self.check_limits()


STEPS = [
    *["write"] * 5, *["savepoint"] * 3, *["release", "rollback"] * 2, *["stream"] * 3,
    "commit", "abort", "drop_midway",
]  # fmt: skip


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 3), st.integers(1, 300)), max_size=120
    ),
    memory_bytes=st.sampled_from([0, 40, 1_000, 1 << 20]),
    chunk_bytes=st.sampled_from([1, 64, 1_000]),
    first_xid=st.sampled_from([3, 0xFFFFFFF0]),
    seed=st.integers(0, 1_000),
)
def test_a_commit_gives_exactly_the_bytes_that_survived(
    steps: list[tuple[str, int, int]],
    memory_bytes: int,
    chunk_bytes: int,
    first_xid: int,
    seed: int,
) -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.object(spool, "CHUNK_BYTES", chunk_bytes),
    ):
        home = Path(directory) / "spools"
        world = World(home, memory_bytes, seed, first_xid)
        for step in steps:
            world.do(*step)
        for backend in world.backends.values():
            backend.commit()
        assert (len(world.spool._open), world.spool.memory_bytes) == (0, 0)
        assert list(world.spool.folder.iterdir()) == []
        world.spool.close()
        assert list(home.iterdir()) == []
