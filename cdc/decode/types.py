"""Postgres' types, in one table: what a type's values are, for all that read or write them.

A relation message, a schema record or a view names a column's type; the rest follows from its row
here: the form of its values in events (`cdc.encode.values`), which values DDL keeps
(`cdc.encode.alterations`), and what stores and views have for them (`lockstep.sinks`,
`lockstep.jobs`). Those map kinds of values, each for itself, and have no list of types of their
own. A type that is in no row is known by its name only, as a user's enum: its values are text.

Postgres sends no Type message for built-in types, with oids below 10000 (its FirstGenbkiObjectId),
whose numbers never change; they are the same in Postgres 14 to 18, and a test compares them with a
live server. Names are `pg_type.typname`, as in Type messages: `int4`, and `_int4` for its array. A
type of an extension has another oid in each database, and its schema in its name: `public.hstore`.

Reference: https://www.postgresql.org/docs/current/system-catalog-initial-data.html
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, NamedTuple

# Of a type modifier of numeric: precision, and a scale of 11 bits with a sign; both count from 4.
_OFFSET: Final = 4
_SCALE_BITS: Final = 0x7FF
_SCALE_SIGN: Final = 0x400


class ValueKind(Enum):
    """What a type's values are, and so how Postgres writes them."""

    BOOLEAN = auto()  # t and f
    INTEGER = auto()  # of `size` bytes
    OID = auto()  # an integer without a sign, of four bytes
    FLOAT = auto()  # of `size` bytes, with NaN and the infinities
    NUMERIC = auto()  # decimal digits, NaN and the infinities
    MONEY = auto()  # decimal digits with currency symbol and separators
    DATE = auto()
    TIME = auto()  # of a day
    TIMESTAMP = auto()  # on any clock
    INSTANT = auto()  # timestamptz: written in UTC
    INTERVAL = auto()
    BYTES = auto()
    UUID = auto()
    BITS = auto()
    ADDRESS = auto()  # a host's, or a network's with a host in it
    TEXT = auto()  # a string, compared as it is or by its collation
    WORDS = auto()  # a text of words that is compared by rules of its own
    JSON = auto()
    XML = auto()  # which a server may have been built without
    MAP = auto()  # hstore: names and texts
    OTHER = auto()  # anything else; also what only its text is known of
    INTERNAL = auto()  # of the server itself: means nothing in another one


class TypeRow(NamedTuple):
    """A type, but no array's: that of its arrays is in its row."""

    name: str
    oid: int  # 0: of an extension
    array: int  # the oid of its arrays' type; 0: there is none, or it is an extension's
    kind: ValueKind = ValueKind.INTERNAL
    size: int = 0  # of an integer or a float, in bytes
    delimiter: str = ","  # between the elements of an array
    is_plain: bool = False  # its text has only characters that JSON does not escape
    is_limited: bool = False  # a modifier limits how many digits or characters are kept, no more
    aliases: tuple[str, ...] = ()  # in SQL


