"""What an event must be, computed the slow way: typed messages, dicts, the contract's sentences.

Shares nothing with the compiled encoder except docs/EVENTS.md and the typed decoder, so that a
shared mistake would have to be made twice. Values are read by regular expressions and plain
arithmetic.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import cdc
from cdc.decode.messages import (
    UNCHANGED,
    Delete,
    Insert,
    KeyTuple,
    OldTuple,
    Relation,
    Truncate,
    TupleData,
    Update,
    Value,
)
from cdc.events import LSN
from tests.property import array_text

PLACEHOLDER: Final = "__debezium_unavailable_value"

Row = dict[str, Any]
RowMessage = Insert | Update | Delete | Truncate

_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)")
_TIME = re.compile(r"(\d\d):(\d\d):(\d\d)(\.\d{1,6})?")
_TIMESTAMP = re.compile(_DATE.pattern + " " + _TIME.pattern)
_INSTANT = re.compile(r"(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d(?:\.\d{1,6})?)\+00")


@dataclass(frozen=True)
class Described:
    """A table as the log knows it: its relation message and the settings chosen for it."""

    relation: Relation
    key: tuple[str, ...]
    schema_id: int
    partitions: int
    name: str = "shop"
    database: str = "shop_db"
    epoch: int = 3


@dataclass(frozen=True)
class EventPlace:
    """The position of a row message."""

    lsn: int
    commit_lsn: LSN
    commit_time_us: int
    xid: int
    ordinal: int
    seq: int  # of its first event
    origin: str | None = None


@dataclass(frozen=True)
class Expected:
    """A record without its bytes; `value` None is a tombstone."""

    key: Row | None
    value: Row | None


def value_of(type_id: int, modifier: int, text: str) -> object:  # noqa: C901, PLR0911 - a case a type
    """Return the JSON value that docs/EVENTS.md specifies for a column's text."""
    match type_id:
        case 16:
            return {"t": True, "f": False}[text]
        case 17:
            return base64.b64encode(bytes.fromhex(text.removeprefix("\\x"))).decode()
        case 20 | 21 | 23 | 26:
            return int(text)
        case 790:
            return text.replace("$", "").replace(",", "")
        case 1007 | 1009:
            return array_text.read(text, int if type_id == 1007 else str)
        case 700 | 701:
            return text if text in ("NaN", "Infinity", "-Infinity") else float(text)
        case 1082 if found := _DATE.fullmatch(text):
            return _days(*map(int, found.groups()))
        case 1083 if found := _TIME.fullmatch(text):
            micros = _micros(*found.groups())
            return micros // 1_000 if modifier in (0, 1, 2, 3) else micros
        case 1114 if found := _TIMESTAMP.fullmatch(text):
            year, month, day, *time = found.groups()
            micros = _days(int(year), int(month), int(day)) * 86_400_000_000 + _micros(*time)
            return micros // 1_000 if modifier in (0, 1, 2, 3) else micros
        case 1184 if found := _INSTANT.fullmatch(text):
            return f"{found[1]}T{found[2]}Z"
        case _:
            return text


