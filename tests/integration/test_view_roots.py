"""Standard deviations have the digits of Postgres' own, whatever the numbers are."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Context, Decimal
from functools import partial
from random import Random

import pytest

from lockstep.jobs.views.quotients import NO_DIGITS
from lockstep.jobs.views.roots import stddev
from tests.fixtures.servers import Database

# Postgres' own limit of digits after the point is 1,000.
_MOST = 1_000


def _groups(chosen: Random) -> Iterator[tuple[int, list[int]]]:
    """Yield the scale of a group's numbers, and these without their point."""
    yield 0, []
    yield 3, [5]
    for scale in range(7):
        yield scale, [1, 2]
        yield scale, [7] * 3
        yield scale, [-1, 0, 1]
        yield scale, [9_999, 10_000]
    for _ in range(400):
        scale, size = chosen.randrange(21), 10 ** chosen.randrange(1, 25)
        near = chosen.choice([0, chosen.randrange(-size, size)])
        width = chosen.choice([1, 9, 10_000, size])
        rows = chosen.choice([1, 2, 3, 17, 300])
        yield scale, [near + chosen.randrange(-width, width + 1) for _ in range(rows)]


def test_a_standard_deviation_has_postgres_digits_and_scale(database: Database) -> None:
    of_postgres = partial(stddev, has_scale=True, most_scale=_MOST)
    exact, chosen, wrong, seen = Context(prec=100), Random(170), list[str](), set[int]()
    query = "SELECT stddev_samp(x)::text, stddev_pop(x)::text FROM unnest(%s::numeric[]) AS x"
    with database.connect() as connection:
        for scale, integers in _groups(chosen):
            numbers = [Decimal(each).scaleb(-scale, exact) for each in integers]
            (asked,) = connection.execute(query, [numbers]).fetchall()
            squares = sum(each * each for each in integers)
            given = (str(sum(integers)), str(squares), len(integers))
            for wanted, is_sample in zip(asked, (True, False), strict=True):
                found = of_postgres(*given, is_sample=is_sample, scale=scale)
                if found != wanted:
                    wrong.append(f"{numbers}: {wanted}, and not {found}")
                seen.add(-1 if wanted is None else len(wanted.partition(".")[2]))
    assert wrong == []
    assert len(seen) > 20, "scales of all sizes, none, and no answer"


def _of_two(*, scale: int, most_scale: int, has_scale: bool = True) -> str | None:
    """Return the standard deviation of the two numbers whose last digits are 1 and 2."""
    return stddev(
        *("3", "5", 2), is_sample=True, scale=scale, has_scale=has_scale, most_scale=most_scale
    )


def test_what_has_more_digits_than_its_type_fails() -> None:
    assert _of_two(scale=9, most_scale=40) == "0.000000000707106781186547524400844362"
    with pytest.raises(ValueError, match=NO_DIGITS):
        _of_two(scale=9, most_scale=35)


def test_a_scale_that_depends_on_the_numbers_fails_only_where_it_matters() -> None:
    """Of large deviations Postgres writes as many digits as the numbers have."""
    assert _of_two(scale=0, most_scale=28, has_scale=False) == "0.70710678118654752440"
    large = partial(stddev, str(10**13), str(10**26), 2, is_sample=True, scale=6, most_scale=28)
    assert large(has_scale=True) == "7071067.811865475244"
    with pytest.raises(ValueError, match=NO_DIGITS):
        large(has_scale=False)
