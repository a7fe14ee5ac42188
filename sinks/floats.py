"""Write floats as Postgres does: the fewest digits that identify a value of the type.

Python's `repr` does almost the same for doubles. But it assigns digits exactly between two values
to the even one, and Postgres to neither (its Ryu does not accept bounds); this occurs among numbers
that are so large that they have no fraction. Pure.

https://www.postgresql.org/docs/current/datatype-numeric.html#DATATYPE-FLOAT
"""

from __future__ import annotations

import math
import struct
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Type(NamedTuple):
    code: str  # the format character of `struct`
    bits: int  # bits of the mantissa
    most: int  # digits that distinguish any two values
    exponent: int  # the exponent from which on Postgres writes one


_SINGLE: Final = _Type("f", 24, 9, 6)
_DOUBLE: Final = _Type("d", 53, 17, 15)
_SMALLEST_EXPONENT: Final = -4
# A float with this mantissa has a smaller gap below it than above it.
_POWER_OF_TWO: Final = 0.5


def text4(value: float) -> bytes:
    """Return the text of a real."""
    return _text(value, _SINGLE)


def text8(value: float) -> bytes:
    """Return the text of a double precision."""
    return _text(value, _DOUBLE)


def _text(value: float, kind: _Type) -> bytes:
    if math.isnan(value):
        return b"NaN"
    if math.isinf(value):
        return b"Infinity" if value > 0 else b"-Infinity"
    return _laid_out(_everyday(value, kind) or _shortest(value, kind), kind)


def _everyday(value: float, kind: _Type) -> Decimal | None:
    """Return the digits if no bound matters: the value has a fraction and even gaps. Else None."""
    if abs(value) >= 2**kind.bits or abs(math.frexp(value)[0]) == _POWER_OF_TWO:
        return None
    if kind is _DOUBLE:
        return Decimal(repr(value))
    for digits in range(kind.most):
        text = f"{value:.{digits}e}"
        if _rounds(float(text), value, kind):
            return Decimal(text)
    raise AssertionError("`most` digits distinguish any two values")


def _shortest(value: float, kind: _Type) -> Decimal:
    for digits in range(1, kind.most):
        for found in sorted(_near(value, digits), key=lambda near: _preference(near, value)):
            if _means(found, value, kind):
                return found
    return Decimal(f"{value:.{kind.most - 1}e}")


def _preference(found: Decimal, value: float) -> tuple[Decimal, int]:
    """Return a sort key: the nearer digits first, and of two equally near the even ones."""
    return abs(found - Decimal(value)), found.as_tuple().digits[-1] % 2


def _near(value: float, digits: int) -> Iterator[Decimal]:
    """Yield the nearest numbers with `digits` digits, below and above the value."""
    exact = Decimal(value)
    yield Context(prec=digits, rounding=ROUND_FLOOR).plus(exact)
    yield Context(prec=digits, rounding=ROUND_CEILING).plus(exact)


def _means(found: Decimal, value: float, kind: _Type) -> bool:
    """Return whether the digits are nearer to the value than to any other of its type."""
    exact, off = Decimal(value), found - Decimal(value)
    other = _next(value, math.copysign(math.inf, off), kind)
    if math.isinf(other):  # after the greatest value the gap counts as large as before it
        gap = exact - Decimal(_next(value, math.copysign(math.inf, -off), kind))
    else:
        gap = Decimal(other) - exact
    return 2 * abs(off) < abs(gap)


def _rounds(found: float, value: float, kind: _Type) -> bool:
    try:
        packed = struct.pack(kind.code, found)
    except OverflowError:
        return False
    return packed == struct.pack(kind.code, value)


def _next(value: float, way: float, kind: _Type) -> float:
    """Return the type's next value in the direction of `way`."""
    if kind is _DOUBLE:
        return math.nextafter(value, way)
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if value == 0:
        bits = 1 if way > 0 else 0x80000001
    else:
        bits += 1 if (way > 0) == (value > 0) else -1
    found: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return found


def _laid_out(number: Decimal, kind: _Type) -> bytes:
    sign, digits, _ = number.as_tuple()
    power = number.adjusted() if number else 0
    text = "".join(map(str, digits)).rstrip("0") or "0"
    if number and not _SMALLEST_EXPONENT <= power < kind.exponent:
        mantissa = text[0] + ("." + text[1:] if text[1:] else "")
        return f"{'-' * sign}{mantissa}e{'-' if power < 0 else '+'}{abs(power):02d}".encode()
    plain = format(number, "f")
    return (plain.rstrip("0").rstrip(".") if "." in plain else plain).encode()
