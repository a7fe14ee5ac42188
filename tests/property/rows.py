"""Relations and rows as Postgres might send them: any name, any identity, any value's text."""

from __future__ import annotations

import math
from datetime import date, datetime, time
from decimal import Decimal
from typing import NamedTuple

from hypothesis import strategies as st

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
from tests.property.reference import PLACEHOLDER, RowMessage

# Any character but zero, which Postgres refuses; surrogates are not characters.
_characters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
_texts = st.one_of(
    st.text(_characters, max_size=20),
    st.sampled_from(
        [PLACEHOLDER, '"', "\\", "%", "%b", "%(x)s", "\x01\x1f\x7f", "\n\t\r\b\f", "null", "𝄞🂡", ""]
    ),
)
# Long enough for names that cause trouble; short enough that two fit a topic's name when escaped.
short_names = st.one_of(
    st.text(_characters, min_size=1, max_size=5),
    st.sampled_from(["a.b", 'q"t', "%b%%", "_x41", "_", "cdc", "Ünï", "\\x"]),
)
column_names = st.one_of(st.text(_characters, min_size=1, max_size=12), short_names)


def _number(value: float) -> str:
    """Return a float as Postgres writes it: the shortest exact digits, no `.0`."""
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return "NaN" if math.isnan(value) else repr(value).removesuffix(".0")


def _fraction(micros: int) -> str:
    return f".{micros:06}".rstrip("0") if micros else ""


def _clock(value: time | datetime) -> str:
    return f"{value:%H:%M:%S}" + _fraction(value.microsecond)


def _day(value: date) -> str:
    return f"{value.year:04}-{value.month:02}-{value.day:02}"


def _rounded(moment: datetime, digits: int) -> datetime:
    step = 10 ** (6 - digits)
    return moment.replace(microsecond=moment.microsecond // step * step)


_days = st.dates().map(_day)
_odd_days = st.sampled_from(
    ["infinity", "-infinity", "0044-03-15 BC", "10000-01-01", "5874897-12-31"]
)
_odd_moments = st.sampled_from(
    ["infinity", "-infinity", "0044-03-15 12:00:00{z} BC", "10000-01-01 00:00:00{z}",
     "294247-01-01 23:59:59.999999{z}", "294276-12-31 23:59:59.999999{z}"]
)  # fmt: skip


def _moments(zone: str, digits: int = 6) -> st.SearchStrategy[str]:
    usual = st.datetimes().map(lambda at: f"{_day(at)} {_clock(_rounded(at, digits))}{zone}")
    return usual | _odd_moments.map(lambda text: text.replace("{z}", zone))


def _integers(bits: int) -> st.SearchStrategy[str]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).map(str)


_numerics = st.one_of(
    st.decimals(allow_nan=False, allow_infinity=False).map(lambda d: f"{Decimal(d):f}"),
    st.sampled_from(["NaN", "Infinity", "-Infinity", "12.50", "0.00", "-0.0001"]),
)
_hexadecimal = st.binary(max_size=20).map(lambda data: "\\x" + data.hex())

