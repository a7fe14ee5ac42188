"""Numbers' text → JSON: big integers, floats, decimals, money.

Exact: digits are moved, never computed in floating point.
"""

from __future__ import annotations

from binascii import b2a_base64
from typing import Final

# A number of fewer characters is below 2^53, where a double still holds every integer.
SAFE_CHARACTERS: Final = 16
_SAFE: Final = 2**53

# What Postgres writes into money under lc_monetary=C, in addition to sign, digits and point.
MONEY_MARKS: Final = b"$,"
_ALL_MARKS: Final = b"$,."


def floating(text: bytes) -> bytes:
    """Return a JSON number, or a string for NaN and the infinities, which JSON lacks."""
    if text == b"-0":
        # Most readers parse a number without a point as an integer, which has no such zero.
        return b"-0.0"
    return text if text[-1:].isdigit() else b'"%b"' % text


def bigint(text: bytes) -> bytes:
    """Return a number, or a string if a double could not hold it."""
    return text if -_SAFE <= int(text) <= _SAFE else b'"%b"' % text


def unscaled(text: bytes, scale: int) -> bytes:
    """Return base64 of the bytes of `text` times ten to the `scale`.

    A value that has another scale than its column declares is written with it, as by `scaled`.
    """
    fraction = len(text) - text.find(b".") - 1 if b"." in text else 0
    if fraction != max(scale, 0) or not text[-1:].isdigit():
        return scaled(text)
    number, rest = divmod(int(text.replace(b".", b"")), 10 ** max(-scale, 0))
    return scaled(text) if rest else b'"%b"' % _base64(number)


def scaled(text: bytes) -> bytes:
    """Return the object of scale and unscaled value; a string for NaN and the infinities."""
    if not text[-1:].isdigit():
        return b'"%b"' % text
    integer, _, fraction = text.partition(b".")
    return b'{"scale":%d,"value":"%b"}' % (len(fraction), _base64(int(integer + fraction)))


def money(text: bytes, digits: int) -> bytes:
    """Return the amount as a decimal number's text, with `digits` digits after the point."""
    units = text.translate(None, _ALL_MARKS)
    sign, units = (b"-", units[1:]) if units[:1] == b"-" else (b"", units)
    integer = int(units[: len(units) - digits] or b"0")
    if not digits:
        return b"%b%d" % (sign, integer)
    return b"%b%d.%b" % (sign, integer, units[-digits:].rjust(digits, b"0"))


def money_units(text: bytes) -> bytes:
    """Return base64 of the amount in the currency's smallest unit, which is what is stored."""
    return b'"%b"' % _base64(int(text.translate(None, _ALL_MARKS)))


def _base64(number: int) -> bytes:
    """Return base64 of the shortest big-endian two's complement, as Java's BigInteger has it."""
    size = (number if number >= 0 else ~number).bit_length() // 8 + 1
    return b2a_base64(number.to_bytes(size, "big", signed=True), newline=False)


NAMESPACE: Final = {
    function.__name__: function
    for function in (floating, bigint, unscaled, scaled, money, money_units)
} | {"MONEY_MARKS": MONEY_MARKS}
