"""The error of a row that can't be read names table, column and LSN, and never a value."""

from __future__ import annotations

import pytest

from cdc.decode.messages import Insert, Relation, RelationColumn, ReplicaIdentity, Update
from cdc.errors import ProtocolError
from tests.property.stream import Session, begin, frame, position

_INT, _TEXT = 23, 25
_COLUMNS = (RelationColumn(True, "id", _INT, -1), RelationColumn(False, "name", _TEXT, -1))  # noqa: FBT003
RELATION = Relation(7, "public", "users", ReplicaIdentity.DEFAULT, _COLUMNS)
SECRET = b"hunter2\xff"


@pytest.mark.parametrize(
    "message",
    [Insert(7, (b"1", SECRET)), Update(7, None, (b"1", SECRET))],
)
def test_a_row_of_the_stream_that_is_no_text(message: Insert | Update) -> None:
    session = Session(position(), {7: ("id",)})
    session.feed([begin(), frame(RELATION)])
    with pytest.raises(ProtocolError) as raised:
        session.feed([frame(message, 0x1234)])
    error = raised.value
    assert "a row of public.users can't be read: column name (text" in error.what
    assert "at LSN 0/1234" in error.what
    assert "values.invalid.text.handling.mode" in error.hint
    assert "hunter" not in str(error)


def test_bytes_that_are_no_row_name_no_column() -> None:
    session = Session(position(), {7: ("id",)})
    session.feed([begin(), frame(RELATION)])
    with pytest.raises(ProtocolError, match="0/1000"):
        session.feed([frame(b"I\x00\x00\x00\x07N\x00\x02t\x00\x00\x00\x01")])
