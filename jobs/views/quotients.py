"""A quotient of numerics with exactly the digits that Postgres gives it.

Pure. Postgres chooses the scale of each quotient by its operands' values (`select_div_scale` in
numeric.c): at least 16 significant digits, counted in groups of four, and no fewer digits after the
point than either operand has. It rounds there, half away from zero.

Spark's `/` rounds where the types say, so the quotient is made of integers here: its integer part
and twice sixteen digits after the point, cut off, which is enough to round at any scale below 32.
A quotient that needs more digits than its type has fails, with `NO_DIGITS` in its message.
"""

from __future__ import annotations

from typing import Final

from lockstep.jobs.views.refusing import UnsupportedError
from lockstep.jobs.views.types import PgType, numeric
from lockstep.jobs.views.values import Value, size
from lockstep.sinks.delta.types import MAX_PRECISION

NO_DIGITS: Final = "lockstep: a quotient needs more digits than a store has"
GROUP: Final = 4  # digits: Postgres' numeric has base 10,000
SIGNIFICANT: Final = 16
_STEP: Final = 16  # digits of one step of the division: its result is a bigint
_FRACTION: Final = 2 * _STEP
# An integer part is a bigint.
_MOST_INTEGER_DIGITS: Final = 18
# More are only needed by quotients below 1e-12; fewer leave room for comparisons.
MOST_SCALE: Final = 28
# An operand whose values may have fewer digits than its type decides the scale of none of these.
_MOST_UNSURE_SCALE: Final = 12


def quotient(left: Value, right: Value, integer_digits: int | None = None) -> Value:
    """Return `left / right` as Postgres has it; `integer_digits`: how many it has at most."""
    (precision, scale), (_, other) = size(left.type, "/"), size(right.type, "/")
    for each in (left.type, right.type):
        if not each.has_scale and (each.size or (0, 0))[1] > _MOST_UNSURE_SCALE:
            raise UnsupportedError(
                "a division of a number whose scale depends on its value",
                "round it before, by round(…, n) or ::numeric(p,s)",
            )
    digits = precision - scale + other if integer_digits is None else integer_digits
    digits = min(max(digits, 1), _MOST_INTEGER_DIGITS)
    kind = numeric(MAX_PRECISION, min(MAX_PRECISION - digits, MOST_SCALE), has_scale=False)
    return Value(_text(left, right, kind), kind)


def _text(left: Value, right: Value, kind: PgType) -> str:
    (_, one), (_, other) = size(left.type, "/"), size(right.type, "/")
    # As integers of complete groups: the first group of each is that of its text.
    shift = -(-max(one, other) // GROUP) * GROUP
    a, b = (_shifted(each, shift) for each in (left, right))
    least = max(one, other)
    has_scale = left.type.has_scale and right.type.has_scale
    operands = f"named_struct('a', {a}, 'b', {b})"
    divided = (
        "named_struct('minus', (x.a < 0) <> (x.b < 0), 'q',"
        # Spark would return the last 64 bits of more.
        f" if(length(CAST(abs(x.a) AS string)) - length(CAST(abs(x.b) AS string))"
        f" >= {_MOST_INTEGER_DIGITS}, CAST(raise_error('{NO_DIGITS}') AS bigint),"
        " abs(x.a) div abs(x.b)),"
        " 'r', abs(x.a) % abs(x.b), 'b', abs(x.b),"
        f" 'w', {_groups('x.a')} - {_groups('x.b')}"
        f" - if({_first('x.a')} <= {_first('x.b')}, 1, 0))"
    )
    ten = f"CAST('1{'0' * _STEP}' AS decimal({_STEP + 1},0))"
    wide = f"decimal({MAX_PRECISION},0)"
    first = f"CAST((x.r * {ten}) AS {wide})"
    second = f"CAST((({first} % x.b) * {ten}) AS {wide})"
    fraction = f"CAST(CAST(({first} div x.b) AS {wide}) * {ten} + ({second} div x.b) AS {wide})"
    scaled = (
        f"named_struct('minus', x.minus, 'q', x.q, 'f', {fraction},"
        f" 's', {_scale(least, kind, has_scale=has_scale)})"
    )
    unit = f"CAST(concat('1', repeat('0', {_FRACTION} - x.s)) AS {wide})"
    half = f"CAST(concat('5', repeat('0', {_FRACTION - 1} - x.s)) AS {wide})"
    up = f"CAST(x.f + {half} AS {wide})"
    rounded = f"named_struct('minus', x.minus, 'q', x.q, 'f', CAST({up} - {up} % {unit} AS {wide}))"
    one_ = f"CAST('1{'0' * _FRACTION}' AS {wide})"
    made = (
        "CAST(concat(if(x.minus, '-', ''),"
        f" CAST(x.q + if(x.f >= {one_}, 1L, 0L) AS string), '.',"
        f" lpad(CAST(x.f % {one_} AS string), {_FRACTION}, '0')) AS {kind.spark})"
    )
    # A step for each, so that no text is repeated: transform() is how Spark names a value.
    found = f"array({operands})"
    for step in (divided, scaled, rounded, made):
        found = f"transform({found}, x -> {step})"
    return f"{found}[0]"


def _shifted(value: Value, digits: int) -> str:
    power = f"CAST('1{'0' * digits}' AS decimal({digits + 1},0))"
    precision, scale = size(value.type, "/")
    return (
        f"CAST((CAST({value.sql} AS decimal({precision},{scale})) * {power})"
        f" AS decimal({MAX_PRECISION},0))"
    )


def _groups(name: str) -> str:
    return f"CAST(ceil(length(CAST(abs({name}) AS string)) / {GROUP}) AS int)"


def _first(name: str) -> str:
    text = f"CAST(abs({name}) AS string)"
    return f"CAST(left({text}, pmod(length({text}) - 1, {GROUP}) + 1) AS int)"


def _scale(least: int, kind: PgType, *, has_scale: bool) -> str:
    assert kind.size is not None, "it is a number"
    wanted = f"({SIGNIFICANT} - {GROUP} * x.w)"
    fails = f"CAST(raise_error('{NO_DIGITS}') AS int)"
    unsure = "" if has_scale else f" WHEN x.q <> 0 AND {wanted} < {least} THEN {fails}"
    # Of zero any scale is the same number.
    return (
        f"CASE WHEN x.q = 0 AND x.r = 0 THEN 0{unsure}"
        f" WHEN greatest({wanted}, {least}) > {kind.size[1]} THEN {fails}"
        f" ELSE greatest({wanted}, {least}) END"
    )
