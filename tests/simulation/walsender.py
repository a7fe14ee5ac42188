"""What a walsender sends of a history: transactions complete, or in blocks before they commit.

A streamed transaction's blocks arrive among others' until its commit, with every change under its
own or a subtransaction's xid, and each table described again. Some subtransactions, and some
complete transactions that are not in the history, are rolled back meanwhile. A message outside any
transaction arrives at once. After the commit, the result must be as if it had been sent complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from msgspec.structs import replace as with_xid

from cdc.decode.messages import (
    LogicalMessage,
    Message,
    Origin,
    Relation,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
    Type,
)
from cdc.events import LSN
from tests.property.histories import History, Step, Transaction, history_of
from tests.property.stream import begin, commit, frame

# A history has a message outside any transaction as a transaction with this xid.
_NONE: Final = 0
_MOOD: Final = 90_001  # the user-defined type in histories
_AHEAD: Final = 3  # how many transactions may be open at once, with the one that commits next
_GHOSTS: Final = 5_000_000  # xids of transactions that are rolled back

RelationsById = dict[int, Relation]


def history(seed: int, transactions: int) -> History:
    """Return a history with logical messages in its transactions and between them."""
    chance, made = Random(f"{seed}/messages"), list[Transaction]()
    end = 0
    for transaction in history_of(seed, transactions):
        if end and transaction.final_lsn > end and chance.random() < 0.3:
            lsn = chance.randint(end + 1, transaction.final_lsn)
            made.append(Transaction(_NONE, end, lsn, 0, (_message(chance, lsn, own=True),)))
        steps = list(transaction.steps)
        while chance.random() < 0.15:
            at = chance.randint(0, len(steps))
            steps.insert(at, _message(chance, transaction.final_lsn, own=False))
        made.append(replace(transaction, steps=tuple(steps)))
        end = transaction.end_lsn
    return tuple(made)


def _message(chance: Random, lsn: int, *, own: bool) -> Step:
    content = chance.choice((b"", b"hello", b"\x00\xff"))
    return Step(lsn, LogicalMessage(not own, LSN(lsn), "app", content))


def complete(transaction: Transaction, relations: RelationsById) -> Iterator[bytes]:
    """Yield a transaction's frames as they are sent when it has committed."""
    if transaction.xid == _NONE:
        for step in transaction.steps:
            yield frame(step.message, step.lsn)
        return
    yield begin(transaction.final_lsn, transaction.xid, transaction.time_us)
    for step in transaction.steps:
        yield from _described(step, relations, None)
        yield frame(step.message, step.lsn)
    yield commit(transaction.final_lsn, transaction.end_lsn, transaction.time_us)


def _described(step: Step, relations: RelationsById, xid: int | None) -> Iterator[bytes]:
    for relation in step.relations:
        if step.described_again or relations.get(relation.relation_id) != relation:
            relations[relation.relation_id] = relation
            if any(column.type_id == _MOOD for column in relation.columns):
                yield frame(Type(_MOOD, "public", "mood", xid))
            yield frame(with_xid(relation, xid=xid))


@dataclass
class _Open:
    """A transaction of which blocks have been sent."""

    xid: int
    left: list[Step]
    relations: RelationsById = field(default_factory=dict)
    described: RelationsById = field(default_factory=dict)  # includes what an abort made it forget
    started: bool = False
    writer: int = 0  # the subtransaction that writes; 0 for the transaction itself
    newest: int = 0  # of its subtransactions


class Walsender:
    """One session's sender, starting at a transaction of the history."""

    def __init__(self, history: History, first: int, chance: Random, *, streaming: bool) -> None:
        self._history = history
        self._next = first
        self._chance = chance
        self._relations: RelationsById = {}
        self._open: dict[int, _Open] = {}
        self._ghosts: list[_Open] = []
        self._streamed = {
            index
            for index in range(first, len(history))
            if streaming and history[index].xid != _NONE and chance.random() < 0.4
        }

    def committed(self) -> Iterator[bytes]:
        """Yield the frames of the next transaction, and advance."""
        index, transaction = self._next, self._history[self._next]
        self._next += 1
        if index not in self._streamed:
            yield from complete(transaction, self._relations)
            return
        opened = self._opened(index)
        while opened.left or not opened.started:
            yield from self._block(opened)
        yield frame(
            StreamCommit(
                transaction.xid,
                LSN(transaction.final_lsn),
                LSN(transaction.end_lsn),
                transaction.time_us,
            ),
            transaction.final_lsn,
        )
        # A table that was altered is described again, even if it changed back to its earlier state.
        for relation_id, relation in opened.described.items():
            if self._relations.get(relation_id) != relation:
                self._relations.pop(relation_id, None)
        self._relations |= opened.relations
        del self._open[index]

    def block(self) -> Iterator[bytes]:
        """Yield a block of an open transaction, or the end of one that is rolled back."""
        near = [i for i in range(self._next, self._next + _AHEAD) if i in self._streamed]
        if near and self._chance.random() < 0.8:
            yield from self._block(self._opened(self._chance.choice(near)))
        elif self._streamed:
            yield from self._ghost()

    def _opened(self, index: int) -> _Open:
        if index not in self._open:
            transaction = self._history[index]
            self._open[index] = _Open(transaction.xid, list(transaction.steps))
        return self._open[index]

    def _ghost(self) -> Iterator[bytes]:
        """Yield some of a transaction that will be rolled back, or its end."""
        chance = self._chance
        if self._ghosts and chance.random() < 0.5:
            ghost = self._ghosts.pop(chance.randrange(len(self._ghosts)))
            yield frame(StreamAbort(ghost.xid, ghost.xid))
            return
        steps = [step for each in self._history for step in each.steps if each.xid != _NONE]
        if steps:
            xid = _GHOSTS + chance.randrange(1_000) * 1_000
            if all(ghost.xid != xid for ghost in self._ghosts):
                ghost = _Open(xid, chance.sample(steps, min(2, len(steps))))
                self._ghosts.append(ghost)
                yield from self._block(ghost)

    def _block(self, opened: _Open) -> Iterator[bytes]:
        chance = self._chance
        yield frame(StreamStart(opened.xid, first_segment=not opened.started))
        opened.started = True
        undone = 0
        for _ in range(chance.randint(0, 3)):
            if not opened.left:
                break
            if chance.random() < 0.2:
                opened.newest += 1
                opened.writer = opened.xid + 1_000 * opened.newest
            if chance.random() < 0.15:
                opened.newest += 1
                undone = opened.xid + 1_000 * opened.newest
                yield from self._rows(opened, opened.left[0], undone)
                break  # the newest one aborts: later ones must not abort with it
            yield from self._rows(opened, opened.left.pop(0), opened.writer or opened.xid)
        yield frame(StreamStop())
        if undone:
            yield frame(StreamAbort(opened.xid, undone))
            opened.described |= opened.relations
            opened.relations.clear()  # as pgoutput does: it describes the following tables again

    @staticmethod
    def _rows(opened: _Open, step: Step, writer: int) -> Iterator[bytes]:
        yield from _described(step, opened.relations, writer)
        message: Message = step.message
        if not isinstance(message, Origin):
            # A logical message carries the transaction's xid, not its subtransaction's.
            xid = opened.xid if isinstance(message, LogicalMessage) else writer
            message = with_xid(message, xid=xid)
        yield frame(message, step.lsn)
