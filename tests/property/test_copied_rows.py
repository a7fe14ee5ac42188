"""Rows of a binary COPY: the stream's bytes from other frames, in pieces of any size."""

from __future__ import annotations

from collections.abc import Iterator
from struct import pack
from typing import Any

import orjson
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.decode.frames import PADDING
from cdc.decode.messages import Insert, Relation, RelationColumn, ReplicaIdentity
from cdc.encode.routes import TableRoute as Route
from cdc.errors import ConfigError, InvariantError, ProtocolError
from cdc.events import LSN
from cdc.log.batch import Batch
from cdc.snapshot.initial.records import PageRange
from cdc.snapshot.initial.rows import RangeRows, transaction
from cdc.source import copy_stream
from cdc.source.copy_stream import CopyStream
from tests.property.rows import Table, rows, tables
from tests.property.stream import EPOCH, Session, begin, encoder_of, frame, position

HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
START = pack(">cIbH", b"H", 7, 1, 0)
END = pack(">cIh", b"d", 6, -1) + pack(">cI", b"c", 4) + b"C\0\0\0\x0bCOPY 1\0" + b"Z\0\0\0\x05T"
Row = tuple[Any, ...]


def message(payload: bytes) -> bytes:
    return pack(">cI", b"d", 4 + len(payload)) + payload


def copied(row: Row) -> bytes:
    """Return a row as a binary COPY writes it."""
    fields = (pack(">i", -1) if v is None else pack(">i", len(v)) + v for v in row)
    return pack(">h", len(row)) + b"".join(fields)


class Played:
    """A connection that returns the given pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.finished = False
        self.pgconn = self

    def __call__(self, _connection: object, *, replication: bool) -> Played:
        assert not replication
        return self

    def start(self, _command: bytes) -> None:
        """Do nothing: the pieces are the answer."""

    def read(self) -> bytes:
        return self.pieces.pop(0)

    def close(self) -> None:
        """Do nothing: no resource is open."""

    def finish(self) -> None:
        self.finished = True


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    it = Played([])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_stream, "wire", it)
        yield it


@st.composite
def row_cases(draw: st.DrawFn, most: int = 4) -> tuple[Table, list[Row]]:
    table = draw(tables())
    return table, draw(st.lists(rows(table), min_size=1, max_size=most))


class Reading:
    """A table's rows on the way to a batch."""

    def __init__(
        self, table: Table, capacity: int = 1 << 40, session: Session | None = None
    ) -> None:
        relation = table.relation
        session = session or Session(position(), {relation.relation_id: table.primary_key})
        session.feed([begin(), frame(relation)])
        [version] = session.new_versions
        encoder = encoder_of(version)
        self.batch = Batch()
        route = Route(encoder, self.batch.topic(version.topic, encoder.partitions), session.dead)
        members = transaction(EPOCH, LSN(0x2000), 1_767_323_045_123_456)
        event = route.encoder.copied_format(LSN(0x2000), *members)
        each = PageRange(
            table=0, number=0, first_page=0, end_page=1, first_seq=100, capacity=capacity
        )
        self.rows = RangeRows(route, event, each, self.batch)
        self.session = session

    def waiting(self) -> list[tuple[int, bytes | None, bytes]]:
        return [
            (partition.number, message["key"], message["value"])
            for partition in self.batch.waiting()
            for message in partition.take()
        ]

    def read(self, played: Played, pieces: list[bytes]) -> list[tuple[int, bytes | None, bytes]]:
        """Return what a COPY that arrives in these pieces puts into the batch."""
        played.pieces, played.finished = pieces, False
        with CopyStream(played, "COPY") as copying:  # type: ignore[arg-type]
            while chunk := copying.read():
                assert chunk.endswith(PADDING)
                copying.taken(chunk, self.rows.feed(chunk))
        assert not played.pieces
        return self.waiting()


def cut(data: bytes, at: list[int]) -> list[bytes]:
    """Return the data in pieces that end at these offsets."""
    ends = sorted({*at, len(data)} - {0})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(row_cases())
def test_a_row_has_the_bytes_that_its_insert_has(case: tuple[Table, list[Row]]) -> None:
    table, given_rows = case
    reading = Reading(table)
    relation_id = table.relation.relation_id
    reading.session.feed([frame(Insert(relation_id, row)) for row in given_rows])
    reading.rows.feed(b"".join(message(copied(row)) for row in given_rows) + PADDING)
    inserted = [(r.partition, r.key, r.value) for r in reading.session.waiting()]
    for read, insert in zip(reading.waiting(), inserted, strict=True):
        assert read[:2] == insert[:2]
        image, _, rest = read[2].partition(b',"source":')
        assert insert[2] is not None
        assert image == insert[2].partition(b',"source":')[0]
        event, expected = orjson.loads(read[2]), orjson.loads(insert[2])
        assert event["op"], event["source"]["snapshot"] == ("r", "true")
        place = {"txId": None, "lsn": 0x2000, "ordinal": 0, "commit_lsn": "0/2000"}
        place |= {"snapshot": "true", "seq": event["source"]["seq"]}
        assert event["source"] == expected["source"] | place
        assert rest.endswith(b',"transaction":null}')
    encoder = reading.rows.table.encoder
    for row in given_rows:
        data = copied(row)
        format_ = encoder.copied_format(9, b'"txId":null', b'"ts_ms":1')
        end = len(data)
        key, value = encoder.copied(data + PADDING, 2, end, format_, 7, 3)
        values = encoder.copied_values(data + PADDING, 2, end)
        assert value == format_ % (*values, 3, 7)
        assert key == encoder.key(values)


