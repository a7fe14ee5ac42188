"""What was noted of a chain, compared with frontier records."""

from __future__ import annotations

from msgspec.structs import replace

from cdc.events import LSN
from cdc.log import digests
from cdc.log.records import FrontierRecord
from cdc.verify.noted import NotedChain, NotedCheck

LATE = "it is late"


def frontier(seq: int, lsn: int) -> FrontierRecord:
    made = FrontierRecord(
        pipeline="p", epoch=1, lsn=LSN(lsn), seq=seq, committed_at_us=0, partitions=()
    )
    return digests.sealed(made, "")


RECORDS = [frontier(seq, 16 * seq) for seq in (4, 7, 9)]
NOTED = [NotedChain(each.seq, each.lsn, each.chain) for each in RECORDS]


def found(
    records: list[FrontierRecord],
    noted: list[NotedChain],
    *,
    above: int = 0,
    upto: LSN | None = None,
) -> list[str]:
    check = NotedCheck(noted)
    for each in records:
        check.add(each)
    end = NotedChain(records[-1].seq, records[-1].lsn, "")
    return check.finish(above=above, end=end, upto=upto, after_end=LATE)


def test_frontiers_that_were_noted_are_there_with_their_chains() -> None:
    assert not found(RECORDS, NOTED)
    assert not found([*RECORDS, frontier(11, 300)], NOTED)


def test_another_chain_a_missing_frontier_and_a_missing_end_are_named() -> None:
    other = digests.sealed(replace(RECORDS[1], committed_at_us=1), "")
    [what] = found([RECORDS[0], other, RECORDS[2]], NOTED)
    assert what.startswith("the frontier 0/70 (seq 7) has another chain than was noted")
    # Also if the noted one is among others.
    twice = [*NOTED, NotedChain(7, RECORDS[1].lsn, other.chain)]
    assert len(found(RECORDS, twice)) == 1
    [what] = found([RECORDS[0], RECORDS[2]], NOTED)
    assert what == "the frontier 0/70 (seq 7) was noted and is missing"
    [what] = found(RECORDS[:2], NOTED)
    assert what == f"it ends at seq 7, and the frontier 0/90 (seq 9) was noted: {LATE}"


def test_what_retention_deleted_what_is_after_an_lsn_and_an_idle_log_are_left_out() -> None:
    assert not found(RECORDS[1:], NOTED, above=4)
    assert not found(RECORDS[:2], NOTED, upto=RECORDS[1].lsn)
    idle = frontier(9, 400)  # no event more: only the LSN has advanced
    assert not found(RECORDS, [*NOTED, NotedChain(9, idle.lsn, idle.chain)])