TYPES: Final = (
    TypeRow("bool", 16, 1000, ValueKind.BOOLEAN, aliases=("boolean",)),
    TypeRow("int2", 21, 1005, ValueKind.INTEGER, size=2, aliases=("smallint",)),
    TypeRow("int4", 23, 1007, ValueKind.INTEGER, size=4, aliases=("int", "integer")),
    TypeRow("int8", 20, 1016, ValueKind.INTEGER, size=8, aliases=("bigint",)),
    TypeRow("oid", 26, 1028, ValueKind.OID),
    TypeRow("float4", 700, 1021, ValueKind.FLOAT, size=4, aliases=("real",)),
    TypeRow("float8", 701, 1022, ValueKind.FLOAT, size=8),
    TypeRow("numeric", 1700, 1231, ValueKind.NUMERIC, aliases=("decimal",)),
    TypeRow("money", 790, 791, ValueKind.MONEY),
    TypeRow("date", 1082, 1182, ValueKind.DATE),
    TypeRow("time", 1083, 1183, ValueKind.TIME, is_limited=True),
    TypeRow("timestamp", 1114, 1115, ValueKind.TIMESTAMP, is_limited=True),
    TypeRow("timestamptz", 1184, 1185, ValueKind.INSTANT, is_limited=True),
    TypeRow("interval", 1186, 1187, ValueKind.INTERVAL),
    TypeRow("bytea", 17, 1001, ValueKind.BYTES),
    TypeRow("uuid", 2950, 2951, ValueKind.UUID, is_plain=True),
    TypeRow("bit", 1560, 1561, ValueKind.BITS, is_plain=True),
    TypeRow("varbit", 1562, 1563, ValueKind.BITS, is_plain=True, is_limited=True),
    TypeRow("inet", 869, 1041, ValueKind.ADDRESS, is_plain=True),
    TypeRow("text", 25, 1009, ValueKind.TEXT),
    TypeRow("varchar", 1043, 1015, ValueKind.TEXT, is_limited=True),
    TypeRow("bpchar", 1042, 1014, ValueKind.WORDS),
    TypeRow("tsvector", 3614, 3643, ValueKind.WORDS),
    TypeRow("json", 114, 199, ValueKind.JSON),
    TypeRow("jsonb", 3802, 3807, ValueKind.JSON),
    TypeRow("xml", 142, 143, ValueKind.XML),
    TypeRow("point", 600, 1017, ValueKind.OTHER, is_plain=True),
    TypeRow("lseg", 601, 1018, ValueKind.OTHER, is_plain=True),
    TypeRow("path", 602, 1019, ValueKind.OTHER, is_plain=True),
    TypeRow("box", 603, 1020, ValueKind.OTHER, delimiter=";", is_plain=True),
    TypeRow("polygon", 604, 1027, ValueKind.OTHER, is_plain=True),
    TypeRow("line", 628, 629, ValueKind.OTHER, is_plain=True),
    TypeRow("cidr", 650, 651, ValueKind.OTHER, is_plain=True),
    TypeRow("circle", 718, 719, ValueKind.OTHER, is_plain=True),
    TypeRow("macaddr8", 774, 775, ValueKind.OTHER, is_plain=True),
    TypeRow("macaddr", 829, 1040, ValueKind.OTHER, is_plain=True),
    TypeRow("timetz", 1266, 1270, ValueKind.OTHER, is_plain=True, is_limited=True),
    TypeRow("pg_lsn", 3220, 3221, ValueKind.OTHER, is_plain=True),
    TypeRow("tsquery", 3615, 3645, ValueKind.OTHER),
    TypeRow("int4range", 3904, 3905, ValueKind.OTHER, is_plain=True),
    TypeRow("numrange", 3906, 3907, ValueKind.OTHER, is_plain=True),
    TypeRow("tsrange", 3908, 3909, ValueKind.OTHER),
    TypeRow("tstzrange", 3910, 3911, ValueKind.OTHER),
    TypeRow("daterange", 3912, 3913, ValueKind.OTHER),
    TypeRow("int8range", 3926, 3927, ValueKind.OTHER, is_plain=True),
    TypeRow("int4multirange", 4451, 6150, ValueKind.OTHER, is_plain=True),
    TypeRow("nummultirange", 4532, 6151, ValueKind.OTHER, is_plain=True),
    TypeRow("tsmultirange", 4533, 6152, ValueKind.OTHER),
    TypeRow("tstzmultirange", 4534, 6153, ValueKind.OTHER),
    TypeRow("datemultirange", 4535, 6155, ValueKind.OTHER),
    TypeRow("int8multirange", 4536, 6157, ValueKind.OTHER, is_plain=True),
    # The server's own, and those that no column has.
    TypeRow("char", 18, 1002),
    TypeRow("name", 19, 1003),
    TypeRow("int2vector", 22, 1006, is_plain=True),
    TypeRow("regproc", 24, 1008),
    TypeRow("tid", 27, 1010, is_plain=True),
    TypeRow("xid", 28, 1011, is_plain=True),
    TypeRow("cid", 29, 1012, is_plain=True),
    TypeRow("oidvector", 30, 1013, is_plain=True),
    TypeRow("pg_ddl_command", 32, 0),
    TypeRow("pg_type", 71, 210),
    TypeRow("pg_attribute", 75, 270),
    TypeRow("pg_proc", 81, 272),
    TypeRow("pg_class", 83, 273),
    TypeRow("pg_node_tree", 194, 0),
    TypeRow("table_am_handler", 269, 0),
    TypeRow("index_am_handler", 325, 0),
    TypeRow("unknown", 705, 0),
    TypeRow("aclitem", 1033, 1034),
    TypeRow("pg_database", 1248, 0),
    TypeRow("refcursor", 1790, 2201),
    TypeRow("regprocedure", 2202, 2207),
    TypeRow("regoper", 2203, 2208),
    TypeRow("regoperator", 2204, 2209),
    TypeRow("regclass", 2205, 2210),
    TypeRow("regtype", 2206, 2211),
    TypeRow("record", 2249, 2287),
    TypeRow("cstring", 2275, 1263),
    TypeRow("any", 2276, 0),
    TypeRow("anyarray", 2277, 0),
    TypeRow("void", 2278, 0),
    TypeRow("trigger", 2279, 0),
    TypeRow("language_handler", 2280, 0),
    TypeRow("internal", 2281, 0),
    TypeRow("anyelement", 2283, 0),
    TypeRow("anynonarray", 2776, 0),
    TypeRow("pg_authid", 2842, 0),
    TypeRow("pg_auth_members", 2843, 0),
    TypeRow("txid_snapshot", 2970, 2949, is_plain=True),
    TypeRow("fdw_handler", 3115, 0),
    TypeRow("tsm_handler", 3310, 0),
    TypeRow("pg_ndistinct", 3361, 0),
    TypeRow("pg_dependencies", 3402, 0),
    TypeRow("anyenum", 3500, 0),
    TypeRow("gtsvector", 3642, 3644),
    TypeRow("regconfig", 3734, 3735),
    TypeRow("regdictionary", 3769, 3770),
    TypeRow("anyrange", 3831, 0),
    TypeRow("event_trigger", 3838, 0),
    TypeRow("pg_shseclabel", 4066, 0),
    TypeRow("jsonpath", 4072, 4073),
    TypeRow("regnamespace", 4089, 4090),
    TypeRow("regrole", 4096, 4097),
    TypeRow("regcollation", 4191, 4192),
    TypeRow("anymultirange", 4537, 0),
    TypeRow("anycompatiblemultirange", 4538, 0),
    TypeRow("pg_brin_bloom_summary", 4600, 0),
    TypeRow("pg_brin_minmax_multi_summary", 4601, 0),
    TypeRow("pg_mcv_list", 5017, 0),
    TypeRow("pg_snapshot", 5038, 5039, is_plain=True),
    TypeRow("xid8", 5069, 271, is_plain=True),
    TypeRow("anycompatible", 5077, 0),
    TypeRow("anycompatiblearray", 5078, 0),
    TypeRow("anycompatiblenonarray", 5079, 0),
    TypeRow("anycompatiblerange", 5080, 0),
    TypeRow("pg_subscription", 6101, 0),
    # Of extensions.
    TypeRow("hstore", 0, 0, ValueKind.MAP),
    TypeRow("ltree", 0, 0, ValueKind.OTHER),
    TypeRow("lquery", 0, 0, ValueKind.OTHER),
    TypeRow("ltxtquery", 0, 0, ValueKind.OTHER),
    TypeRow("citext", 0, 0, ValueKind.WORDS),
    TypeRow("isbn", 0, 0, ValueKind.OTHER),
    TypeRow("isbn13", 0, 0, ValueKind.OTHER),
    TypeRow("issn", 0, 0, ValueKind.OTHER),
    TypeRow("issn13", 0, 0, ValueKind.OTHER),
    TypeRow("ismn", 0, 0, ValueKind.OTHER),
    TypeRow("ismn13", 0, 0, ValueKind.OTHER),
    TypeRow("ean13", 0, 0, ValueKind.OTHER),
    TypeRow("upc", 0, 0, ValueKind.OTHER),
    TypeRow("cube", 0, 0, ValueKind.OTHER),
    TypeRow("seg", 0, 0, ValueKind.OTHER),
    TypeRow("vector", 0, 0, ValueKind.OTHER),
    TypeRow("halfvec", 0, 0, ValueKind.OTHER),
    TypeRow("sparsevec", 0, 0, ValueKind.OTHER),
    TypeRow("geometry", 0, 0, ValueKind.OTHER, delimiter=":"),
    TypeRow("geography", 0, 0, ValueKind.OTHER, delimiter=":"),
    TypeRow("box2d", 0, 0, ValueKind.OTHER),
    TypeRow("box3d", 0, 0, ValueKind.OTHER),
    TypeRow("raster", 0, 0, ValueKind.OTHER),
)
BY_OID: Final = {row.oid: row for row in TYPES if row.oid}
TYPE_NAMES: Final = {
    **{oid: row.name for oid, row in BY_OID.items()},
    **{row.array: f"_{row.name}" for row in TYPES if row.array},
}
# Without the name that a column's type has if nothing described it.
_BUILT_IN: Final = frozenset(TYPE_NAMES.values()) - {"unknown"}
_ROWS: Final = {row.name: row for row in TYPES if row.oid and row.name in _BUILT_IN}
_OF_EXTENSIONS: Final = {row.name: row for row in TYPES if not row.oid}


