"""Streamed before their commit or complete after it, transactions become the same records.

The simulated walsender streams some of a history's transactions: in blocks among those of others
and among complete transactions, with an origin at each block's start, every table described once
per transaction and again after each reported abort, rows of savepoints that are rolled back, also
nested and over several blocks, fully aborted transactions, keepalives and notices anywhere, and the
bytes cut anywhere. The real intake takes it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as with_xid

from cdc.decode.messages import (
    LogicalMessage,
    Origin,
    Relation,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
    Type,
)
from cdc.encode.routes import TableRoute
from cdc.errors import RereadError
from cdc.events import LSN
from cdc.sequence import intake as intake_module
from cdc.sequence import spool as spool_module
from cdc.sequence.intake import Intake
from cdc.sequence.spool import Spool
from tests.property.histories import History, Step, Transaction, frames, history_of
from tests.property.played import NOTICE, PlayedStream, cut, keepalive
from tests.property.stream import DATABASE, EPOCH, MANY, PREFIX, Session, frame
from tests.property.test_sequencer_histories import Log, by_partition

_MOOD: Final = 90_001  # the user-defined type in histories
_SUBS: Final = 1_000  # xids of one transaction's savepoints
_BETWEEN: Final = (keepalive(0), NOTICE)

chances = st.integers(0, 2**32 - 1).map(Random)


@st.composite
def histories(draw: st.DrawFn) -> History:
    return described_history(draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 7)))


def described_history(seed: int, transactions: int) -> History:
    """Return a history with logical messages in some transactions, with larger xids."""
    chance, made = Random(f"{seed}/messages"), []
    for transaction in history_of(seed, transactions):
        steps = list(transaction.steps)
        if chance.random() < 0.15:
            lsn = LSN(transaction.final_lsn)
            output = LogicalMessage(transactional=True, lsn=lsn, prefix="p", content=b"c")
            steps.insert(chance.randint(0, len(steps)), Step(lsn, output))
        made.append(replace(transaction, xid=transaction.xid * _SUBS, steps=tuple(steps)))
    return tuple(made)


# -- the walsender ---------------------------------------------------------------------------------


@dataclass
class Block:
    """Rows and their writers, and the aborts that are reported after them."""

    items: list[tuple[int, Step]] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)


class Streamed:
    """One transaction being streamed: what its blocks contain, and what was described in it."""

    def __init__(self, transaction: Transaction, chance: Random, *, doubtful: bool) -> None:
        self.xid = transaction.xid
        self.in_doubt = any(isinstance(s.message, LogicalMessage) for s in transaction.steps)
        self._chance = chance
        self._described: dict[int, Relation] = {}
        self._ever_described: dict[int, Relation] = {}
        self._origin: Origin | None = None
        self._newest = self.xid
        self._started = False
        self.blocks = list(self._planned(transaction, doubtful=doubtful))

    def commit(self, described: dict[int, Relation]) -> None:
        """Update which tables Postgres believes that the session knows from now on."""
        for relation_id, relation in self._ever_described.items():
            if described.get(relation_id) != relation:
                # The change of description made Postgres forget the previous one.
                described.pop(relation_id, None)
        described |= self._described

    def _planned(self, transaction: Transaction, *, doubtful: bool) -> Iterator[Block]:
        chance, left = self._chance, list(transaction.steps)
        junk = [s for s in left if s.relations]
        yield Block([(self.xid, left.pop(0)) for _ in range(chance.randint(0, 2)) if left])
        while left:
            kept = doubtful and chance.random() < 0.3
            writer = self._sub() if kept else self.xid
            block = Block([(writer, left.pop(0)) for _ in range(chance.randint(0, 3)) if left])
            # Messages without a table do not show whether a savepoint wrote them.
            self.in_doubt |= kept and any(step.relations for _, step in block.items)
            if junk and chance.random() < 0.4:
                yield from self._undone(
                    block, junk, described=not (doubtful and chance.random() < 0.3)
                )
            else:
                yield block

    def _undone(self, block: Block, junk: list[Step], *, described: bool) -> Iterator[Block]:
        """Yield the block with rows that are rolled back after it, or after the next one."""
        chance = self._chance
        subs = [self._sub() for _ in range(chance.randint(1, 3))]
        self.in_doubt |= not described
        written = sorted(chance.choices(subs, k=chance.randint(1, 5)))
        rows = [(sub, chance.choice(junk)) for sub in written]
        first = chance.randint(0, len(rows))
        block.items += rows[:first]
        yield block
        # An abort is reported for every savepoint with streamed rows.
        aborts = [sub for sub in subs if sub in written] if described else []
        chance.shuffle(aborts)
        yield Block(rows[first:], aborts)

    def _sub(self) -> int:
        self._newest += 1
        return self._newest

    def next_block(self) -> Iterator[bytes]:
        """Yield the next block, and the aborts that are reported after it."""
        block = self.blocks.pop(0)
        yield frame(StreamStart(self.xid, first_segment=not self._started))
        self._started = True
        if self._origin:
            yield frame(self._origin)
        for writer, step in block.items:
            for relation in step.relations:
                if step.described_again or self._described.get(relation.relation_id) != relation:
                    self._described[relation.relation_id] = relation
                    self._ever_described[relation.relation_id] = relation
                    if any(column.type_id == _MOOD for column in relation.columns):
                        yield frame(Type(_MOOD, "public", "mood", writer))
                    yield frame(with_xid(relation, xid=writer))
            message: Any = step.message
            if isinstance(message, Origin):
                self._origin = message
                yield frame(message, step.lsn)
                continue
            xid = self.xid if isinstance(message, LogicalMessage) else writer
            yield frame(with_xid(message, xid=xid), step.lsn)
        yield frame(StreamStop())
        for sub in block.aborts:
            yield frame(StreamAbort(self.xid, sub))
            self._described.clear()


@dataclass
class Sent:
    """What a session receives; `doubtful` are the transactions that are in doubt in it."""

    frames: list[bytes]
    doubtful: set[int]


def alike(history: History, begin: int, end: int) -> bool:
    """Whether no transaction in between has another description of a table that `end` writes.

    If one has, what is streamed before it is in doubt (tests/unit/test_inprogress.py).
    """
    described = versions(history[end])
    return all(
        len(described[oid] | known) == 1
        for each in history[begin:end]
        for oid, known in versions(each).items()
        if oid in described
    )


def versions(transaction: Transaction) -> dict[int, set[Relation]]:
    """Return all descriptions of each table in a transaction."""
    found = dict[int, set[Relation]]()
    for step in transaction.steps:
        for relation in step.relations:
            found.setdefault(relation.relation_id, set()).add(relation)
    return found


def sent(history: History, chance: Random, *, doubtful: bool) -> Sent:
    """Stream some of the transactions; each block at any time before its commit."""
    streamed = {
        index: Streamed(transaction, chance, doubtful=doubtful)
        for index, transaction in enumerate(history)
        if chance.random() < 0.6
    }
    if not doubtful:
        streamed = {index: one for index, one in streamed.items() if not one.in_doubt}
    ghosts = [
        Streamed(replace(each, xid=each.xid + 50_000_000), chance, doubtful=True)
        for each in history
        if chance.random() < 0.3
    ]
    found, described = list[bytes](), dict[int, Relation]()
    for index, transaction in enumerate(history):
        open_now = [one for at, one in streamed.items() if at > index and alike(history, index, at)]
        for each in (*open_now, *ghosts):
            while each.blocks and chance.random() < 0.3:
                found += each.next_block()
        if index in streamed:
            one = streamed[index]
            while one.blocks:
                found += one.next_block()
            found.append(
                frame(
                    StreamCommit(
                        one.xid,
                        LSN(transaction.final_lsn),
                        LSN(transaction.end_lsn),
                        transaction.time_us,
                    )
                )
            )
            one.commit(described)
        else:
            found += frames((transaction,), described)
        found += [frame(StreamAbort(g.xid, g.xid)) for g in ghosts if chance.random() < 0.1]
    return Sent(found, {index for index, one in streamed.items() if one.in_doubt})


# -- the session -----------------------------------------------------------------------------------


class Reading:
    """The real intake over a session's sequencer and encoders."""

    def __init__(self, log: Log, folder: Path, sends: list[bytes], chance: Random) -> None:
        with_more = [
            part
            for each in sends
            for part in ((chance.choice(_BETWEEN), each) if chance.random() < 0.1 else (each,))
        ]
        longest = chance.choice((3, 60, 1_000, 1 << 20))
        self.stream = PlayedStream(cut(b"".join(with_more), chance, longest), "on")
        self.session: Session = log.session()
        config: Any = SimpleNamespace(
            source=SimpleNamespace(spool_dir=str(folder)),
            pipeline="p",
            prefix=PREFIX,
            batch=SimpleNamespace(max_events=chance.choice((2, MANY))),
        )
        identity: Any = SimpleNamespace(database=DATABASE, epoch=EPOCH)
        tables: Any = SimpleNamespace(
            batch=self.session.batch,
            dead=self.session.dead,
            describe=self._describe,
            take_alteration=self.session.relations.take_alteration,
        )
        self.intake = Intake(
            config, self.stream, tables, identity, log.resume, lambda: None, lambda call: call()
        )
        self.session.sequencer = self.intake.sequencer

    def _describe(self, relation: Relation, *_: object, **__: object) -> TableRoute:
        # This may take long, and health reports meanwhile how far the stream is.
        assert self.stream.received_lsn >= self.session.sequencer.received_lsn
        return self.session.route(relation)

    def turns(self) -> Iterator[None]:
        """Take everything available, one chunk per iteration."""
        while self.intake.take() or self.intake.reading_back or self.stream.wire.pieces:
            yield


