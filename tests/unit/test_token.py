"""A token has an LSN and its database; and where the newest record of the WAL ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import ConfigError
from cdc.events import LSN
from cdc.source.token import Token, written

PAGE, SEGMENT = 8192, 16 << 20
LSNS = st.integers(0, 2**64 - 1).map(LSN)


@given(LSNS, st.integers(0, 2**64 - 1), st.text(min_size=1))
def test_a_token_is_read_back_as_it_was_written(lsn: LSN, system: int, database: str) -> None:
    try:
        database.encode()
    except UnicodeEncodeError:
        return  # no database has such a name
    token = Token(lsn, str(system), database)
    assert Token.parse(str(token)) == token
    assert str(token).isascii()
    assert " " not in str(token)


@pytest.mark.parametrize("text", ["", "0/1", "0/1@", "0/1@7", "0/1@7/", "x@7/d", "0/1@x/d", "@7/d"])
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a token"):
        Token.parse(text)


@given(st.integers(1, 2**40), st.lists(st.integers(3, 4_000), min_size=1, max_size=40))
def test_the_newest_record_ends_where_it_is_reported_to(begin: int, sizes: list[int]) -> None:
    """Lay records out as Postgres does; find the last one's end from the next one's position."""
    inserting = end = _past_headers(begin * 8)
    for size in sizes:
        left = size * 8  # records are aligned
        at = inserting
        while left:
            room = PAGE - at % PAGE
            taken = min(room, left)
            left -= taken
            at += taken
            end = at
            at = _past_headers(at)
        inserting = at
        assert written(LSN(inserting), PAGE, SEGMENT) == end


def _past_headers(at: int) -> int:
    if at % SEGMENT == 0:
        return at + 40
    return at + 24 if at % PAGE == 0 else at
