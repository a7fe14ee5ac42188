"""What the topic monitor finds in topics that have changed, and in those that have not."""

from __future__ import annotations

import dataclasses
import time
from typing import cast

import pytest
from msgspec.structs import replace

from cdc.config import Config, Log, Source
from cdc.errors import CDCError, Exit, FencedError, GapError, Policy
from cdc.events import LSN
from cdc.log import reader, topics
from cdc.log.expected import EpochError, Expected, Retained, same_seq, verify
from cdc.log.offsets import Observed, OffsetSpan
from cdc.log.records import FrontierRecord, ResumePosition
from cdc.log.topic_monitor import TopicMonitor
from tests.property.stream import position
from tests.unit.test_continuity import IDENTITY

USERS = "shop.public.users"
RESUME = "shop.cdc.resume"
EXPECTED = Expected(
    partitions={RESUME: 1, **IDENTITY.partitions},
    topic_ids={USERS: "aXb", RESUME: "r1"},
    ends={(USERS, 0): 40, (USERS, 1): 7},
    retained={(USERS, 0): Retained(20, 0.0)},
)
OBSERVED = Observed(
    topics={USERS: ("aXb", 4), RESUME: ("r1", 1)},
    missing=frozenset(),
    unanswered=frozenset(),
    spans={
        (USERS, 0): OffsetSpan(19, 41, 41),
        (USERS, 1): OffsetSpan(7, 7, 7),
        (USERS, 2): OffsetSpan(0, 0, 0),
    },
)


def findings(**observed: object) -> list[CDCError]:
    return list(verify(EXPECTED, OBSERVED._replace(**observed)))  # type: ignore[arg-type]


def test_topics_as_expected_give_no_finding() -> None:
    """Records that retention may delete may be missing, and markers follow the last record."""
    assert findings() == []


def test_what_was_lost_and_overwritten_is_named() -> None:
    """The partition is longer than before: only the order of acknowledged offsets shows it."""
    regressed = {(USERS, 0): (38, 40), ("shop.public.others", 0): (1, 2)}
    expected = dataclasses.replace(EXPECTED, regressed=regressed)
    (problem,) = verify(expected, OBSERVED)
    assert isinstance(problem, GapError)
    assert f"{USERS}, partition 0, ends at offset 38" in str(problem)
    deleted = OBSERVED._replace(missing=frozenset({USERS}), topics={})
    assert "was deleted" in str(next(verify(expected, deleted)))


def test_a_topic_that_an_older_version_did_not_create_may_be_missing() -> None:
    """Once the topic has existed its deletion is a gap."""
    messages = "shop.cdc.messages"
    missing = OBSERVED._replace(missing=frozenset({messages}))
    optional = dataclasses.replace(EXPECTED, optional=frozenset({messages}))
    assert list(verify(optional, missing)) == []
    existed = dataclasses.replace(optional, topic_ids={**EXPECTED.topic_ids, messages: "m1"})
    (problem,) = verify(existed, missing)
    assert f"topic {messages} was deleted" in str(problem)


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"missing": frozenset({USERS}), "topics": {}}, GapError, (USERS, "was deleted")),
        ({"topics": {USERS: ("cYd", 4)}}, GapError, (USERS, "created again")),
        ({"topics": {RESUME: ("r2", 1)}}, GapError, (RESUME, "created again")),
        (
            {"topics": {USERS: ("aXb", 6)}},
            EpochError,
            (USERS, "6 partitions", "pins 4", "cdc topics acknowledge"),
        ),
        (
            {"spans": {(USERS, 0): OffsetSpan(0, 33, 33)}},
            GapError,
            (f"{USERS}, partition 0, ends at offset 33", "33 to 39 are lost", "unclean"),
        ),
        ({"topics": {USERS: ("aXb", 3)}}, GapError, (USERS, "3 partitions", "created again")),
        (
            {"spans": {(USERS, 0): OffsetSpan(20, 41, 41)}},
            EpochError,
            (
                f"{USERS}, partition 0, begins at offset 20: events from offset 19 on",
                "cdc topics acknowledge",
            ),
        ),
    ],
    ids=["deleted", "recreated", "own-recreated", "widened", "truncated", "narrowed", "emptied"],
)
def test_each_changed_topic_halts_with_a_remedy(
    changed: dict[str, object], kind: type[CDCError], words: tuple[str, ...]
) -> None:
    (problem,) = findings(**changed)
    assert isinstance(problem, kind)
    assert (problem.policy, problem.exit_code) == (Policy.HALT, Exit.CONFIG)
    for word in words:
        assert word in str(problem)


FRONTIER = FrontierRecord(
    pipeline="shop", epoch=1, lsn=LSN(0x4000), seq=10, committed_at_us=0, partitions=()
)
POSITION = replace(position(end_lsn=0x5000), seq=13, pending=((USERS, 0, 2), (USERS, 1, 1)))


def test_a_frontier_and_a_resume_record_with_the_same_count_agree() -> None:
    same_seq("shop", FRONTIER, POSITION)


@pytest.mark.parametrize(
    ("frontier", "lost"),
    [
        (replace(FRONTIER, seq=9), "shop.cdc.frontier"),
        (replace(FRONTIER, seq=11), "shop.cdc.resume"),
        (replace(FRONTIER, lsn=LSN(0x6000)), "shop.cdc.resume"),
    ],
)
def test_the_record_that_counts_less_has_lost_records(frontier: FrontierRecord, lost: str) -> None:
    with pytest.raises(GapError, match=f"topic {lost} has lost its newest records"):
        same_seq("shop", frontier, POSITION)


@pytest.mark.parametrize(
    ("now", "kind"),
    [(POSITION, GapError), (replace(POSITION, seq=POSITION.seq + 9), FencedError)],
    ids=["no writer", "another writer"],
)
def test_a_frontier_that_another_daemon_wrote_meanwhile_is_no_loss(
    monkeypatch: pytest.MonkeyPatch, now: ResumePosition, kind: type[CDCError]
) -> None:
    """The frontiers are read after the resume record, and another daemon may have written more."""
    newer = replace(FRONTIER, seq=POSITION.seq + 5)
    monkeypatch.setattr(reader, "read_frontier_tail", lambda *_: [(newer, time.monotonic())])
    monkeypatch.setattr(reader, "read_last_resume", lambda _: (IDENTITY, now))
    log = Log(bootstrap_servers="localhost:1")
    config = Config(pipeline="shop", source=Source(dsn="postgresql://a@b/c"), log=log)
    monitor = TopicMonitor(config, cast("topics.Admin", None))
    with pytest.raises(kind):
        monitor.start(IDENTITY, POSITION)
