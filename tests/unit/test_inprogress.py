"""Blocks of open transactions: what is spooled for which xid, and which commits are in doubt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cdc.decode.frames import PADDING
from cdc.decode.messages import (
    Delete,
    Insert,
    KeyTuple,
    LogicalMessage,
    Message,
    Origin,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)
from cdc.errors import Policy, ProtocolError, RereadError
from cdc.events import LSN
from cdc.sequence.in_progress import OpenTransactions
from cdc.sequence.spool import Spool
from cdc.sequence.state import Pause
from tests.property.stream import chunk, frame

TOP, SUB, CHILD, SIBLING = 700, 701, 702, 703
ORIGIN = frame(Origin(LSN(0), "elsewhere"))
KEEPALIVE = b"d" + (22).to_bytes(4, "big") + b"k" + bytes(17)
NOTICE = b"N" + (9).to_bytes(4, "big") + b"Mhi\0\0"
STOP = frame(StreamStop())


def row(xid: int, text: bytes = b"a") -> bytes:
    return frame(Insert(1, (b"1", text), xid))


COLUMN = RelationColumn(key=True, name="id", type_id=23, type_modifier=-1)


def described(xid: int, oid: int = 1) -> bytes:
    return frame(Relation(oid, "public", "users", ReplicaIdentity.DEFAULT, (COLUMN,), xid))


def message(xid: int = TOP) -> bytes:
    reported = LogicalMessage(transactional=True, lsn=LSN(0x900), prefix="p", content=b"c", xid=xid)
    return frame(reported)


class Blocks:
    """In-progress transactions over a real spool."""

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self.spool = Spool(folder, memory_bytes=memory_bytes)
        self.open = OpenTransactions(self.spool)

    def block(self, *frames: bytes, xid: int = TOP) -> None:
        """Walk one complete block."""
        self.open.start(StreamStart(xid, first_segment=True))
        complete = chunk(*frames, STOP)
        assert self.open.walk(complete, 0) == (len(complete) - len(PADDING), None)
        assert not self.open.in_block

    def abort(self, subxid: int, xid: int = TOP) -> None:
        self.open.abort(StreamAbort(xid, subxid))

    def commit(self, xid: int = TOP) -> list[bytes]:
        """Return the committed chunks, each without its padding."""
        chunks = list(self.open.commit(StreamCommit(xid, LSN(0x2000), LSN(0x2008), 0)))
        assert all(one.endswith(PADDING) for one in chunks)
        return [one[: -len(PADDING)] for one in chunks]


@pytest.fixture(params=[0, 1 << 20], ids=["on disk", "in memory"])
def blocks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Blocks]:
    it = Blocks(tmp_path / "spools", request.param)
    yield it
    it.spool.close()


# -- what is spooled -------------------------------------------------------------------------------

ALL_KINDS: list[Message] = [
    Origin(LSN(0), "elsewhere"),
    Type(90_001, "public", "mood", TOP),
    Relation(1, "public", "users", ReplicaIdentity.FULL, (), TOP),
    Insert(1, (b"1", None), TOP),
    Update(1, None, (b"1", b"b"), TOP),
    Delete(1, KeyTuple((b"1", None)), TOP),
    Truncate((1, 2), cascade=False, restart_identity=False, xid=TOP),
]


def test_what_was_streamed_comes_back_as_it_came(blocks: Blocks) -> None:
    frames = [frame(each) for each in ALL_KINDS]
    blocks.block(*frames)
    blocks.block(*frames)
    assert b"".join(blocks.commit()) == b"".join(frames * 2)
    assert blocks.spool.open_xids == []


def test_transactions_interleave_and_do_not_mix(blocks: Blocks) -> None:
    for _ in range(3):
        blocks.block(row(TOP, b"x"))
        blocks.block(row(800, b"y"), xid=800)
    blocks.block(row(801, b"y"), xid=800)
    blocks.abort(801, xid=800)
    assert b"".join(blocks.commit()) == row(TOP, b"x") * 3
    assert b"".join(blocks.commit(800)) == row(800, b"y") * 3


def test_a_transaction_of_which_nothing_came_is_empty(blocks: Blocks) -> None:
    assert blocks.commit() == []
    blocks.block()
    assert blocks.commit() == []
    blocks.abort(TOP)


def test_a_block_may_be_cut_at_every_byte(tmp_path: Path) -> None:
    """Bytes read past a chunk's last complete frame are its padding: there must be enough of it."""
    frames = [ORIGIN, described(TOP), row(TOP), row(SUB, b"long" * 9), message(), row(TOP), STOP]
    complete = b"".join(frames)
    for cut in range(len(complete)):
        spool = Spool(tmp_path / "spools")
        it = OpenTransactions(spool)
        it.start(StreamStart(TOP, first_segment=True))
        at, step = it.walk(complete[:cut] + PADDING, 0)
        assert step is Pause.MORE
        assert at in {sum(map(len, frames[:n])) for n in range(len(frames) + 1)}
        rest = complete[at:]
        assert it.walk(rest + PADDING, 0) == (len(rest), None)
        back = b"".join(spool.commit(TOP))
        assert back == complete[: -len(STOP)]
        spool.close()


