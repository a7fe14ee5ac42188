"""Rules for numbers and casts.

Pure.
"""

from __future__ import annotations

from typing import Final

from sqlglot import exp

from lockstep.jobs.views.dates import days, moved
from lockstep.jobs.views.quotients import quotient
from lockstep.jobs.views.reading_texts import AS_IN_POSTGRES, fails, read_text
from lockstep.jobs.views.refusing import UnsupportedError, written
from lockstep.jobs.views.types import (
    FLOAT8,
    FLOATS,
    INTEGERS,
    TEXTS,
    UNKNOWN,
    PgType,
    array_of,
    numeric,
)
from lockstep.jobs.views.values import (
    CAST_TO,
    INSTEAD_OF_FLOATS,
    Rules,
    Value,
    coerced,
    expect_number,
    number_in,
    size,
    sized,
    table_of,
)
from lockstep.sinks.delta.types import MAX_PRECISION

_ARITHMETIC: Final[dict[type[exp.Expr], str]] = {
    exp.Add: "+",
    exp.Sub: "-",
    exp.Mul: "*",
    exp.Div: "/",
    exp.Mod: "%",
}
_BITWISE: Final[dict[type[exp.Expr], str]] = {
    exp.BitwiseAnd: "&",
    exp.BitwiseOr: "|",
    exp.BitwiseXor: "^",
    exp.BitwiseNot: "~",
}
# Above 38 digits Spark keeps these after the point; a larger number is an error.
_KEPT_SCALE: Final = 6
# A quotient that is multiplied keeps room for so many before the point.
_LEAST_INTEGER_DIGITS: Final = 9
_TYPES: Final = {
    "BOOLEAN": "bool", "SMALLINT": "int2", "INT": "int4", "BIGINT": "int8", "FLOAT": "float4",
    "DOUBLE": "float8", "TEXT": "text", "VARCHAR": "varchar", "DATE": "date", "UUID": "uuid",
    "TIMESTAMP": "timestamp", "TIMESTAMPTZ": "timestamptz", "DECIMAL": "numeric",
    "JSON": "json", "JSONB": "jsonb",
}  # fmt: skip


def _arithmetic(rules: Rules, node: exp.Expr) -> Value:
    sign = _ARITHMETIC[type(node)]
    if (found := moved(rules, sign, node)) is not None:
        return found
    left, right = rules.value(node.this), rules.value(node.expression)
    return days(sign, left, right) or combined(sign, left, right)


def combined(sign: str, left: Value, right: Value) -> Value:
    """Return a sum, a difference, a product, a quotient or a remainder."""
    sides = [each if each.type.name != UNKNOWN else None for each in (left, right)]
    given = next((each.type for each in sides if each), None)
    if given is None:
        raise UnsupportedError("arithmetic with quoted literals", "write numbers")
    left, right = (
        Value(coerced(each, given), given) if each.type.name == UNKNOWN else each
        for each in (left, right)
    )
    if sign == "/" and "numeric" in (names := {left.type.name, right.type.name}):
        for each in (left, right):
            expect_number(each.type, "/")
        if not names & FLOATS:
            return quotient(left, right)
    if sign == "*":
        left, right = _narrowed(left, right)
    kind = _result(sign, left.type, right.type)
    if kind.name in INTEGERS:
        one, other = (coerced(each, kind) for each in (left, right))
        word = "div" if sign == "/" else sign
        text = f"({one} {word} {other})"
        return Value(f"CAST({text} AS {kind.spark})" if sign == "/" else text, kind)
    if kind.name in FLOATS:
        one, other = (coerced(each, kind) for each in (left, right))
        return Value(_in_range(sign, one, other, kind), kind)
    one, other = (coerced(each, _as_numeric(each.type)) for each in (left, right))
    return Value(f"CAST(({one} {sign} {other}) AS {kind.spark})", kind)


