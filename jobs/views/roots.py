"""Standard deviations with exactly the digits that Postgres gives them, as a function for Spark.

Postgres computes them of numerics (`numeric_stddev_internal` in numeric.c): the variance, rounded
half away from zero at the scale that `select_div_scale` chooses (see `jobs.views.quotients`), and
its root, rounded at that scale, too. Spark has no root of a decimal.

Pure.
"""

from __future__ import annotations

from math import isqrt
from typing import Final

from lockstep.jobs.views.quotients import GROUP, NO_DIGITS, SIGNIFICANT

STDDEV: Final = "lockstep_stddev"


def stddev(
    total: str | None,
    squares: str | None,
    rows: int,
    is_sample: bool,  # noqa: FBT001 - Spark passes no names
    scale: int,
    has_scale: bool,  # noqa: FBT001 - as above
    most_scale: int,
) -> str | None:
    """Return the standard deviation of numbers of a scale, given as integers by their last digit.

    `total` is their sum, `squares` that of their squares. None of too few. Raises ValueError with
    `NO_DIGITS` if it has more than `most_scale` digits after the point; or if its scale depends on
    that of each number, of which some may have fewer digits, unless the numbers' `has_scale`.
    """
    divisor = rows * (rows - 1) if is_sample else rows * rows
    if not divisor or total is None or squares is None:
        return None
    difference = rows * int(squares) - int(total) ** 2
    if difference <= 0:
        return "0"
    shift = -2 * scale % GROUP
    weight, first = _first_group(difference * 10**shift, 2 * scale + shift)
    other_weight, other_first = _first_group(divisor, 0)
    digits = SIGNIFICANT - GROUP * (weight - other_weight - (first <= other_first))
    places = max(digits, 2 * scale, 0)
    if places > most_scale or (digits < 2 * scale and not has_scale):
        raise ValueError(NO_DIGITS)
    unit = divisor * 10 ** (2 * scale)
    variance = (2 * difference * 10**places + unit) // (2 * unit)
    square = variance * 10**places
    root = isqrt(square)
    root += square - root * root > root  # nearer to the next one
    text = str(root).zfill(places + 1)
    return f"{text[:-places]}.{text[-places:]}" if places else text


def _first_group(number: int, scale: int) -> tuple[int, int]:
    """Return where the first group of digits of a number is, before the point from 0, and it.

    `scale`: the digits of the number after the point, in complete groups.
    """
    text = str(number)
    after = (len(text) - 1) // GROUP
    return after - scale // GROUP, int(text[: len(text) - GROUP * after])