@pytest.mark.parametrize("other", [KEEPALIVE, NOTICE], ids=["keepalive", "notice"])
def test_what_is_no_frame_is_handed_over_and_not_spooled(blocks: Blocks, other: bytes) -> None:
    blocks.open.start(StreamStart(TOP, first_segment=True))
    complete = chunk(row(TOP), other, row(TOP, b"b"), STOP)
    at, step = blocks.open.walk(complete, 0)
    assert (at, step) == (len(row(TOP)), Pause.OTHER)
    assert blocks.open.in_block
    assert blocks.open.walk(complete, at + len(other)) == (len(complete) - len(PADDING), None)
    assert b"".join(blocks.commit()) == row(TOP) + row(TOP, b"b")


def test_what_follows_a_block_is_not_its_own(blocks: Blocks) -> None:
    blocks.open.start(StreamStart(TOP, first_segment=True))
    complete = chunk(row(TOP), STOP, row(TOP, b"another's"))
    assert blocks.open.walk(complete, 0) == (len(row(TOP)) + len(STOP), None)
    assert b"".join(blocks.commit()) == row(TOP)


# -- what is rolled back ---------------------------------------------------------------------------


def test_an_aborted_subtransaction_takes_its_own_and_its_childrens_rows(blocks: Blocks) -> None:
    blocks.block(described(TOP), row(TOP), row(SUB), row(CHILD), row(SUB, b"more"))
    blocks.block(row(CHILD + 1, b"more"))
    blocks.abort(CHILD + 1)
    blocks.abort(CHILD)
    blocks.abort(SUB)
    blocks.block(row(TOP, b"end"))
    assert b"".join(blocks.commit()) == described(TOP) + row(TOP) + row(TOP, b"end")


def test_an_aborted_transaction_leaves_nothing(blocks: Blocks) -> None:
    blocks.block(described(TOP), row(TOP), row(SUB))
    blocks.abort(TOP)
    assert blocks.spool.open_xids == []
    blocks.block(row(TOP, b"an xid comes again after four billion"))
    assert len(blocks.commit()) == 1


# A message without an xid belongs to the writer before it in the block.
NAMELESS: dict[str, Callable[[], bytes]] = {"an origin": lambda: ORIGIN, "nothing": bytes}


@pytest.mark.parametrize("begins", NAMELESS.values(), ids=NAMELESS)
def test_a_subtransaction_that_spans_blocks_can_still_be_aborted(
    blocks: Blocks, begins: Callable[[], bytes]
) -> None:
    """Each block of a replicated transaction starts with its origin."""
    blocks.block(begins(), described(TOP), row(TOP), row(SUB, b"never"))
    for _ in range(3):
        blocks.block(begins(), row(SUB, b"never"))
    blocks.block(begins(), row(CHILD, b"never"))
    blocks.abort(CHILD)
    blocks.abort(SUB)
    blocks.block(begins(), row(SIBLING, b"never"))
    blocks.abort(SIBLING)
    blocks.block(begins(), row(TOP, b"end"))
    kept = (described(TOP), row(TOP), begins(), begins(), row(TOP, b"end"))
    assert b"".join(blocks.commit()) == begins() + b"".join(kept)


def test_an_origin_after_an_abort_belongs_to_no_subtransaction(blocks: Blocks) -> None:
    blocks.block(ORIGIN, described(TOP), row(TOP), row(SUB))
    blocks.abort(SUB)
    blocks.block(ORIGIN, row(SIBLING))
    blocks.abort(SIBLING)
    blocks.block(ORIGIN, row(TOP, b"end"))
    kept = [ORIGIN, described(TOP), row(TOP), ORIGIN, ORIGIN, row(TOP, b"end")]
    assert b"".join(blocks.commit()) == b"".join(kept)