def _in_range(sign: str, one: str, other: str, kind: PgType) -> str:
    """Return an operation of floats that fails where Postgres' does: Spark has infinity, or 0."""
    # Spark divides floats of 4 bytes as those of 8.
    made = f"CAST(x.a {sign} x.b AS {kind.spark})" if sign == "/" else f"(x.a {sign} x.b)"
    infinity = "double('Infinity')"
    over = f"abs({made}) = {infinity} AND abs(x.a) < {infinity} AND abs(x.b) < {infinity}"
    under = {
        "*": f"WHEN {made} = 0 AND x.a <> 0 AND x.b <> 0 THEN {_out_of_range('under', kind)} ",
        "/": f"WHEN {made} = 0 AND x.a <> 0 AND abs(x.b) < {infinity}"
        f" THEN {_out_of_range('under', kind)} ",
    }
    # Of NaN / 0 Postgres has NaN, and of other numbers / 0 an error.
    first = "WHEN isnan(x.a) AND x.b IS NOT NULL THEN x.a " if sign == "/" else ""
    # A lambda's `x`, so that the operands' texts are there once.
    return (
        f"transform(array(named_struct('a', {one}, 'b', {other})), x -> CASE {first}"
        f"WHEN {over} THEN {_out_of_range('over', kind)} {under.get(sign, '')}ELSE {made} END)[0]"
    )


def _out_of_range(word: str, kind: PgType) -> str:
    return fails(f"{AS_IN_POSTGRES}value out of range: {word}flow", kind.spark)


def _neg(rules: Rules, node: exp.Neg) -> Value:
    found = rules.value(node.this)
    expect_number(found.type, "-")
    return Value(f"(- {found.sql})", found.type)


def _abs(rules: Rules, node: exp.Abs) -> Value:
    found = rules.value(node.this)
    expect_number(found.type, "abs()")
    return Value(f"abs({found.sql})", found.type)


def _round(rules: Rules, node: exp.Round | exp.Trunc) -> Value:
    what, found, digits = f"{node.key}()", rules.value(node.this), node.args.get("decimals")
    size = found.type.size
    if size is None or found.type.name != "numeric":
        hint = f"{node.key} a numeric(p,s): cast to it"
        if found.type.name in FLOATS:
            hint = INSTEAD_OF_FLOATS
        raise UnsupportedError(f"{what} of {found.type.title}", hint)
    given = 0 if digits is None else number_in(digits)
    if given is None:
        raise UnsupportedError(f"{what} to a number of digits that is no literal", "write it")
    precision, old = size
    kind = sized(max(precision - old + 1, 1) + max(given, 0), max(given, 0), what)
    made = f"round({found.sql}, {given})"
    if isinstance(node, exp.Trunc):
        # An array of one, so that the value's text is there once.
        cut = f"if(x < 0, ceil(x, {given}), floor(x, {given}))"
        made = f"transform(array({found.sql}), x -> {cut})[0]" if given < old else found.sql
    return Value(f"CAST({made} AS {kind.spark})", kind)


def _sign(rules: Rules, node: exp.Sign) -> Value:
    found = rules.value(node.this)
    expect_number(found.type, "sign()")
    if found.type.name in FLOATS:
        raise UnsupportedError(f"sign() of {found.type.title}", INSTEAD_OF_FLOATS)
    kind = numeric(1, 0) if found.type.name == "numeric" else FLOAT8
    return Value(f"CAST(sign({found.sql}) AS {kind.spark})", kind)


def _bitwise(rules: Rules, node: exp.Expr) -> Value:
    sign = _BITWISE[type(node)]
    sides = [node.this] if isinstance(node, exp.BitwiseNot) else [node.this, node.expression]
    given = [rules.value(each) for each in sides]
    for each in given:
        if each.type.name not in INTEGERS:
            raise UnsupportedError(f"{written(node)} of {each.type.title}", "cast to an integer")
    kind = max((each.type for each in given), key=lambda each: INTEGERS[each.name])
    one, *others = (coerced(each, kind) for each in given)
    return Value(f"({one} {sign} {others[0]})" if others else f"({sign}{one})", kind)


