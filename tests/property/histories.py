"""Histories of source transactions, and the frames that a walsender sends of them to a session.

A history is what the database did; `frames` is what one session receives from some transaction on:
a relation message before a table's first row and whenever its columns changed, often without need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final, TypeAlias

from hypothesis import strategies as st

from cdc.decode.messages import (
    UNCHANGED,
    Delete,
    Insert,
    KeyTuple,
    Message,
    OldTuple,
    Origin,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    Truncate,
    TupleData,
    Type,
    Update,
    Value,
)
from cdc.events import LSN
from tests.property import reference
from tests.property.reference import Described, EventPlace, Expected, RowMessage
from tests.property.stream import EPOCH, PARTITIONS, TIME_US, begin, commit, frame


def _column(name: str, type_id: int, *, key: bool = False) -> RelationColumn:
    return RelationColumn(key, name, type_id, -1)


_NAME, _EXTRA = _column("name", 25), _column("extra", 90_001)
_FULL = ReplicaIdentity.FULL


def _table(number: int, name: str, identity: ReplicaIdentity, *columns: RelationColumn) -> Relation:
    return Relation(number, "cdc" if number == 3 else "public", name, identity, columns)


# Keyed; keyed by two columns in another order than the table's; keyed, complete old rows; keyless.
TABLES: Final = (
    _table(1, "users", ReplicaIdentity.DEFAULT, _column("id", 20, key=True), _NAME,
           _column("body", 25)),
    _table(2, "lines", ReplicaIdentity.DEFAULT, _column("id", 20, key=True),
           _column("no", 23, key=True), _NAME),
    _table(3, "whole", _FULL, _column("id", 20, key=True), _column("name", 25, key=True)),
    _table(4, "clicks", ReplicaIdentity.NOTHING, _column("id", 20), _NAME),
)  # fmt: skip
KEYS: Final = {1: ("id",), 2: ("no", "id"), 3: ("id",), 4: ()}


@dataclass(frozen=True)
class Step:
    """A message with its WAL address, and its table at that time."""

    lsn: int
    message: Message
    relations: tuple[Relation, ...] = ()
    described_again: bool = False  # the walsender forgot that it had described the table


@dataclass(frozen=True)
class Transaction:
    xid: int
    final_lsn: int
    end_lsn: int
    time_us: int
    steps: tuple[Step, ...]


History: TypeAlias = tuple[Transaction, ...]


def _row(chance: Random, relation: Relation) -> TupleData:
    values: list[Value] = []
    for column in relation.columns:
        texts = [b"1", b"2", b"3"] if column.type_id in (20, 23) else [b"a", b'"', "é".encode()]
        null = column.name not in KEYS[relation.relation_id] and chance.random() < 0.2
        values.append(None if null else chance.choice(texts))
    return tuple(values)


def _old(relation: Relation, row: TupleData) -> KeyTuple | OldTuple:
    if relation.replica_identity is _FULL:
        return OldTuple(row)
    key = KEYS[relation.relation_id]
    named = zip(relation.columns, row, strict=True)
    return KeyTuple(tuple([value if column.name in key else None for column, value in named]))


def _change(chance: Random, relation: Relation) -> RowMessage:
    number, keyless = relation.relation_id, not KEYS[relation.relation_id]
    kind = "i" if keyless else chance.choice("iiuukd")
    row = _row(chance, relation)
    if kind == "i":
        return Insert(number, row)
    if kind == "d":
        return Delete(number, _old(relation, row))
    if kind == "k" or relation.replica_identity is _FULL:
        return Update(number, _old(relation, _row(chance, relation)), row)
    kept = [
        UNCHANGED if column.name == "body" and chance.random() < 0.5 else value
        for column, value in zip(relation.columns, row, strict=True)
    ]
    return Update(number, None, tuple(kept))


def _step(chance: Random, lsn: int, tables: list[Relation]) -> Step:
    kind = chance.choice("rrrrrrto")
    if kind == "o":
        return Step(lsn, Origin(LSN(0), chance.choice(["elsewhere", 'far"off'])))
    again = chance.random() < 0.2
    if kind == "t":
        chosen = tuple(chance.sample(tables, chance.randint(1, 2)))
        numbers = tuple(relation.relation_id for relation in chosen)
        return Step(lsn, Truncate(numbers, cascade=False, restart_identity=False), chosen, again)
    relation = chance.choice(tables)
    return Step(lsn, _change(chance, relation), (relation,), again)


def _altered(relation: Relation) -> Relation:
    """Return the relation with one more column, or without it again."""
    columns = relation.columns
    columns = columns[:-1] if _EXTRA in columns else (*columns, _EXTRA)
    identity = relation.replica_identity
    return Relation(relation.relation_id, relation.namespace, relation.name, identity, columns)


def history_of(seed: int, transactions: int) -> History:
    """Return transactions in commit order, some of them empty; columns are added and dropped."""
    chance, tables = Random(seed), list(TABLES)
    history, lsn = [], 0x1_0000_0000
    for xid in range(700, 700 + transactions):
        if chance.random() < 0.3:
            altered = chance.randrange(len(tables))
            tables[altered] = _altered(tables[altered])
        # A row's own address may be before the commit of the previous transaction.
        steps = tuple(
            _step(chance, lsn - chance.randint(0, 40), tables) for _ in range(chance.randint(0, 6))
        )
        final_lsn = lsn + chance.randint(0, 50)
        # The end may be where the next transaction's commit record starts.
        end_lsn = final_lsn + chance.randint(1, 9)
        time_us = TIME_US + xid * chance.randint(1, 1_000_000)
        history.append(Transaction(xid, final_lsn, end_lsn, time_us, steps))
        lsn = end_lsn
    return tuple(history)


# From a seed and not value by value: that is twenty times as fast, and the seed determines all.
histories: Final = st.builds(history_of, st.integers(0, 2**32 - 1), st.integers(1, 6))


def frames(history: History, relations: dict[int, Relation] | None = None) -> Iterator[bytes]:
    """Yield what a session receives that knows these tables: at its start none."""
    relations = {} if relations is None else relations
    for transaction in history:
        yield begin(transaction.final_lsn, transaction.xid, transaction.time_us)
        for step in transaction.steps:
            for relation in step.relations:
                if step.described_again or relations.get(relation.relation_id) != relation:
                    relations[relation.relation_id] = relation
                    if _EXTRA in relation.columns:
                        yield frame(Type(_EXTRA.type_id, "public", "mood"))
                    yield frame(relation)
            yield frame(step.message, step.lsn)
        yield commit(transaction.final_lsn, transaction.end_lsn, transaction.time_us)


def expected(history: History) -> list[Expected]:
    """Return every record of the history in its order, computed the slow way."""
    records: list[Expected] = []
    relations: dict[int, Described] = {}
    seq = schema_id = 0
    for transaction in history:
        ordinal, origin = 0, None
        for step in transaction.steps:
            if isinstance(step.message, Origin):
                origin = step.message.name
            for relation in step.relations:
                known = relations.get(relation.relation_id)
                if known is None or known.relation != relation:
                    schema_id += 1
                    key = KEYS[relation.relation_id]
                    described = Described(relation, key, schema_id, PARTITIONS, epoch=EPOCH)
                    relations[relation.relation_id] = described
            for message in _by_table(step.message):
                ordinal += 1
                relation_id = (
                    message.relation_ids[0]
                    if isinstance(message, Truncate)
                    else message.relation_id
                )
                final = LSN(transaction.final_lsn)
                place = EventPlace(
                    step.lsn, final, transaction.time_us, transaction.xid, ordinal, seq + 1, origin
                )
                made = reference.events(message, relations[relation_id], place)
                seq += sum(record.value is not None for record in made)
                records += made
    return records


def _by_table(message: Message) -> list[RowMessage]:
    match message:
        case Truncate(relation_ids, cascade, restart):
            return [Truncate((one,), cascade, restart) for one in relation_ids]
        case Insert() | Update() | Delete():
            return [message]
        case _:
            return []