# -- what is in doubt ------------------------------------------------------------------------------


@pytest.mark.parametrize("aborted", [None, CHILD], ids=["nothing aborted", "its child did"])
def test_a_subtransaction_that_is_still_there_is_in_doubt(
    blocks: Blocks, aborted: int | None
) -> None:
    """Its abort is not always streamed; sent at its commit, the transaction does not include it."""
    blocks.block(described(TOP), row(TOP), row(SUB), row(CHILD))
    if aborted:
        blocks.abort(aborted)
    blocks.block(row(TOP))
    with pytest.raises(RereadError) as raised:
        blocks.commit()
    assert raised.value.policy is Policy.BACKOFF
    assert str(TOP) in raised.value.what


def test_what_one_subtransaction_left_stays_in_doubt_after_a_later_one_aborts(
    blocks: Blocks,
) -> None:
    blocks.block(row(TOP), row(SUB), row(TOP), row(SIBLING))
    blocks.abort(SIBLING)
    blocks.block(row(TOP))
    with pytest.raises(RereadError):
        blocks.commit()


def test_a_table_described_otherwise_since_puts_its_transaction_in_doubt(blocks: Blocks) -> None:
    """Read back, the older description would replace the newer one, which is not sent again."""
    other, oid = 900, 2
    blocks.block(described(TOP), row(TOP))
    blocks.block(described(other, oid), row(other), xid=other)
    renamed = Relation(1, "elsewhere", "users", ReplicaIdentity.DEFAULT, (COLUMN,))
    blocks.open.note_description(renamed)
    with pytest.raises(RereadError):
        blocks.commit()
    assert blocks.commit(other)


def test_a_table_described_alike_puts_nothing_in_doubt(blocks: Blocks) -> None:
    blocks.block(described(TOP), row(TOP))
    for xid in (None, 900):
        blocks.open.note_description(
            Relation(1, "public", "users", ReplicaIdentity.DEFAULT, (COLUMN,), xid)
        )
    assert blocks.commit()


def test_a_logical_message_is_in_doubt(blocks: Blocks) -> None:
    """Its xid is always the top-level transaction's, even if its writer was rolled back."""
    blocks.block(described(TOP), row(TOP), message())
    blocks.block(row(TOP))
    with pytest.raises(RereadError):
        blocks.commit()


def test_what_was_reported_as_rolled_back_leaves_no_doubt(blocks: Blocks) -> None:
    blocks.block(described(TOP), row(TOP), row(SUB))
    blocks.abort(SUB)
    blocks.block(row(TOP), row(SIBLING))
    blocks.block(row(CHILD + 2))
    blocks.abort(CHILD + 2)
    blocks.abort(SIBLING)
    assert b"".join(blocks.commit()) == described(TOP) + row(TOP) * 2


def test_a_description_goes_with_the_subtransaction_that_brought_it(blocks: Blocks) -> None:
    """At an abort Postgres forgets its descriptions, and repeats them before the next row."""
    blocks.block(described(TOP, 2), described(SUB), row(SUB))
    blocks.abort(SUB)
    blocks.block(described(TOP), row(TOP))
    assert b"".join(blocks.commit()) == described(TOP, 2) + described(TOP) + row(TOP)


def test_doubts_end_with_their_transaction(blocks: Blocks) -> None:
    blocks.block(described(SUB), row(SUB), message())
    blocks.abort(TOP)
    blocks.block(row(TOP))
    assert b"".join(blocks.commit()) == row(TOP)


# -- what is refused -------------------------------------------------------------------------------


def test_a_block_inside_a_block_is_refused(blocks: Blocks) -> None:
    blocks.open.start(StreamStart(TOP, first_segment=True))
    with pytest.raises(ProtocolError, match="inside another"):
        blocks.open.start(StreamStart(800, first_segment=True))


@pytest.mark.parametrize(
    "inside",
    [
        frame(StreamStart(800, first_segment=True)),
        frame(StreamCommit(TOP, LSN(1), LSN(2), 0)),
        frame(StreamAbort(TOP, SUB)),
        frame(b"B" + bytes(20)),
        frame(b"?"),
    ],
    ids=["a start", "a commit", "an abort", "a begin", "nothing known"],
)
def test_what_does_not_belong_into_a_block_is_refused(blocks: Blocks, inside: bytes) -> None:
    blocks.open.start(StreamStart(TOP, first_segment=True))
    with pytest.raises(ProtocolError, match="inside a stream block"):
        blocks.open.walk(chunk(row(TOP), inside), 0)