def _rounded_to_integer(rules: Rules, node: exp.Ceil | exp.Floor) -> Value:
    found = rules.value(node.this)
    if found.type.name != "numeric" or found.type.size is None:
        hint = INSTEAD_OF_FLOATS if found.type.name in FLOATS else "cast to numeric(p,s)"
        raise UnsupportedError(f"{node.key}() of {found.type.title}", hint)
    precision, scale = found.type.size
    kind = sized(precision - scale + 1, 0, node.key)
    return Value(f"CAST({node.key}({found.sql}) AS {kind.spark})", kind)


def _cast(rules: Rules, node: exp.Cast) -> Value:
    if (kind := node.meta.get(CAST_TO)) is not None:
        return Value(coerced(rules.value(node.this), kind), kind)
    found, wanted = rules.value(node.this), _named(node.to)
    if found.type.name == UNKNOWN:
        kind = wanted
        if kind.name == "numeric" and kind.size is None:
            raise UnsupportedError("a cast to numeric", "write numeric(p,s)")
        return Value(coerced(found, kind), kind)
    return _converted(found, wanted)


def _as_numeric(kind: PgType) -> PgType:
    precision, scale = size(kind, "arithmetic")
    return numeric(precision, scale)


def _result(sign: str, one: PgType, other: PgType) -> PgType:
    """Return the type of an arithmetic operation."""
    for each in (one, other):
        expect_number(each, sign)
    names = {one.name, other.name}
    if names <= INTEGERS.keys():
        return max(one, other, key=lambda each: INTEGERS[each.name])
    if names & FLOATS:
        if sign == "%":
            raise UnsupportedError("% of floating-point numbers", INSTEAD_OF_FLOATS)
        return one if names == {"float4"} else FLOAT8
    (p1, s1), (p2, s2) = size(one, sign), size(other, sign)
    scale = max(s1, s2)
    if sign == "*":
        kind = _exact(p1 + p2 + 1, s1 + s2, "*")
    elif sign == "%":
        kind = sized(min(p1 - s1, p2 - s2) + scale, scale, "%")
    else:
        kind = _exact(max(p1 - s1, p2 - s2) + scale + 1, scale, sign)
    return kind._replace(has_scale=one.has_scale and other.has_scale)


def _narrowed(left: Value, right: Value) -> tuple[Value, Value]:
    """Return two factors so that their product has 38 digits, where one of them is a quotient.

    The type of a quotient has room for integer digits that its values seldom have. A value that
    has them is an error then, as it is where a quotient needs more digits than its type has.
    """
    sizes = [left.type.size, right.type.size]
    quotient_ = next((at for at, each in enumerate((left, right)) if not each.type.has_scale), None)
    if quotient_ is None or None in sizes:
        return left, right
    (p1, s1), (p2, s2) = (each for each in sizes if each is not None)
    over = p1 + p2 + 1 - MAX_PRECISION
    precision, scale = ((p1, s1), (p2, s2))[quotient_]
    if over <= 0 or precision - scale - over < _LEAST_INTEGER_DIGITS:
        return left, right
    factor = (left, right)[quotient_]
    kind = numeric(precision - over, scale, has_scale=False)
    made = Value(f"CAST({factor.sql} AS {kind.spark})", kind)
    return (made, right) if quotient_ == 0 else (left, made)


def _exact(precision: int, scale: int, sign: str) -> PgType:
    """Return the type of a result; of 38 digits, if Spark loses none after the point."""
    if scale <= _KEPT_SCALE:
        return sized(min(precision, MAX_PRECISION), scale, sign)
    return sized(precision, scale, sign)