@contextmanager
def spooling(chance: Random) -> Iterator[Path]:
    """Provide a directory for spools that keep little in memory and return small chunks."""
    small = partial(Spool, memory_bytes=chance.choice((0, 500, 1 << 20)))
    with ExitStack() as closing:
        closing.enter_context(mock.patch.object(intake_module, "Spool", small))
        chunk_bytes = chance.choice((1, 200, 1 << 20))
        closing.enter_context(mock.patch.object(spool_module, "CHUNK_BYTES", chunk_bytes))
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        yield folder
        assert list(folder.glob("*/*")) == [], "a session left something"


def published_complete(history: History) -> Log:
    log = Log()
    session = log.session()
    session.feed(list(frames(history)))
    log.commit(session)
    return log


def same(log: Log, complete: Log) -> None:
    assert by_partition(log.records) == by_partition(complete.records)
    assert log.schemas == complete.schemas
    assert log.resume == complete.resume


@given(histories(), chances)
def test_streamed_transactions_become_the_records_of_complete_ones(
    history: History, chance: Random
) -> None:
    log = Log()
    with spooling(chance) as folder:
        reading = Reading(log, folder, sent(history, chance, doubtful=False).frames, chance)
        for _ in reading.turns():
            pass
        reading.intake.close()
    log.commit(reading.session)
    same(log, published_complete(history))


