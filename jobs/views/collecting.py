"""Rules for aggregates that put the values of a group together: in a text, an array, a document.

Pure. The values are collected with what they are ordered by, and sorted by a comparison that has
Postgres' places of NULL. The order must leave no two different values in either order.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sqlglot import exp

from lockstep.jobs.views.reading_texts import AS_IN_POSTGRES, END
from lockstep.jobs.views.refusing import UnsupportedError, unknown
from lockstep.jobs.views.types import INTEGERS, JSON, JSONB, TEXT, TEXTS, PgType, array_of
from lockstep.jobs.views.values import (
    INSTEAD_OF_FLOATS,
    Rules,
    Value,
    coerced,
    expect_compared,
    expect_grouped,
    expect_ordered,
    expect_text,
    own,
    string,
)

# Postgres' errors for a key that is NULL.
_WITHOUT_KEY: Final = {
    JSON: f"{AS_IN_POSTGRES}null value not allowed for object key{END}",
    JSONB: f"{AS_IN_POSTGRES}field name must not be null{END}",
}
# Of control characters with an escape of their own.
_ESCAPES: Final = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}
_CONTROLS: Final = range(1, 32)
_CONTROL: Final = r"[\x01-\x1f]"


class _Call(NamedTuple):
    """What an aggregate collects, and in which order."""

    what: str
    is_distinct: bool
    given: exp.Expr
    order: list[exp.Ordered]

    @property
    def by(self) -> list[exp.Expr]:
        return [each.this for each in self.order]


def joined(rules: Rules, node: exp.GroupConcat, clause: str) -> Value:
    """Return the texts of a group in one."""
    call, separator = _called("string_agg()", node.this), node.args.get("separator")
    if not call.order:
        raise _without_order(call, "string_agg(a, ',' ORDER BY b)")
    if not (isinstance(separator, exp.Literal) and separator.is_string):
        raise UnsupportedError(f"{call.what} with a separator that is no literal", "write it")
    _expect_total(rules, call)
    found = rules.value(call.given)
    expect_text(found.type, call.what)
    text = coerced(found, TEXT)
    made = f"array_join(transform(s, y -> y.v), {string(separator.this)})"
    # NULL is no element.
    return Value(_sorted(rules, call, clause, {"v": text}, made, f"{text} IS NULL"), TEXT)


def as_array(rules: Rules, node: exp.ArrayAgg, clause: str) -> Value:
    """Return the values of a group as an array, with those that are NULL."""
    call = _called("array_agg()", node.this)
    if not call.order:
        raise _without_order(call, "array_agg(a ORDER BY b)")
    _expect_total(rules, call)
    found = rules.value(call.given)
    kind = own(found)
    if kind.mask:
        raise UnsupportedError("array_agg() of a masked column", "leave it out")
    expect_compared(kind, call.what)
    fields = {"v": coerced(found, kind)}
    return Value(_sorted(rules, call, clause, fields, "transform(s, y -> y.v)"), array_of(kind))


def document(rules: Rules, node: exp.AnonymousAggFunc, clause: str) -> Value:
    """Return the values of a group as a document: `json_agg` and its like."""
    name, given = node.name.lower(), node.expressions
    kind = JSONB if name.startswith("jsonb") else JSON
    if name in {"json_agg", "jsonb_agg"} and len(given) == 1:
        return Value(_as_list(rules, _called(f"{name}()", given[0]), clause), kind)
    if name in {"json_object_agg", "jsonb_object_agg"} and len(given) == 2:  # noqa: PLR2004 - key and value
        call = _called(f"{name}()", given[1])
        return Value(_as_object(rules, call, given[0], clause, kind), kind)
    raise unknown(node)


def _as_list(rules: Rules, call: _Call, clause: str) -> str:
    if not call.order:
        raise _without_order(call, f"{call.what[:-2]}(a ORDER BY b)")
    _expect_total(rules, call)
    fields = {"v": _json(rules.value(call.given), call.what)}
    elements = "array_join(transform(s, y -> coalesce(y.v, 'null')), ', ')"
    return _sorted(rules, call, clause, fields, f"concat('[', {elements}, ']')")


def _as_object(rules: Rules, call: _Call, key: exp.Expr, clause: str, kind: PgType) -> str:
    if call.is_distinct:
        raise UnsupportedError(f"{call.what} with DISTINCT", "select the rows once in a subquery")
    # A jsonb has the last value of each key, in an order of its own.
    needed = [key, *call.by] if kind == JSONB else call.by
    if not rules.order_of_group_is_total(needed):
        raise UnsupportedError(
            f"{call.what} whose ORDER BY may leave rows in any order",
            "add ORDER BY, with what is unique in each table at its end",
        )
    name, value = _key(rules.value(key), call.what), _json(rules.value(call.given), call.what)
    fields = {"k": name, "q": _escaped(name), "v": value}
    if kind == JSONB:
        member, opened, closed = "concat(y.q, ': ', coalesce(y.v, 'null'))", "'{'", "'}'"
        places = "named_struct('n', octet_length(y.k), 'k', y.k, 'i', i, 'q', y.q, 'v', y.v)"
        last = "i = size(t) - 1 OR get(t, i + 1).k <> y.k"
        members = f"transform(filter(t, (y, i) -> {last}), y -> {member})"
        by_key = f"array_sort(transform(s, (y, i) -> {places}))"
        text = f"transform(array({by_key}), t -> array_join({members}, ', '))[0]"
    else:
        member, opened, closed = "concat(y.q, ' : ', coalesce(y.v, 'null'))", "'{ '", "' }'"
        text = f"array_join(transform(s, y -> {member}), ', ')"
    fails = f"CAST(raise_error({string(_WITHOUT_KEY[kind])}) AS string)"
    made = f"if(exists(s, y -> y.k IS NULL), {fails}, concat({opened}, {text}, {closed}))"
    return _sorted(rules, call, clause, fields, made)


# --- the order ---


def _called(what: str, node: exp.Expr) -> _Call:
    order = node.expressions if isinstance(node, exp.Order) else []
    given: exp.Expr = node.this if isinstance(node, exp.Order) else node
    is_distinct = isinstance(given, exp.Distinct)
    return _Call(what, is_distinct, given.expressions[0] if is_distinct else given, list(order))


def _without_order(call: _Call, example: str) -> UnsupportedError:
    return UnsupportedError(f"{call.what} without ORDER BY", f"write it: {example}")


def _expect_total(rules: Rules, call: _Call) -> None:
    """Raise unless an order leaves no two different values in either order."""
    if call.is_distinct and call.by != [call.given]:
        raise UnsupportedError(
            f"{call.what} with DISTINCT in another order than by its values",
            f'write {call.what[:-2]}(DISTINCT a … ORDER BY a); of texts, a COLLATE "C" in both',
        )
    # Equal values may change places.
    if _bare(call.given) in map(_bare, call.by):
        expect_grouped(own(rules.value(call.given)), call.what)
    elif not rules.order_of_group_is_total(call.by):
        raise UnsupportedError(
            f"{call.what} whose ORDER BY may leave rows in any order",
            "add the value itself to ORDER BY, at the end, or what is unique in each table",
        )


def _bare(node: exp.Expr) -> exp.Expr:
    """Return a text without its collation, which leaves equal what is equal."""
    return node.this if isinstance(node, exp.Collate) else node


def _sorted(
    rules: Rules, call: _Call, clause: str, fields: dict[str, str], made: str, skipped: str = ""
) -> str:
    """Return what is `made` of the sorted rows `s` of a group; NULL if there are none.

    Rows have `fields`; those that meet the condition `skipped` are left out.
    """
    parts = [_part_of_order(rules, each, at) for at, each in enumerate(call.order)]
    names = {f"o{at}": sql for at, (sql, _) in enumerate(parts)} | fields
    row = ", ".join(f"'{name}', {sql}" for name, sql in names.items())
    row = f"named_struct({row})"
    row = f"if({skipped}, NULL, {row})" if skipped else row
    rows = f"collect_list({'DISTINCT ' * call.is_distinct}{row}){clause}"
    compared = "0"
    for _, template in reversed(parts):
        compared = template.format(compared)
    in_order = f"array_sort(x, (l, r) -> {compared})" if parts else "x"
    # Spark's listagg() fails with ORDER BY alongside several DISTINCT ones.
    return (
        f"transform(transform(array({rows}), x -> {in_order}),"
        f" s -> if(size(s) = 0, NULL, {made}))[0]"
    )


def _part_of_order(rules: Rules, node: exp.Ordered, at: int) -> tuple[str, str]:
    """Return what rows are ordered by, and how two of them compare; `{}` if that is equal."""
    found = rules.value(node.this)
    expect_ordered(found.type, "ORDER BY")
    one, other = f"l.o{at}", f"r.o{at}"
    less = 1 if node.args.get("desc") else -1
    null = -1 if node.args.get("nulls_first") else 1
    return found.sql, (
        f"CASE WHEN {one} <=> {other} THEN {{}} WHEN {one} IS NULL THEN {null}"
        f" WHEN {other} IS NULL THEN {-null} WHEN {one} < {other} THEN {less} ELSE {-less} END"
    )


# --- JSON ---


def _json(value: Value, what: str) -> str:
    """Return the text that a value has in a document of Postgres'; NULL if it is NULL."""
    kind = own(value)
    sql, name = coerced(value, kind), kind.name
    text = f"CAST({sql} AS string)"
    if kind.mask:
        raise UnsupportedError(f"{what} of a masked column", "leave it out")
    if name in {*INTEGERS, "bool"} or (name == "numeric" and kind.size and kind.has_scale):
        return text
    if name in TEXTS:
        return _escaped(sql)
    if name in {"date", "uuid"}:
        return f"concat('\"', {text}, '\"')"
    if name == "timestamp":
        return f"concat('\"', replace({text}, ' ', 'T'), '\"')"
    if name == "jsonb":
        return sql
    why, hint = _OTHERS.get(name, ("", "collect another column, or make the view in Python"))
    raise UnsupportedError(f"{what} of {kind.title}{why}", hint)