def _named(node: exp.DataType) -> PgType:
    if node.this.name == "ARRAY" and len(node.expressions) == 1:
        return array_of(_named(node.expressions[0]))
    name = _TYPES.get(node.this.name)
    if name is None:
        raise UnsupportedError(
            f"a cast to {node.sql(dialect='postgres')}",
            "select the column as it is, and cast it where the view is read",
        )
    given = [int(each.name) for each in node.expressions]
    if name == "numeric" and given:
        precision, scale = given[0], given[1] if len(given) > 1 else 0
        return sized(precision, scale, "a cast")
    if given:
        raise UnsupportedError(
            f"a cast to {node.sql(dialect='postgres')}", "write left(…, n), or cast without (n)"
        )
    return PgType(name)


def _converted(value: Value, wanted: PgType) -> Value:  # noqa: C901, PLR0911, PLR0912 - a case a pair of types
    """Return a cast, as Postgres converts."""
    sql, kind = value.sql, value.type
    made = f"CAST({sql} AS {wanted.spark})"
    if kind.mask:
        raise UnsupportedError("a cast of a masked column", "select it as it is")
    if kind.name in TEXTS and (read := read_text(sql, wanted)) is not None:
        return read
    match kind.name, wanted.name:
        case (a, b) if a == b and a != "numeric":
            return value
        case ("text" | "varchar", "text" | "varchar"):
            return Value(sql, wanted._replace(is_c=kind.is_c))
        case (a, b) if a in INTEGERS and b in {*INTEGERS, "float8"}:
            return Value(made, wanted)
        case (a, "text" | "varchar") if a in {*INTEGERS, "bool", "date"}:
            return Value(made, wanted)
        case ("bool", "int4") | ("int4", "bool") | ("date", "timestamp") | ("timestamp", "date"):
            return Value(made, wanted)
        case (a, "numeric") if a in INTEGERS:
            return Value(f"CAST({sql} AS {_or(wanted, kind).spark})", _or(wanted, kind))
        case ("numeric", "numeric"):
            return value if wanted.size is None else Value(made, wanted)
        case ("numeric", b) if b in INTEGERS and kind.size:
            return Value(f"CAST(round({sql}, 0) AS {wanted.spark})", wanted)
        case ("numeric", "float8") if kind.size:
            return Value(made, wanted)
        case ("numeric", "text" | "varchar") if kind.size is None or kind.has_scale:
            return Value(made, wanted)
        case ("float4", "float8"):
            return Value(made, wanted)
        case ("float4" | "float8", b) if b in INTEGERS:
            return Value(f"CAST(rint({sql}) AS {wanted.spark})", wanted)
    raise UnsupportedError(f"a cast from {kind.title} to {wanted.title}", _instead(kind, wanted))


def _instead(kind: PgType, wanted: PgType) -> str:
    """Return what to write in place of a cast."""
    if kind.name == "timestamptz":
        return "write (… AT TIME ZONE 'UTC'), and cast that, or select the column as it is"
    if kind.name == "numeric" and wanted.name in TEXTS:
        return "give all its values one scale before: round(…, n)::text, or ::numeric(p,s)::text"
    if kind.name in TEXTS:
        return (
            f"keep the value in a column of type {wanted.name}, or cast it where the view is read"
            + (": of numeric, write numeric(p,s)" if wanted.name == "numeric" else "")
        )
    return "select the column as it is, and cast it where the view is read"


def _or(wanted: PgType, kind: PgType) -> PgType:
    """Return the numeric that is wanted; of an integer's size if that has none."""
    return numeric(*size(kind, "a cast")) if wanted.size is None else wanted


RULES: Final = table_of(
    ("this expression", _arithmetic, list(_ARITHMETIC)),
    ("this", _neg, [exp.Neg]),
    ("this", _abs, [exp.Abs]),
    ("this decimals", _round, [exp.Round, exp.Trunc]),
    ("this", _sign, [exp.Sign]),
    ("this expression", _bitwise, list(_BITWISE)),
    ("this", _rounded_to_integer, [exp.Ceil, exp.Floor]),
    ("this to", _cast, [exp.Cast]),
)