@given(histories(), chances)
def test_what_is_in_doubt_is_never_published_from_its_stream(
    history: History, chance: Random
) -> None:
    """Everything before it is, and the next session, which does not stream, gives the rest."""
    log, sends = Log(), sent(history, chance, doubtful=True)
    raised = False
    with spooling(chance) as folder:
        reading = Reading(log, folder, sends.frames, chance)
        try:
            for _ in reading.turns():
                pass
        except RereadError:
            raised = True
        reading.intake.close()
        assert raised == bool(sends.doubtful)
        log.commit(reading.session)
        if raised:
            first = min(sends.doubtful)
            before = published_complete(history[:first]) if first else Log()
            assert by_partition(log.records) == by_partition(before.records)
            session = log.session()
            session.feed(list(frames(history[chance.randint(0, first) :])))
            log.commit(session)
    same(log, published_complete(history))


@given(histories(), chances)
def test_crashes_anywhere_also_in_the_middle_of_a_read_back_lose_and_double_nothing(
    history: History, chance: Random
) -> None:
    """Each session streams other transactions than the previous one, or none."""
    log = Log()
    with spooling(chance) as folder:
        for last in [False] * chance.randint(0, 4) + [True]:
            since = chance.randint(0, log.first_uncovered(history))
            sends = sent(history[since:], chance, doubtful=False).frames
            reading = Reading(log, folder, sends, chance)
            left = 1 << 30 if last else chance.randint(0, 30)
            for _ in reading.turns():
                left -= 1
                if not left:
                    break
                if log.may_cut(reading.session) and chance.random() < 0.3:
                    log.commit(reading.session)
            if last and log.may_cut(reading.session):
                log.commit(reading.session)
            reading.intake.close()
    complete = published_complete(history)
    assert by_partition(log.records) == by_partition(complete.records)
    assert log.schemas == complete.schemas
    assert (log.resume.seq, log.resume.end_lsn) == (complete.resume.seq, complete.resume.end_lsn)
    assert not log.resume.open
