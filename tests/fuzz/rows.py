"""Arbitrary rows through the compiled encoders, compared with the typed decoder and the contract.

An input is a table's number, a message's tag, and what follows the relation id. If the typed
decoder refuses it the compiled encoder must too; if it reads a row that a server could send, the
compiled encoder must give exactly the records that docs/EVENTS.md specifies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from random import Random
from typing import Final

from cdc.decode import pgoutput
from cdc.decode.messages import (
    UNCHANGED,
    Delete,
    Insert,
    KeyTuple,
    OldTuple,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    Truncate,
    TupleData,
    Update,
    Value,
)
from cdc.errors import CDCError
from cdc.events import LSN
from tests.property import reference
from tests.property.pgoutput_writer import encode
from tests.property.reference import Described, EventPlace
from tests.property.stream import PARTITIONS, TIME_US, Session, begin, frame, position
from tests.property.test_encoder_events import in_order

_LSN_OF_ROW: Final = 0x1_0000_1000
_TAGS: Final = b"IUD"


def _table(
    number: int, identity: ReplicaIdentity, key: tuple[str, ...], **types: int
) -> tuple[Described, Relation]:
    full = identity is ReplicaIdentity.FULL
    columns = tuple(
        RelationColumn(full or name in key, name, type_id, -1) for name, type_id in types.items()
    )
    relation = Relation(number, "public", f"t{number}", identity, columns)
    return Described(relation, key, schema_id=1, partitions=PARTITIONS), relation


_DEFAULT, _FULL = ReplicaIdentity.DEFAULT, ReplicaIdentity.FULL
_TABLES: Final = (
    _table(1, _DEFAULT, ("id",), id=20, name=25, price=1700, yes=16, at=1184, doc=3802),
    _table(2, _FULL, ("id",), id=23, at=1114, day=1082, hour=1083, raw=17, part=701),
    _table(3, _FULL, (), note=25, n=21),
    _table(4, _DEFAULT, ("b", "a"), a=25, b=2950, c=1043, d=869),
    _table(5, _DEFAULT, ("only",), only=25),
)

# What a server writes for a value of each type; it sends no other text.
_INTEGER: Final = rb"-?(0|[1-9]\d{0,17})"
_DAY: Final = rb"\d{4}-\d\d-\d\d"
_HOUR: Final = rb"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{0,5}[1-9])?"
_GRAMMAR: Final = {
    16: rb"[tf]",
    17: rb"\\x([0-9a-f]{2})*",
    20: _INTEGER,
    21: _INTEGER,
    23: _INTEGER,
    701: rb"NaN|-?Infinity|" + _INTEGER + rb"(\.\d{0,10}[1-9])?(e[+-][1-9]\d)?",
    869: rb"[0-9a-f.:/]+",
    1082: _DAY,
    1083: _HOUR,
    1114: _DAY + b" " + _HOUR,
    1184: _DAY + b" " + _HOUR + rb"\+00",
    1700: rb"NaN|-?Infinity|-?\d+(\.\d+)?",
    2950: rb"[0-9a-f-]{36}",
}


def _sendable(type_id: int, value: Value) -> bool:
    if not isinstance(value, bytes):
        return value is None or value is UNCHANGED
    grammar = _GRAMMAR.get(type_id)
    if grammar is None:
        return _is_text(value)
    if re.fullmatch(grammar, value, re.ASCII) is None:
        return False
    return type_id not in (1082, 1114, 1184) or _is_date(value)


def _is_text(value: bytes) -> bool:
    try:
        return "\0" not in value.decode()
    except UnicodeDecodeError:
        return False


def _is_date(value: bytes) -> bool:
    try:
        date.fromisoformat(value[:10].decode())
    except ValueError:
        return False
    return True


def _tuples(message: Insert | Update | Delete) -> Iterator[tuple[TupleData, bool]]:
    """Yield each tuple and whether it is an old one."""
    if not isinstance(message, Delete):
        yield message.new, False
    if not isinstance(message, Insert) and message.old is not None:
        yield message.old.values, True


def _is_sendable(message: Insert | Update | Delete, table: Described) -> bool:
    """Return whether a server could send it: an old row is complete, and any row has the key."""
    columns = table.relation.columns
    for values, old in _tuples(message):
        if len(values) != len(columns):
            return False
        for column, value in zip(columns, values, strict=True):
            if not _sendable(column.type_id, value):
                return False
            if value is UNCHANGED and (old or isinstance(message, Insert)):
                return False
            if value is UNCHANGED and column.name in table.key and message.old is None:  # type: ignore[union-attr]
                return False
    return True


def check(data: bytes) -> None:
    """Encode the row both ways, and compare."""
    if len(data) < 2:
        return
    table, relation = _TABLES[data[0] % len(_TABLES)]
    tag = _TAGS[data[1] % len(_TAGS)]
    payload = bytes([tag]) + relation.relation_id.to_bytes(4, "big") + data[2:]
    session = Session(position(), {relation.relation_id: table.key})
    session.feed([begin(), frame(relation)])
    try:
        session.feed([frame(payload, _LSN_OF_ROW)])
    except CDCError:
        published = None
    else:
        published = session.waiting()
    try:
        message = pgoutput.decode(payload)
    except CDCError:
        assert published is None, "the encoder takes what the decoder refuses"
        return
    assert isinstance(message, Insert | Update | Delete)
    if _is_sendable(message, table):
        place = EventPlace(_LSN_OF_ROW, LSN(0x2000), TIME_US, 771, 1, 1)
        assert published is not None, "the encoder refuses what a server could send"
        assert in_order(published) == reference.events(message, table, place)


# -- seeds: rows that a server could send ----------------------------------------------------------

_TEXTS: Final = {
    16: b"t",
    17: rb"\x00ff",
    20: b"-9007199254740993",
    21: b"7",
    23: b"0",
    701: b"1.5e+20",
    869: b"::1/64",
    1082: b"2026-02-28",
    1083: b"23:59:59.999999",
    1114: b"1970-01-01 00:00:00",
    1184: b"2026-01-02 03:04:05.1+00",
    1700: b"12.50",
    2950: b"0f0e0d0c-0b0a-0908-0706-050403020100",
}


def _row(chance: Random, table: Described, *, old: bool) -> TupleData:
    values: list[Value] = []
    for column in table.relation.columns:
        kinds: list[Value] = [_TEXTS.get(column.type_id, 'ü"\\%b'.encode())]
        if column.name not in table.key:
            kinds.append(None)
            if not old:
                kinds.append(UNCHANGED)
        values.append(chance.choice(kinds))
    return tuple(values)


def seeds() -> Iterator[bytes]:
    chance = Random(1)
    for number, (table, relation) in enumerate(_TABLES):
        relation_id = relation.relation_id
        for _ in range(4):
            new, old = _row(chance, table, old=False), _row(chance, table, old=True)
            for kind in (KeyTuple, OldTuple):
                for message in (Insert(relation_id, old), Update(relation_id, kind(old), new)):
                    yield _seed(number, message)
                yield _seed(number, Delete(relation_id, kind(old)))
            yield _seed(number, Update(relation_id, None, new))


def _seed(number: int, message: Insert | Update | Delete | Truncate) -> bytes:
    payload = encode(message)
    return bytes([number, _TAGS.index(payload[:1])]) + payload[5:]