def _days(year: int, month: int, day: int) -> int:
    """Return days since 1970-01-01 in the proleptic Gregorian calendar, by counting leap years."""
    y = year - 1
    before = y * 365 + y // 4 - y // 100 + y // 400
    leap = (year % 4 == 0 and year % 100 != 0) or year % 400 == 0
    lengths = (31, 29 if leap else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
    return before + sum(lengths[: month - 1]) + day - 1 - 719_162


def _micros(hours: str, minutes: str, seconds: str, fraction: str | None) -> int:
    complete = int(hours) * 3_600 + int(minutes) * 60 + int(seconds)
    return int((complete + Fraction("0" + (fraction or ".0"))) * 1_000_000)


def events(message: RowMessage, table: Described, place: EventPlace) -> list[Expected]:
    """Return the records of one table for one message in order, with tombstones."""
    match message:
        case Insert(_, new):
            return [_upsert(table, place, "c", None, new, {})]
        case Update(_, None, new):
            return [_upsert(table, place, "u", None, new, {})]
        case Update(_, old, new) if old is not None:
            return _update(table, place, old, new)
        case Delete(_, old):
            return _delete(table, place, old)
        case _:
            value = _event(table, place, place.seq, "t", None, None, [])
            return [Expected(None, value)]


def _update(
    table: Described, place: EventPlace, old: KeyTuple | OldTuple, new: TupleData
) -> list[Expected]:
    known = _known(table, old)
    upsert = _upsert(table, place, "u", _before(table, old), new, known)
    if upsert.key is None or upsert.key == _key(table, known):
        return [upsert]
    after = EventPlace(**{**vars(place), "seq": place.seq + 1})
    return [*_delete(table, place, old), _upsert(table, after, "c", None, new, known)]


def _delete(table: Described, place: EventPlace, old: KeyTuple | OldTuple) -> list[Expected]:
    key = _key(table, _known(table, old))
    value = _event(table, place, place.seq, "d", _before(table, old), None, [])
    tombstones = [Expected(key, None)] if key is not None else []
    return [Expected(key, value), *tombstones]


def _upsert(
    table: Described, place: EventPlace, op: str, before: Row | None, new: TupleData, known: Row
) -> Expected:
    row, unchanged = {}, []
    for column, value in zip(table.relation.columns, new, strict=True):
        if value is not UNCHANGED:
            row[column.name] = _json(column.type_id, column.type_modifier, value)
        elif column.name in known:
            row[column.name] = known[column.name]
        else:
            row[column.name] = PLACEHOLDER
            unchanged.append(column.name)
    return Expected(_key(table, row), _event(table, place, place.seq, op, before, row, unchanged))


def _known(table: Described, old: KeyTuple | OldTuple) -> Row:
    """Return an old tuple's values: all of them, or for an old key the key's columns."""
    return {
        column.name: _json(column.type_id, column.type_modifier, value)
        for column, value in zip(table.relation.columns, old.values, strict=True)
        if isinstance(old, OldTuple) or column.name in table.key
    }


def _before(table: Described, old: KeyTuple | OldTuple) -> Row:
    known = _known(table, old)
    return known if isinstance(old, OldTuple) else {name: known[name] for name in table.key}


def _key(table: Described, row: Row) -> Row | None:
    return {name: row[name] for name in table.key} or None


def _json(type_id: int, modifier: int, value: Value) -> object:
    if value is None:
        return None
    assert isinstance(value, bytes)
    return value_of(type_id, modifier, value.decode())


def _event(
    table: Described,
    place: EventPlace,
    seq: int,
    op: str,
    before: Row | None,
    after: Row | None,
    unchanged: list[str],
) -> Row:
    us = place.commit_time_us
    times = {"ts_ms": us // 1_000, "ts_us": us, "ts_ns": us * 1_000}
    source = {
        "version": cdc.__version__,
        "connector": "postgresql",
        "name": table.name,
        "snapshot": "false",
        "db": table.database,
        "schema": table.relation.namespace,
        "table": table.relation.name,
        "txId": place.xid,
        "lsn": place.lsn,
        "epoch": table.epoch,
        "commit_lsn": str(place.commit_lsn),
        "ordinal": place.ordinal,
        "seq": seq,
        "schema_id": table.schema_id,
        **times,
        **({"origin": place.origin} if place.origin else {}),
        **({"unchanged": unchanged} if unchanged else {}),
    }
    envelope = {"before": before, "after": after, "source": source, "op": op}
    return {**envelope, **times, "transaction": None}


def murmur2(data: bytes) -> int:
    """Return Kafka's 32-bit murmur2 (org.apache.kafka.common.utils.Utils), signed as in Java."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = 0x9747B28C ^ len(data)
    body = len(data) & ~3
    for i in range(0, body, 4):
        k = int.from_bytes(data[i : i + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    if tail := data[body:]:
        h = (h ^ int.from_bytes(tail, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    h ^= h >> 15
    return h - (1 << 32) if h >= 1 << 31 else h


def partition_of(key: bytes | None, partitions: int) -> int:
    return 0 if key is None else (murmur2(key) & 0x7FFFFFFF) % partitions
