"""When a frontier is due, and what it contains."""

from __future__ import annotations

from hashlib import sha256

import pytest
from blake3 import blake3
from msgspec.structs import replace

from cdc.events import LSN
from cdc.log import digests
from cdc.log.frontiers import FrontierCounts
from cdc.log.partitions import Partition
from cdc.log.reader import SchemaTopic
from cdc.log.records import BLAKE3_FORMAT, DIGESTS_FORMAT, SHA256_FORMAT
from cdc.verify.digests import PartitionCheck
from cdc.verify.schemas import SchemaCheck
from tests.property.stream import position

USERS = ("p.public.users", 0)
ORDERS = ("p.public.orders", 3)


def batch(events: dict[Partition, int]) -> tuple[dict[Partition, int], dict[Partition, bytes]]:
    """Return a batch's events, and the digests of its partitions."""
    return events, {place: sha256(repr(place).encode()).digest() for place in events}


def at(lsn: int, seq: int, *, is_open: bool = False) -> FrontierCounts:
    """Return frontiers after one committed batch: three events of users, one of orders."""
    frontiers = FrontierCounts("p", 2, position(), {})
    frontiers.add(*batch({USERS: 3, ORDERS: 1}), seq)
    frontiers.acknowledged(position(end_lsn=lsn, seq=seq, is_open=is_open), {USERS: 17, ORDERS: 5})
    return frontiers


def test_a_frontier_lists_ends_and_counts_in_a_fixed_order() -> None:
    record = at(0x200, 4).take()
    assert record is not None
    assert (record.pipeline, record.epoch, record.lsn, record.seq) == ("p", 2, LSN(0x200), 4)
    assert record.partitions == ((*ORDERS, 5, 1), (*USERS, 17, 3))


def test_nothing_is_due_when_nothing_moved() -> None:
    frontiers = FrontierCounts("p", 1, position(), {})
    assert not frontiers.due
    assert frontiers.take() is None
    moved = at(0x200, 4)
    due = [moved.due, moved.take() is not None, moved.due, moved.take() is not None]
    assert due == [True, True, False, False]


def test_no_frontier_inside_a_transaction() -> None:
    frontiers = at(0x200, 4, is_open=True)
    assert not frontiers.due
    assert frontiers.take() is None
    assert frontiers.take(LSN(0x900)) is None


def test_events_wait_for_the_frontier_after_the_transactions_end() -> None:
    frontiers = at(0x200, 4, is_open=True)
    assert frontiers.add(*batch({USERS: 2}), 6).pending == ((*ORDERS, 1), (*USERS, 5))
    frontiers.acknowledged(position(end_lsn=0x300, seq=6), {USERS: 20})
    record = frontiers.take()
    assert record is not None
    assert record.partitions == ((*ORDERS, 5, 1), (*USERS, 20, 5))


def test_an_unknown_end_postpones_the_frontier() -> None:
    frontiers = FrontierCounts("p", 1, position(), {})
    frontiers.add(*batch({USERS: 1}), 1)
    frontiers.acknowledged(position(end_lsn=0x200, seq=1), {USERS: -1})
    assert not frontiers.due
    assert frontiers.take(LSN(0x900)) is None
    frontiers.add(*batch({USERS: 1}), 2)
    frontiers.acknowledged(position(end_lsn=0x300, seq=2), {USERS: 4})
    record = frontiers.take()
    assert record is not None
    assert record.partitions == ((*USERS, 4, 2),)


def test_an_end_below_what_was_acknowledged_before_is_a_loss() -> None:
    frontiers = at(0x200, 4)
    assert not frontiers.regressed
    frontiers.add(*batch({USERS: 2}), 6)
    # Two more records, and yet it ends at the same offset.
    frontiers.acknowledged(position(end_lsn=0x300, seq=6), {USERS: 17})
    assert frontiers.regressed == {USERS: (17, 18)}


def test_a_loss_that_was_outgrown_shows_by_the_count() -> None:
    complete = at(0x200, 4)
    complete.take()
    complete.add(*batch({ORDERS: 3}), 7)
    complete.acknowledged(position(end_lsn=0x300, seq=7), {ORDERS: 7})
    assert not complete.regressed, "it ends beyond where it ended"
    assert complete.take() is not None
    assert complete.regressed == {ORDERS: (7, 8)}


def test_an_idle_pipelines_frontier_moves_on_without_events() -> None:
    record = FrontierCounts("p", 1, position(end_lsn=0x200, seq=4), {}).take(LSN(0x900))
    assert record is not None
    assert (record.lsn, record.seq, record.partitions) == (LSN(0x900), 4, ())


def test_a_restart_takes_up_what_no_frontier_covers() -> None:
    resume = position(end_lsn=0x200, seq=4, pending=((*USERS, 3),))
    frontiers = FrontierCounts("p", 1, resume, {USERS: 18})
    record = frontiers.take()
    assert record is not None
    assert (record.lsn, record.seq, record.partitions) == (LSN(0x200), 4, ((*USERS, 18, 3),))
    assert frontiers.add({}, {}, 4).pending == ()