_OTHERS: Final = {
    "timestamptz": (", whose text depends on TimeZone", "write (… AT TIME ZONE 'UTC')"),
    "numeric": (
        " whose values have no scale of their own",
        "give them one: round(…, n), or ::numeric(p,s)",
    ),
    **dict.fromkeys(
        ("float4", "float8"),
        (", whose digits Spark writes in another way", INSTEAD_OF_FLOATS),
    ),
}  # fmt: skip


def _key(value: Value, what: str) -> str:
    """Return the text of a document's key."""
    kind = own(value)
    if kind.mask or kind.name not in {*TEXTS, *INTEGERS, "uuid"}:
        raise UnsupportedError(f"{what} with a key of {kind.title}", "take a text or an integer")
    return coerced(value, kind) if kind.name in TEXTS else f"CAST({value.sql} AS string)"


def _escaped(text: str) -> str:
    """Return a text in quotes, with Postgres' escapes."""
    back, quote = "\\", '"'
    plain = f"replace(replace({text}, {string(back)}, {string(back * 2)})"
    plain += f", {string(quote)}, {string(back + quote)})"
    rest = "e"
    for code in _CONTROLS:
        rest = f"replace({rest}, chr({code}), {string(_ESCAPES.get(code, f'{back}u{code:04x}'))})"
    has_controls = f"e RLIKE {string(_CONTROL)}"
    made = f"concat('\"', if({has_controls}, {rest}, e), '\"')"
    return f"transform(array({plain}), e -> {made})[0]"