@pytest.mark.parametrize("header", ["with the first row", "alone"])
@given(case=row_cases(), data=st.data())
def test_however_it_is_cut_every_row_comes_once_and_in_order(
    played: Played, header: str, case: tuple[Table, list[Row]], data: st.DataObject
) -> None:
    table, given_rows = case
    first, *others = map(copied, given_rows)
    started = [message(HEADER + first)] if header != "alone" else [message(HEADER), message(first)]
    notice = b"N" + pack(">I", 4 + 8) + b"SNOTICE\0"
    stream = START + b"".join([*started, notice, *map(message, others), END])
    complete = Reading(table).read(played, [stream])
    assert sorted(orjson.loads(value)["source"]["seq"] for _, _, value in complete) == [
        *range(100, 100 + len(given_rows))
    ]
    places = data.draw(st.lists(st.integers(1, len(stream) - 1), max_size=12))
    assert Reading(table).read(played, cut(stream, places)) == complete
    assert Reading(table).read(played, cut(stream, [*range(len(stream))])) == complete
    assert not played.finished


@given(row_cases(most=1))
def test_every_strict_prefix_and_every_trailing_byte_raises(case: tuple[Table, list[Row]]) -> None:
    table, [row] = case
    complete = copied(row)
    reading = Reading(table)
    for length in range(2, len(complete)):
        with pytest.raises(ProtocolError):
            reading.rows.feed(message(complete[:length]) + PADDING)
    with pytest.raises(ProtocolError):
        reading.rows.feed(message(complete + b"x") + PADDING)
    assert reading.rows.rows == 0
    assert reading.waiting() == []


@given(row_cases(most=1), st.data())
def test_mutated_rows_encode_something_or_raise(
    played: Played, case: tuple[Table, list[Row]], data: st.DataObject
) -> None:
    table, [row] = case
    mutated = bytearray(copied(row))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        mutated[at] = data.draw(st.integers(0, 255))
    try:
        records = Reading(table).read(played, [START + message(HEADER + bytes(mutated)) + END])
    except ProtocolError:
        assert played.finished  # what still arrives can't be distinguished from the next answer
    else:
        assert len(records) <= 1


def test_a_row_with_another_count_of_columns_stops_the_copy(played: Played) -> None:
    table = _narrow()
    with pytest.raises(ProtocolError, match="no row"):
        Reading(table).read(played, [START + message(HEADER) + message(copied((b"1", b"2"))) + END])
    assert played.finished


def test_another_format_is_refused(played: Played) -> None:
    with pytest.raises(ProtocolError, match="header"):
        Reading(_narrow()).read(played, [START + message(b"1\n") + END])


def test_an_error_of_the_servers_is_raised_after_the_rows_before_it(played: Played) -> None:
    failed = b"SERROR\0C22012\0Mdivision by zero\0\0"
    error = b"E" + pack(">I", 4 + len(failed)) + failed + b"Z\0\0\0\x05E"
    reading = Reading(_narrow())
    with pytest.raises(ConfigError, match="division by zero") as raised:
        reading.read(played, [START + message(HEADER + copied((b"1",))) + error])
    assert isinstance(raised.value.__cause__, psycopg.errors.DivisionByZero)
    assert reading.rows.rows == 1
    assert not played.finished


def test_more_rows_than_seqs_are_an_error() -> None:
    reading = Reading(_narrow(), capacity=1)
    reading.rows.feed(message(copied((b"1",))) + PADDING)
    with pytest.raises(InvariantError):
        reading.rows.feed(message(copied((b"2",))) + PADDING)


def test_a_row_too_large_for_its_topic_is_a_dead_letter() -> None:
    table = _narrow(25)
    session = Session(position(), {table.relation.relation_id: ()}, limit=20_000)
    reading = Reading(table, session=session)
    reading.batch.plain_bytes = session.batch.plain_bytes
    large = message(copied((b"x" * 50_000,)))
    assert reading.rows.feed(large + PADDING) == len(large)
    [(_, _, pointer)] = reading.waiting()
    event = orjson.loads(pointer)
    assert event["source"]["dead"]["columns"] == ["v"]
    assert event["op"] == "r"
    letters = session.waiting()
    assert {orjson.loads(each.key or b"")["id"] for each in letters} == {"3-100"}


def _narrow(type_id: int = 23) -> Table:
    columns = (RelationColumn(False, "v", type_id, -1),)  # noqa: FBT003 - in no key
    return Table(Relation(16_402, "public", "t", ReplicaIdentity.NOTHING, columns), ())


def test_the_error_of_an_unreadable_row_names_table_column_and_pages() -> None:
    relation = Relation(
        7, "public", "users", ReplicaIdentity.DEFAULT,
        (RelationColumn(True, "id", 23, -1), RelationColumn(False, "name", 25, -1)),  # noqa: FBT003
    )  # fmt: skip
    reading = Reading(Table(relation, ("id",)))
    row = pack(">h", 2) + pack(">i", 1) + b"1" + pack(">i", 8) + b"hunter2\xff"
    with pytest.raises(ProtocolError) as raised:
        reading.rows.feed(b"d" + pack(">i", 4 + len(row)) + row + PADDING)
    error = raised.value
    assert "a row of public.users can't be read: column name (text" in error.what
    assert "in the pages from ctid (0,0) to (1,0)" in error.what
    assert "hunter" not in str(error)