@pytest.mark.parametrize("format_", [1, SHA256_FORMAT])
def test_what_an_older_version_left_pending_has_no_digest_and_the_next_frontier_has(
    format_: int,
) -> None:
    resume = position(end_lsn=0x200, seq=4, pending=((*USERS, 3),))
    if format_ == SHA256_FORMAT:  # its digest is one of another hash
        hashed = (digests.encoded(digests.START),)
        resume = replace(resume, format=format_, chunks=(3,), digests=hashed)
    frontiers = FrontierCounts("p", 1, resume, {USERS: 18})
    assert frontiers.add(*batch({ORDERS: 1}), 5).digests is None
    frontiers.acknowledged(position(end_lsn=0x300, seq=5), {ORDERS: 6})
    without = frontiers.take()
    assert without is not None
    assert (without.digests, without.chunks) == (None, ())
    pending = frontiers.add(*batch({USERS: 2}), 7)
    assert (pending.chunks, pending.chain) == ((2,), without.chain)
    frontiers.acknowledged(position(end_lsn=0x400, seq=7), {USERS: 21})
    following = frontiers.take()
    assert following is not None
    assert (following.chunks, following.previous) == ((2,), without.chain)
    assert following.digests is not None


def test_records_are_checked_by_the_hash_of_their_frontiers_format() -> None:
    keys, values = [b"1", None], [b'{"source":{"seq":1}}', None]
    text = b'\x82\xa3key\xc4\x011\xa5value\xc4\x14{"source":{"seq":1}}\x82\xa3key\xc0\xa5value\xc0'
    known = {SHA256_FORMAT: sha256(text).digest(), DIGESTS_FORMAT: blake3(text).digest()}
    for format_, chunk in known.items():
        stated = digests.encoded(digests.fold(digests.START, chunk))
        taken = at(0x200, 4).take()
        assert taken is not None
        record = replace(
            taken, format=format_, partitions=((*USERS, 2, 1),), chunks=(4,), digests=(stated,)
        )
        for other in known:
            check = PartitionCheck(replace(record, format=other), 0)
            check.add(keys, values)
            assert (check.finish() is None) == (other == format_)


def test_a_restart_continues_the_chain_and_the_digests_from_the_resume_record() -> None:
    frontiers = FrontierCounts("p", 1, position(), {})
    frontiers.add(*batch({USERS: 3}), 3)
    frontiers.acknowledged(position(end_lsn=0x200, seq=3), {USERS: 3})
    first = frontiers.take()
    frontiers.add(*batch({USERS: 1}), 4)
    pending = frontiers.add(*batch({USERS: 2, ORDERS: 2}), 8)
    resumed = replace(position(end_lsn=0x300, seq=8), **pending._asdict())
    ends = {USERS: 9, ORDERS: 2}
    frontiers.acknowledged(resumed, ends)
    assert FrontierCounts("p", 1, resumed, ends).take() == frontiers.take()
    assert first is not None
    assert resumed.chain == first.chain == digests.chain(first)


def test_a_frontier_states_what_was_written_to_the_schema_topic_since_the_one_before() -> None:
    """After a crash too; of what others have written only column numbers, once it is new."""
    version, numbers = b'{"schema_id":1}', b'{"columns":{"relation_id":9,"lsn":"0/1"}}'
    there = SchemaTopic("schema", [(5, version, b"forged"), (6, numbers, b"n")], 7)
    frontiers = at(0x200, 4)
    frontiers.state(version, b"v")
    pending = frontiers.add(*batch({}), 4)
    assert pending.schemas == (digests.stated(version, b"v"),)
    resume = replace(position(end_lsn=0x200, seq=4), **pending._asdict())
    resumed = FrontierCounts("p", 2, resume, {USERS: 17, ORDERS: 5})
    resumed.state_found(there)
    record = resumed.take()
    assert record is not None
    assert record.schemas == (digests.stated(version, b"v"), digests.stated(numbers, b"n"))
    after = resumed.add(*batch({}), 4)
    assert (after.schemas, after.schemas_end) == ((), 7)
    # An older version has stated nothing: then all that is there is.
    first = FrontierCounts("p", 2, replace(resume, format=BLAKE3_FORMAT, schemas=()), {})
    first.state_found(there)
    stated = first.add(*batch({}), 4).schemas
    assert stated == (digests.stated(version, b"forged"), digests.stated(numbers, b"n"))


def test_a_schema_topic_is_compared_with_what_frontiers_state() -> None:
    keys = [b'{"schema_id":%d}' % number for number in (1, 2)]
    numbers = b'{"columns":{"relation_id":9,"lsn":"0/1"}}'

    def found(*held: tuple[bytes, bytes], all_stated: bool = True) -> list[str]:
        check = SchemaCheck("t")
        check.state([digests.stated(key, b"v") for key in keys], "the frontier 0/9")
        for offset, each in enumerate(held):
            check.add(offset, *each)
        return check.finish(all_stated=all_stated)

    sound = [(key, b"v") for key in keys]
    assert not found(*sound, (numbers, b"unstated"))
    lacks = "as the frontier 0/9 states it: it was altered or deleted"
    assert found(sound[0]) == [f't [0] lacks the record {{"schema_id":2}} {lacks}']
    other = "no frontier states this record"
    assert found(sound[0], (keys[1], b"w")) == [
        f't [0] lacks the record {{"schema_id":2}} {lacks}',
        f't [0] offset 1: {other} {{"schema_id":2}}',
    ]
    assert found(*sound, (keys[0], b"w")) == [f't [0] offset 2: {other} {{"schema_id":1}}']
    added = *sound, (b'{"schema_id":3}', b"v")
    assert found(*added) == [f't [0] offset 2: {other} {{"schema_id":3}}']
    assert not found(*added, all_stated=False)
