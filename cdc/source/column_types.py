"""Which columns the server may compare without running what a type's owner wrote.

Postgres calls an implicit cast's function with the rights of the role whose statement compares a
value, whatever `search_path` is, and the owner of a type may create such a cast. So may the owner
of a domain give it a CHECK, which the input of its values calls. What is compared here belongs to
the server or to a superuser, or is compared by a function that has one candidate only. A statement
names no type of a user: its owner may give the name to another type at any time.

https://www.postgresql.org/docs/current/sql-createcast.html
https://www.postgresql.org/docs/current/typeconv-oper.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from psycopg import sql

if TYPE_CHECKING:
    from cdc.source.connection import Connection

# FirstNormalObjectId: what has a lower oid was created with the database cluster.
FIRST_OF_USERS: Final = 16_384

# built_in, trusted, text, array: by operators of pg_catalog; those of an extension are elsewhere,
# so its types are compared as what they are cast to. enum: by the functions of enums. ordered: only
# with values of the same type that Postgres wrote. other: not at all.
Comparison = Literal["built_in", "trusted", "text", "array", "enum", "ordered", "other"]


class ColumnType(NamedTuple):
    """A column's type, as far as comparing needs it; of a domain its base type, at any depth."""

    name: str  # as SQL writes it, the domain's own
    base: int  # oid
    is_domain: bool
    literal: str  # the base type as SQL writes it
    comparison: Comparison

    @property
    def has_operators(self) -> bool:
        """Whether an operator, with any literal, runs nothing of a user."""
        return self.comparison in ("built_in", "trusted", "text", "array")

    def value(self, column: str) -> str:
        """Return the SQL of the column's value in its base type."""
        return base_value(column, is_domain=self.is_domain)


def base_value(column: str, *, is_domain: bool) -> str:
    """Return the SQL of a column's value in its base type, which is not named.

    Of a domain and an untyped NULL, CASE takes the base type; the planner removes it.
    """
    return f"CASE WHEN true THEN {column} ELSE NULL END" if is_domain else column


# `{0}` is a row of pg_type. Operators of pg_catalog take built-in types, so no other cast matters.
# A cast stays when its type passes to another owner.
_NO_CAST: Final = f"""
    NOT EXISTS (SELECT FROM pg_cast k JOIN pg_proc f ON f.oid = k.castfunc
                JOIN pg_roles o ON o.oid = f.proowner
                WHERE k.castsource = {{0}}.oid AND k.casttarget < {FIRST_OF_USERS}
                AND NOT o.rolsuper)"""
_TRUSTED: Final = f"""
    ({{0}}.typtype = 'b' AND {{0}}.typcategory <> 'A'
     AND EXISTS (SELECT FROM pg_roles o WHERE o.oid = {{0}}.typowner AND o.rolsuper)
     AND {_NO_CAST})"""

_COLUMNS: Final = f"""
WITH RECURSIVE base(attnum, oid, modifier, is_domain) AS (
    SELECT a.attnum, a.atttypid, a.atttypmod, false FROM pg_attribute a
    WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
    UNION ALL
    SELECT b.attnum, t.typbasetype, t.typtypmod, true FROM base b
    JOIN pg_type t ON t.oid = b.oid WHERE t.typtype = 'd')
SELECT a.attname::text, format_type(a.atttypid, a.atttypmod), t.oid::bigint, b.is_domain,
       format_type(t.oid, b.modifier), CASE
    WHEN t.oid < {FIRST_OF_USERS} THEN 'built_in'
    WHEN t.typtype = 'e' THEN 'enum'
    WHEN {_TRUSTED.format("t")} THEN CASE t.typcategory WHEN 'S' THEN 'text' ELSE 'trusted' END
    WHEN t.typcategory = 'A' AND {_NO_CAST.format("t")} AND {_TRUSTED.format("e")} THEN 'array'
    WHEN t.typcategory = 'A' AND e.typtype = 'e' OR s.oid < {FIRST_OF_USERS} THEN 'ordered'
    ELSE 'other' END
FROM base b JOIN pg_type t ON t.oid = b.oid AND t.typtype <> 'd'
JOIN pg_attribute a ON a.attrelid = %s AND a.attnum = b.attnum
LEFT JOIN pg_type e ON e.oid = t.typelem
LEFT JOIN pg_range r ON t.oid IN (r.rngtypid, r.rngmultitypid)
LEFT JOIN pg_type s ON s.oid = r.rngsubtype AND s.typtype <> 'd'
"""  # noqa: S608 - our own rules


def read_column_types(connection: Connection, relation: int) -> dict[str, ColumnType]:
    """Return the type of each column of a table, by the column's name."""
    rows = connection.execute(_COLUMNS.encode(), (relation, relation)).fetchall()
    return {name: ColumnType(*fields) for name, *fields in rows}


class KeyColumn(NamedTuple):
    """A column of a key, and how the server orders and compares its values."""

    name: str
    type: ColumnType

    @property
    def can_be_ordered(self) -> bool:
        """Whether its values are compared in the order in which they are sorted."""
        return self.type.comparison not in ("trusted", "other")

    def value(self, table: str) -> str:
        """Return the SQL by which rows of `table`, an alias, are ordered and compared."""
        column = sql.Identifier(table, self.name).as_string()
        if self.type.comparison == "text":
            return f"{column}::pg_catalog.text"
        return column if self.type.comparison == "built_in" else self.type.value(column)

    def literal(self, table: str, value: str) -> str:
        """Return the SQL of a value that Postgres wrote."""
        text = sql.Literal(value).as_string()
        if self.type.comparison == "text":
            return f"{text}::pg_catalog.text"
        if self.type.comparison == "built_in":
            return f"{text}::{self.type.literal}"
        # Of a column and an untyped literal, CASE takes the column's type.
        return f"CASE WHEN false THEN {self.value(table)} ELSE {text} END"