def type_name(type_id: int) -> str | None:
    """Return the built-in type's name, None for a type that a Type message describes."""
    return TYPE_NAMES.get(type_id)


def is_built_in(name: str) -> bool:
    """Return whether a type is Postgres' own, or an array of such."""
    return name in _BUILT_IN


def row_of(name: str) -> TypeRow | None:
    """Return the row of a type; None for an array's, and for one of which only the name is known.

    A user may give a type the name of a built-in one, in another schema.
    """
    return _OF_EXTENSIONS.get(unqualified(name)) if "." in name else _ROWS.get(name)


def kind_of(name: str) -> ValueKind:
    """Return what the values of a type are that is no array."""
    row = row_of(name)
    return row.kind if row else ValueKind.OTHER


def delimiter_of(name: str) -> str:
    """Return what separates elements of this type in an array."""
    row = row_of(name)
    return row.delimiter if row else ","


def names_of(*kinds: ValueKind) -> tuple[str, ...]:
    """Return the names of the built-in types of these kinds."""
    return tuple(row.name for row in BY_OID.values() if row.kind in kinds)


def element_of(name: str) -> str | None:
    """Return the name of an array's element type; None if the name is not an array's."""
    if name in _BUILT_IN:
        return name[1:] if name.startswith("_") else None
    bare = unqualified(name)
    return name[: -len(bare)] + bare[1:] if bare.startswith("_") and bare != "_" else None


def unqualified(name: str) -> str:
    """Return the type's own name; its schema is quoted if it has a dot."""
    schema, found, bare = name.partition('".')
    if found and schema.startswith('"'):
        return bare
    return name.partition(".")[2] or name


class NumericSize(NamedTuple):
    """What a numeric's modifier declares."""

    precision: int
    scale: int  # below 0: values are multiples of a power of ten

    @property
    def digits(self) -> int:
        """How many digits the longest value has, with zeros before or after its own."""
        return max(self.precision - min(self.scale, 0), self.scale)


def numeric_size(modifier: int) -> NumericSize | None:
    """Return a numeric's precision and scale; None if it holds any."""
    if modifier < _OFFSET:
        return None
    packed = modifier - _OFFSET
    return NumericSize(packed >> 16, ((packed & _SCALE_BITS) ^ _SCALE_SIGN) - _SCALE_SIGN)


def numeric_modifier(precision: int, scale: int) -> int:
    """Return the modifier of a numeric with a scale that is not negative."""
    return (precision << 16 | scale) + _OFFSET
