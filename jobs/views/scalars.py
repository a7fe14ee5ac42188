"""Rules for numbers, dates, texts and casts.

Pure.
"""

from __future__ import annotations

from typing import Final

from sqlglot import exp

from lockstep.jobs.views.quotients import quotient
from lockstep.jobs.views.refusing import UnsupportedError
from lockstep.jobs.views.types import (
    DATE,
    FLOAT8,
    FLOATS,
    INT4,
    INTEGERS,
    TEXT,
    UNKNOWN,
    Type,
    numeric,
)
from lockstep.jobs.views.values import (
    Rules,
    Value,
    coerced,
    expect_number,
    expect_text,
    size,
    sized,
    string,
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
# Above 38 digits Spark keeps these after the point; a larger number is an error.
_KEPT_SCALE: Final = 6
# A quotient that is multiplied keeps room for so many before the point.
_LEAST_INTEGER_DIGITS: Final = 9
_PARTS_OF_DATES: Final = {"year", "month", "day", "hour", "minute"}
_TRUNCATED_TO: Final = {"year", "quarter", "month", "week", "day", "hour", "minute", "second"}
_TYPES: Final = {
    "BOOLEAN": "bool", "SMALLINT": "int2", "INT": "int4", "BIGINT": "int8", "FLOAT": "float4",
    "DOUBLE": "float8", "TEXT": "text", "VARCHAR": "varchar", "DATE": "date", "UUID": "uuid",
    "TIMESTAMP": "timestamp", "TIMESTAMPTZ": "timestamptz", "DECIMAL": "numeric",
}  # fmt: skip


def _arithmetic(rules: Rules, node: exp.Expr) -> Value:
    sign = _ARITHMETIC[type(node)]
    left, right = rules.value(node.this), rules.value(node.expression)
    if left.type.name == "date" or right.type.name == "date":
        return _days(sign, left, right)
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
        return Value(f"({one} {sign} {other})", kind)
    one, other = (coerced(each, _as_numeric(each.type)) for each in (left, right))
    return Value(f"CAST(({one} {sign} {other}) AS {kind.spark})", kind)


def _days(sign: str, left: Value, right: Value) -> Value:
    names = left.type.name, sign, right.type.name
    match names:
        case ("date", "-", "date"):
            return Value(f"datediff({left.sql}, {right.sql})", INT4)
        case ("date", "+" | "-", "int2" | "int4"):
            word = "date_add" if sign == "+" else "date_sub"
            return Value(f"{word}({left.sql}, {right.sql})", DATE)
        case ("int2" | "int4", "+", "date"):
            return Value(f"date_add({right.sql}, {left.sql})", DATE)
    raise UnsupportedError(
        f"{left.type.title} {sign} {right.type.title}", "add days, as integers, to dates"
    )


def _neg(rules: Rules, node: exp.Neg) -> Value:
    found = rules.value(node.this)
    expect_number(found.type, "-")
    return Value(f"(- {found.sql})", found.type)


def _abs(rules: Rules, node: exp.Abs) -> Value:
    found = rules.value(node.this)
    expect_number(found.type, "abs()")
    return Value(f"abs({found.sql})", found.type)


def _round(rules: Rules, node: exp.Round) -> Value:
    found, digits = rules.value(node.this), node.args.get("decimals")
    size = found.type.size
    if size is None or found.type.name != "numeric":
        raise UnsupportedError(f"round() of {found.type.title}", "round a numeric(p,s): cast to it")
    if digits is not None and not (isinstance(digits, exp.Literal) and digits.is_int):
        raise UnsupportedError("round() to a number of digits that is no literal", "write it")
    scale = int(digits.this) if digits is not None else 0
    precision, old = size
    kind = sized(max(precision - old + 1, 1) + scale, scale, "round()")
    return Value(f"CAST(round({found.sql}, {scale}) AS {kind.spark})", kind)


def _rounded_to_integer(rules: Rules, node: exp.Ceil | exp.Floor) -> Value:
    found = rules.value(node.this)
    if found.type.name != "numeric" or found.type.size is None:
        raise UnsupportedError(f"{node.key}() of {found.type.title}", "cast to numeric(p,s)")
    precision, scale = found.type.size
    kind = sized(precision - scale + 1, 0, node.key)
    return Value(f"CAST({node.key}({found.sql}) AS {kind.spark})", kind)


def _extract(rules: Rules, node: exp.Extract) -> Value:
    part, found = node.name.lower(), rules.value(node.expression)
    if found.type.name not in {"date", "timestamp"} or part not in _PARTS_OF_DATES:
        raise UnsupportedError(
            f"extract({part} from {found.type.title})",
            f"take {', '.join(sorted(_PARTS_OF_DATES))} of a date or timestamp",
        )
    kind = numeric(10, 0)
    if found.type.name == "date" and part in {"hour", "minute"}:
        raise UnsupportedError(f"extract({part} from date)", "take it of a timestamp")
    return Value(f"CAST(extract({part} FROM {found.sql}) AS {kind.spark})", kind)


def _truncated(rules: Rules, node: exp.TimestampTrunc) -> Value:
    found, unit = rules.value(node.this), node.args["unit"].name.lower()
    if found.type.name != "timestamp" or unit not in _TRUNCATED_TO:
        raise UnsupportedError(
            f"date_trunc('{unit}', {found.type.title})",
            f"take {', '.join(sorted(_TRUNCATED_TO))} of a timestamp without time zone",
        )
    text = f"CAST({found.sql} AS timestamp)"
    return Value(f"CAST(date_trunc('{unit}', {text}) AS timestamp_ntz)", found.type)


def _zone(rules: Rules, node: exp.AtTimeZone) -> Value:
    found, zone = rules.value(node.this), rules.value(node.args["zone"])
    if found.type.name != "timestamptz" or zone.text != "UTC":
        raise UnsupportedError(
            f"{found.type.title} AT TIME ZONE", "write timestamptz AT TIME ZONE 'UTC'"
        )
    return Value(f"CAST({found.sql} AS timestamp_ntz)", Type("timestamp"))


def _concatenated(rules: Rules, node: exp.DPipe) -> Value:
    given = [rules.value(node.this), rules.value(node.expression)]
    for each in given:
        if each.type.name != UNKNOWN:
            expect_text(each.type, "||")
    return Value(f"({' || '.join(coerced(each, TEXT) for each in given)})", TEXT)


def _length(rules: Rules, node: exp.Length) -> Value:
    found = rules.value(node.this)
    expect_text(found.type, "length()")
    return Value(f"length({found.sql})", INT4)


def _trim(rules: Rules, node: exp.Trim) -> Value:
    found = rules.value(node.this)
    expect_text(found.type, "trim()")
    return Value(f"trim({found.sql})", TEXT)


def _replace(rules: Rules, node: exp.Replace) -> Value:
    value, old, new = (rules.value(node.args[p]) for p in ("this", "expression", "replacement"))
    expect_text(value.type, "replace()")
    if not old.text or new.text is None:
        raise UnsupportedError("replace() of other than literals", "write both texts")
    return Value(f"replace({value.sql}, {string(old.text)}, {string(new.text)})", TEXT)


def _substring(rules: Rules, node: exp.Substring) -> Value:
    found = rules.value(node.this)
    expect_text(found.type, "substring()")
    start, length = node.args.get("start"), node.args.get("length")
    for each in (start, length):
        if each is not None and not (isinstance(each, exp.Literal) and each.is_int):
            raise UnsupportedError("substring() with other than numbers", "write numbers")
    if start is None or int(start.this) < 1:
        raise UnsupportedError("substring() without a start of 1 or more", "write one")
    given = [start.this, *([length.this] if length is not None else [])]
    return Value(f"substring({found.sql}, {', '.join(given)})", TEXT)


def _left(rules: Rules, node: exp.Left) -> Value:
    found, length = rules.value(node.this), node.expression
    expect_text(found.type, "left()")
    if not (isinstance(length, exp.Literal) and length.is_int):
        raise UnsupportedError("left() with other than a number", "write 0 or more")
    return Value(f"left({found.sql}, {length.this})", TEXT)


def _collate(rules: Rules, node: exp.Collate) -> Value:
    found = rules.value(node.this)
    if not found.type.is_nondeterministic:
        expect_text(found.type, "COLLATE")
    if node.expression.name != "C":
        raise UnsupportedError(f"COLLATE {node.expression.name}", 'write COLLATE "C"')
    return found._replace(type=found.type.as_bytes)


def _cast(rules: Rules, node: exp.Cast) -> Value:
    found, wanted = rules.value(node.this), _named(node.to)
    if found.type.name == UNKNOWN:
        kind = wanted
        if kind.name == "numeric" and kind.size is None:
            raise UnsupportedError("a cast to numeric", "write numeric(p,s)")
        return Value(coerced(found, kind), kind)
    return _converted(found, wanted)


def _as_numeric(kind: Type) -> Type:
    precision, scale = size(kind, "arithmetic")
    return numeric(precision, scale)


def _result(sign: str, one: Type, other: Type) -> Type:
    """Return the type of an arithmetic operation."""
    for each in (one, other):
        expect_number(each, sign)
    names = {one.name, other.name}
    if names <= INTEGERS.keys():
        return max(one, other, key=lambda each: INTEGERS[each.name])
    if names & FLOATS:
        if sign == "%":
            raise UnsupportedError("% of floating-point numbers", "cast to numeric(p,s)")
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


def _exact(precision: int, scale: int, sign: str) -> Type:
    """Return the type of a result; of 38 digits, if Spark loses none after the point."""
    if scale <= _KEPT_SCALE:
        return sized(min(precision, MAX_PRECISION), scale, sign)
    return sized(precision, scale, sign)


def _named(node: exp.DataType) -> Type:
    name = _TYPES.get(node.this.name)
    if name is None:
        raise UnsupportedError(f"a cast to {node.sql(dialect='postgres')}", "leave it out")
    given = [int(each.name) for each in node.expressions]
    if name == "numeric" and given:
        precision, scale = given[0], given[1] if len(given) > 1 else 0
        return sized(precision, scale, "a cast")
    if given:
        raise UnsupportedError(f"a cast to {node.sql(dialect='postgres')}", "cast without (n)")
    return Type(name)


def _converted(value: Value, wanted: Type) -> Value:  # noqa: C901, PLR0911, PLR0912 - a case a pair of types
    """Return a cast, as Postgres converts."""
    sql, kind = value.sql, value.type
    made = f"CAST({sql} AS {wanted.spark})"
    if kind.mask:
        raise UnsupportedError("a cast of a masked column", "select it as it is")
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
    raise UnsupportedError(
        f"a cast from {kind.title} to {wanted.title}", "select the column as it is"
    )


def _or(wanted: Type, kind: Type) -> Type:
    """Return the numeric that is wanted; of an integer's size if that has none."""
    return numeric(*size(kind, "a cast")) if wanted.size is None else wanted


RULES: Final = table_of(
    ("this expression", _arithmetic, list(_ARITHMETIC)),
    ("this", _neg, [exp.Neg]),
    ("this", _abs, [exp.Abs]),
    ("this decimals", _round, [exp.Round]),
    ("this", _rounded_to_integer, [exp.Ceil, exp.Floor]),
    ("this expression", _extract, [exp.Extract]),
    ("this unit", _truncated, [exp.TimestampTrunc]),
    ("this zone", _zone, [exp.AtTimeZone]),
    ("this expression", _concatenated, [exp.DPipe]),
    ("this", _length, [exp.Length]),
    ("this", _trim, [exp.Trim]),
    ("this expression replacement", _replace, [exp.Replace]),
    ("this start length", _substring, [exp.Substring]),
    ("this expression", _left, [exp.Left]),
    ("this expression", _collate, [exp.Collate]),
    ("this to", _cast, [exp.Cast]),
)