# By type: its modifiers, and what its values look like. 90001 is a user-defined type.
_TEXTS: dict[tuple[int, int], st.SearchStrategy[str]] = {
    (16, -1): st.sampled_from("tf"),
    (17, -1): _hexadecimal,
    (18, -1): st.sampled_from(["a", "", '"', "\\303"]),
    (19, -1): _texts,
    (20, -1): _integers(64),
    (21, -1): _integers(16),
    (23, -1): _integers(32),
    (25, -1): _texts,
    (26, -1): st.integers(0, 2**32 - 1).map(str),
    (114, -1): _texts.map(lambda text: f'{{"a" : "{text}"}}'),
    (650, -1): st.ip_addresses().map(lambda ip: f"{ip}/{ip.max_prefixlen}"),
    (700, -1): st.floats(width=32).map(_number),
    (701, -1): st.floats().map(_number),
    (774, -1): st.just("08:00:2b:01:02:03:04:05"),
    (790, -1): st.sampled_from(["$1,234.11", "-$92,233,720,368,547,758.08"]),
    (829, -1): st.just("08:00:2b:01:02:03"),
    (869, -1): st.ip_addresses().map(str),
    (1007, -1): st.sampled_from(["{}", "{1,NULL,-3}", "[0:1]={1,2}", "{{1,2},{NULL,4}}"]),
    (1009, -1): st.sampled_from(
        ['{"a,b","\\"",NULL,"NULL","{}"}', "{}", "{a,NULL}", '{{x,""},{"a b",NULL}}', "[2:2]={a}"]
    ),
    (1042, 8): _texts.map(lambda text: text.ljust(4)),
    (1043, 24): _texts,
    (1082, -1): _days | _odd_days,
    (1083, -1): st.times().map(_clock) | st.just("24:00:00"),
    (1083, 3): st.times().map(
        lambda at: _clock(at.replace(microsecond=at.microsecond // 1000 * 1000))
    ),
    (1114, -1): _moments(""),
    (1114, 0): _moments("", 0),
    (1114, 3): _moments("", 3),
    (1114, 6): _moments(""),
    (1184, -1): _moments("+00"),
    (1184, 2): _moments("+00", 2),
    (1186, -1): st.sampled_from(["1 year 2 mons -3 days +04:05:06.7", "00:00:00"]),
    (1266, -1): st.times().map(lambda at: _clock(at) + "+02"),
    (1560, 5): st.sampled_from(["10101", "00000"]),
    (1700, -1): _numerics,
    (1700, 262_150): _numerics,
    (2950, -1): st.uuids().map(str),
    (3802, -1): _texts.map(lambda text: f'{{"a": "{text}"}}'),
    (3908, -1): st.just('["2026-01-01 00:00:00",)'),
    (90001, -1): _texts,
}
TYPES = sorted(_TEXTS)


class Table(NamedTuple):
    """A relation message and the catalog's primary key, in the key's order."""

    relation: Relation
    primary_key: tuple[str, ...]

    @property
    def key(self) -> tuple[str, ...]:
        """The key's columns, as docs/EVENTS.md specifies."""
        marked = tuple(column.name for column in self.relation.columns if column.key)
        by_catalog = self.relation.replica_identity in (
            ReplicaIdentity.FULL,
            ReplicaIdentity.NOTHING,
        )
        return self.primary_key if by_catalog or set(marked) == set(self.primary_key) else marked


@st.composite
def tables(draw: st.DrawFn, relation_id: int = 16_402) -> Table:
    """Draw a table with any identity; keys of several columns are in any order."""
    names = draw(st.lists(column_names, min_size=1, max_size=7, unique=True))
    identity = draw(st.sampled_from(ReplicaIdentity))
    key = tuple(draw(st.permutations(names))[: draw(st.integers(0, min(3, len(names))))])
    marked = set(key)
    if identity is ReplicaIdentity.INDEX:
        marked = set(draw(st.sets(st.sampled_from(names), min_size=1, max_size=3)))
    elif identity is ReplicaIdentity.FULL:
        marked = set(names)
    elif identity is ReplicaIdentity.NOTHING:
        marked = set()
    types = st.sampled_from(TYPES)
    columns = tuple(RelationColumn(name in marked, name, *draw(types)) for name in names)
    schema, table = draw(short_names), draw(short_names)
    return Table(Relation(relation_id, schema, table, identity, columns), key)


def texts(column: RelationColumn) -> st.SearchStrategy[bytes]:
    return _TEXTS[column.type_id, column.type_modifier].map(str.encode)


@st.composite
def rows(draw: st.DrawFn, table: Table, gaps: frozenset[str] = frozenset()) -> TupleData:
    """Draw a row; columns in `gaps` may be unchanged TOAST, those of the key are never NULL."""
    values: list[Value] = []
    for column in table.relation.columns:
        kinds: list[st.SearchStrategy[Value]] = [texts(column)]
        if column.name not in table.key:
            kinds.append(st.none())
        if column.name in gaps:
            kinds.append(st.just(UNCHANGED))
        values.append(draw(st.one_of(kinds)))
    return tuple(values)


def key_of(table: Table, row: TupleData) -> KeyTuple:
    """Return the old key that Postgres would send: NULLs outside the key."""
    named = zip(table.relation.columns, row, strict=True)
    return KeyTuple(tuple([v if column.name in table.key else None for column, v in named]))


@st.composite
def messages(draw: st.DrawFn, table: Table) -> RowMessage:
    """Draw a message that Postgres could send for this table."""
    relation_id = table.relation.relation_id
    names = frozenset(column.name for column in table.relation.columns)
    others = names - set(table.key)
    full = table.relation.replica_identity is ReplicaIdentity.FULL
    kind = draw(st.sampled_from("iuudt"))
    if kind == "i":
        return Insert(relation_id, draw(rows(table)))
    if kind == "t":
        return Truncate((relation_id,), draw(st.booleans()), draw(st.booleans()))
    before = draw(rows(table))
    old = OldTuple(before) if full or not table.key else key_of(table, before)
    if kind == "d":
        return Delete(relation_id, old)
    if not full and draw(st.booleans()):
        return Update(relation_id, None, draw(rows(table, others)))
    return Update(relation_id, old, draw(rows(table, names if full else others | set(table.key))))
