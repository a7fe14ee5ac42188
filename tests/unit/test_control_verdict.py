"""No stalled state is reported as healthy: each state by name, and a property over all."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.config import Config
from cdc.config.followers import Follower
from cdc.config.snapshot import Snapshot
from cdc.errors import Exit
from cdc.events import LSN
from cdc.log.completeness import IncompleteTopic
from cdc.log.frontier_tail import Unapplied
from cdc.log.group_records import WebhookReport
from cdc.log.group_states import GroupState
from cdc.log.partitions import OffsetRange
from cdc.operate.findings import Cause, Level
from cdc.operate.followers import (
    LATE_SECONDS,
    STALLED_SECONDS,
    STILL_SECONDS,
    FollowerStatus,
)
from cdc.operate.monitor import Unread
from cdc.operate.verdict import DaemonReport, PipelineFacts, Verdict, verdict
from cdc.operate.webhooks import WebhookStatus
from cdc.snapshot.incremental.records import IncrementalRecord
from cdc.source.slots import Slot
from tests.fixtures.reported import reported
from tests.unit.test_control_doctor import CONFIG as PLAIN

_FOLLOWERS = msgspec.convert(
    {"cache": {"redis": {"url": "redis://localhost"}}}, dict[str, Follower]
)
CONFIG: Config = msgspec.structs.replace(PLAIN, followers=_FOLLOWERS)
DAY = 86_400.0
STREAMING = DaemonReport("streaming", ready=True, reason="streaming")
SLOT = Slot(
    name="s", plugin="pgoutput", database="d", active_pid=7, restart_lsn=LSN(1),
    confirmed_flush_lsn=LSN(5), wal_status="reserved", safe_wal_bytes=None,
    invalidation_reason=None, two_phase=False, retained_bytes=1,
)  # fmt: skip
_COMPACTED = STREAMING._replace(wrong_policies=(("x.public.t", "compact"),))
_HELD = STREAMING._replace(compaction_held=("cache",))
COPYING = DaemonReport("snapshotting", ready=True, reason="40 %, 4 rows")


def now_us() -> int:
    return time.time_ns() // 1_000


def ago(seconds: float) -> int:
    return int((time.time() - seconds) * 1e6)


def follower(
    lag: float | None = None,
    reached: float | None = None,
    **given: Any,  # noqa: ANN401
) -> FollowerStatus:
    """Return a follower that reports now that it follows and has just moved."""
    fields: dict[str, Any] = {
        "began_at_us": ago(DAY),
        "moved_at_us": ago(0),
        "canary_at_us": ago(1),
    } | given
    since = None if lag is None else ago(lag)
    at_us = None if reached is None else ago(reached)
    return FollowerStatus("cache", reported(**fields), None, Unapplied(since), at_us)


def live(state: str = "running", **given: Any) -> IncrementalRecord:  # noqa: ANN401
    fields: dict[str, Any] = {
        "pipeline": "p",
        "id": "a1",
        "schema": "public",
        "table": "t",
        "at_us": now_us(),
    }
    return msgspec.convert({**fields, "state": state, **given}, IncrementalRecord)


def facts(**given: Any) -> PipelineFacts:  # noqa: ANN401
    """Return the facts of a healthy pipeline, with some of them changed."""
    well: dict[str, Any] = {
        "resume_lsn": LSN(5), "resume_age_seconds": 1.0, "lag_bytes": 0, "slot": SLOT,
        "daemon": STREAMING, "followers": (follower(),), "now_us": now_us(),
    }  # fmt: skip
    return PipelineFacts(**(well | given))


def judged(**given: Any) -> Verdict:  # noqa: ANN401
    return verdict(CONFIG, facts(**given))


def test_what_advances_is_ok() -> None:
    found = judged()
    assert found == Verdict(Level.OK, "every store lags the log by at most 1 s")
    assert found.exit_code == Exit.OK
    assert found.fields() == {"level": "ok", "sentence": found.sentence, "causes": []}
    # A short lag, and snapshots that are paused, over or have just failed, are not reported.
    quiet = (live("paused"), live("done"), live("stopped"), live(failing_since_us=now_us()))
    assert judged(followers=(follower(lag=5.0),), incremental_snapshots=quiet).level is Level.OK
    assert judged(webhooks=(hook(), hook(lag=3, since=5.0))).level is Level.OK


def test_what_is_ok_says_by_how_much_the_slowest_lags() -> None:
    slow, hooks = (follower(lag=1.5), follower(lag=4.3)), (hook(lag=3, since=7.5),)
    measured = STREAMING._replace(lag_seconds=0.4)

    def sentence(**given: Any) -> str:  # noqa: ANN401
        found = judged(**given)
        assert found.level is Level.OK
        return found.sentence

    assert sentence(followers=slow) == "every store lags the log by at most 5 s"
    # With the log's own lag.
    assert sentence(followers=slow, daemon=measured) == "every store lags by at most 5 s"
    late = STREAMING._replace(lag_seconds=2.0)
    assert sentence(followers=slow, daemon=late) == "every store lags by at most 7 s"
    both = sentence(followers=slow, webhooks=hooks, daemon=measured)
    assert both == "every store and webhook lags by at most 8 s"
    assert sentence(followers=(), daemon=measured) == "the log lags by at most 1 s"
    assert sentence(followers=(), daemon=None) == "the log keeps up"
    config = msgspec.structs.replace(
        CONFIG,
        followers={"cache": msgspec.structs.replace(_FOLLOWERS["cache"], every_seconds=3_600)},
    )
    hourly = verdict(config, facts(followers=(follower(lag=1_801.0, reached=1_801.0),)))
    assert hourly.sentence == "every store lags the log by at most 31 min"


def test_what_is_not_ok_says_since_when() -> None:
    at = time.time() - 70
    since = time.strftime("%H:%M UTC", time.gmtime(at))
    found = judged(followers=(follower(lag=70.0, reached=70.0),))
    assert "s, and the log has held for 70 s what it lacks, since " in found.sentence
    assert since in found.sentence or time.gmtime(at)[:3] != time.gmtime()[:3]
    [cause] = found.fields()["causes"]
    assert found.sentence.endswith(cause["since"])
    old = judged(followers=(follower(lag=3 * DAY, reached=3 * DAY),)).sentence
    assert old.endswith(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time.time() - 3 * DAY)))
    # A store that refuses: how late it is, why, and since when.
    refused = follower(lag=40.0, state="waiting", what="OpenSearch: 429", moved_at_us=ago(40))
    says = judged(followers=(refused, follower(lag=99.0))).sentence
    assert "cache is waiting and lags by 40 s: OpenSearch: 429, since " in says
    assert says.endswith("UTC, and 1 more")
    assert ", since" not in judged(followers=(FollowerStatus("cache", None, None, None),)).sentence


_LOST = SLOT._replace(wal_status="lost")
_ALMOST = SLOT._replace(wal_status="unreserved")
_UNREAD = SLOT._replace(active_pid=None, inactive_seconds=90.0)
_RENAMED = IncompleteTopic(
    "public.t", "shop.public.t", LSN(2), "renamed", "cdc snapshot public.t --replace", captured=True
)
_REFUSED = DaemonReport("reconnecting", ready=False, reason="wrong password")
State = tuple[dict[str, Any], Level, str, int]


def states() -> dict[str, State]:
    """Return each state by name, as of now: what is changed, level, words, exit code."""
    return (
        states_of_the_log() | states_of_snapshots() | states_of_followers() | states_of_webhooks()
    )


def states_of_the_log() -> dict[str, State]:
    """Return the states of setup, slot, daemon and initial snapshot."""
    return {
        "not set up": ({"resume_lsn": None, "slot": None}, Level.FAILED, "not set up", 78),
        "the log is lost": ({"resume_lsn": None}, Level.FAILED, "no resume record", 78),
        "the slot is missing": ({"slot": None}, Level.FAILED, "is missing", 78),
        "the slot is lost": ({"slot": _LOST}, Level.FAILED, "is lost", 78),
        "a gap": ({"resume_lsn": LSN(3)}, Level.FAILED, "a gap", 78),
        "almost lost": ({"slot": _ALMOST}, Level.FAILED, "about to be lost", 1),
        "nobody reads": ({"slot": _UNREAD, "daemon": None}, Level.FAILED, "no daemon reads", 1),
        "a daemon that hangs": (
            {"daemon": None, "resume_age_seconds": 61.0, "lag_bytes": 1},
            Level.FAILED, "has written nothing for 61 s", 1,
        ),
        "not ready": (
            {
                "daemon": DaemonReport(
                    "streaming", ready=False, reason="Kafka has not taken a batch"
                ),
            },
            Level.FAILED, "the daemon is streaming: Kafka has not", 1,
        ),
        "refused": ({"daemon": _REFUSED, "slot": _UNREAD}, Level.FAILED, "ing: wrong password", 1),
        "halted": (
            {"daemon": DaemonReport("halted", ready=False, reason="a gap")},
            Level.FAILED, "is halted", 1,
        ),
        "started over just now": (
            {"daemon": STREAMING._replace(failures=1, failing_seconds=3.0, error="away")},
            Level.DEGRADED, "has started over 1 times", 0,
        ),
        "starts over at the same place for ever": (
            {"daemon": STREAMING._replace(failures=9, failing_seconds=61.0, error="queue full")},
            Level.FAILED, "without publishing anything: queue full", 1,
        ),
        "the source warns": (
            {"daemon": STREAMING._replace(warnings=("WAL is kept",))}, Level.DEGRADED, "WAL is", 0,
        ),
        "a server does not answer": (
            {"unanswered": (Cause(Level.FAILED, "server", "no broker", "start it", None, 69),)},
            Level.FAILED, "no broker", 69,
        ),
        "a due snapshot was skipped": (
            {"initial_stage": "due"},
            Level.FAILED, "is due: it was skipped", 1,
        ),
        "a snapshot that nobody began": (
            {"initial_stage": None}, Level.FAILED, "it was skipped", 1,
        ),
        "a due snapshot and no daemon": (
            {"initial_stage": "due", "daemon": None, "slot": _UNREAD},
            Level.FAILED, "no daemon reads", 1,
        ),
        "a snapshot that is taken": (
            {
                "initial_stage": "running",
                "daemon": COPYING, "slot": _UNREAD,
            },
            Level.DEGRADED, "the initial snapshot is being taken", 0,
        ),
        "a snapshot that stalls": (
            {
                "initial_stage": "running",
                "daemon": COPYING._replace(ready=False),
            },
            Level.FAILED, "the daemon is snapshotting", 1,
        ),
    }  # fmt: skip


def states_of_snapshots() -> dict[str, State]:
    """Return the states of topics and of incremental snapshots."""
    return {
        "Kafka compacts a topic": (
            {"daemon": _COMPACTED}, Level.FAILED, "cleanup.policy is compact for x.public.t", 1,
        ),
        "nothing is compacted": (
            {"daemon": _HELD}, Level.DEGRADED, "while these lag: cache", 0,
        ),
        "an incremental snapshot in its first errors": (
            {"incremental_snapshots": (live(errors=2, failing_since_us=ago(5), why="no rights"),)},
            Level.DEGRADED, "(2 errors in a row): no rights", 0,
        ),
        "an incremental snapshot that loops on an error": (
            {"incremental_snapshots": (live(errors=7, failing_since_us=ago(61), why="no rights"),)},
            Level.FAILED, "(7 errors in a row): no rights", 1,
        ),
        "an incremental snapshot that waits for a transaction": (
            {"incremental_snapshots": (live(failing_since_us=ago(30), why="waits for 7"),)},
            Level.DEGRADED, "has read nothing for 30 s: waits for 7", 0,
        ),
        "a paused snapshot that has emptied its topic": (
            {"incremental_snapshots": (live("paused", emptied_under=3, rows=1_200),)},
            Level.DEGRADED, "is paused, and the topic has 1,200 of the table's rows so far", 0,
        ),
        "an incremental snapshot that failed": (
            {"incremental_snapshots": (live("failed", why="no key", at_us=ago(DAY)),)},
            Level.FAILED, "has failed: no key", 1,
        ),
        "a topic that lacks what changed under another name": (
            {"incomplete_topics": (_RENAMED,)},
            Level.FAILED, "the topic of public.t is incomplete since LSN 0/2: renamed", 1,
        ),
        "a topic that is read again": (
            {"incomplete_topics": (_RENAMED,), "incremental_snapshots": (live(emptied_under=3),)},
            Level.DEGRADED, "the topic of public.t is incomplete", 0,
        ),
    }  # fmt: skip


def states_of_followers() -> dict[str, State]:
    return {
        "a follower halts": (
            {"followers": (follower(state="halted", what="a gap"),)},
            Level.FAILED, "cache has halted: a gap", 78,
        ),
        "a follower never ran": (
            {"followers": (FollowerStatus("cache", None, None, None),)},
            Level.FAILED, "cache has never run", 1,
        ),
        "a follower reports no more": (
            {"followers": (follower(at_us=ago(30)),)}, Level.FAILED, "cache is not running", 1,
        ),
        "a follower that follows in words only": (
            {"followers": (follower(lag=900.0, reached=900.0),)},
            Level.FAILED, "cache has applied nothing for 15 min", 1,
        ),
        "a follower whose frontier has not moved for some seconds": (
            {"followers": (follower(lag=17.0, reached=17.0, batches=9),)},
            Level.DEGRADED, "cache has applied nothing for 17 s, and the log has more", 0,
        ),
        "a follower whose first batch takes some seconds": (
            {"followers": (follower(lag=17.0, reached=17.0, began_at_us=ago(17)),)},
            Level.DEGRADED, "cache has applied nothing since its job started", 0,
        ),
        "a follower that starts": (
            {"followers": (follower(lag=3.0, state="starting", began_at_us=ago(2)),)},
            Level.DEGRADED, "cache is starting, and the log has more for it", 0,
        ),
        "a follower whose frontier has not moved for a minute": (
            {"followers": (follower(lag=70.0, reached=70.0),)},
            Level.DEGRADED, "cache has applied nothing for 70 s", 0,
        ),
        "a follower that is late and moves": (
            {"followers": (follower(lag=900.0, reached=1.0),)},
            Level.DEGRADED, "cache lags: the log has held for 15 min", 0,
        ),
        "a job that starts again and again": (
            {"followers": (follower(lag=900.0, reached=900.0, began_at_us=ago(5)),)},
            Level.DEGRADED, "its job has just started", 0,
        ),
        "a log that retention has shortened": (
            {"followers": (follower()._replace(unapplied=Unapplied(None, forgotten=True)),)},
            Level.FAILED, "the log no longer holds", 78,
        ),
    }  # fmt: skip


def hook(
    members: int = 1,
    lag: int = 0,
    since: float | None = None,
    gap: str = "",
    undelivered: int = 0,
    **given: Any,  # noqa: ANN401
) -> WebhookStatus:
    """Return a webhook that has just delivered everything, with some of that changed."""
    group = GroupState(
        "webhook.billing", members, {("t", 0): 5}, {("t", 0): OffsetRange(0, 5 + lag)}, gap
    )
    fields: dict[str, Any] = {
        "pipeline": "shop", "webhook": "billing", "owner": "here:1", "state": "delivering",
        "since_us": ago(0), "moved_at_us": ago(0), "at_us": ago(0),
    } | given  # fmt: skip
    report = WebhookReport(**fields)
    since_us = None if since is None else ago(since)
    return WebhookStatus("billing", group, undelivered, (report,), since_us)


def with_idle(status: WebhookStatus) -> WebhookStatus:
    """Return the webhook with another process, which has nothing to deliver."""
    [idle] = hook().reports
    return status._replace(reports=(idle, *status.reports))


def states_of_webhooks() -> dict[str, State]:
    """Return the states of webhooks."""
    found: dict[str, tuple[WebhookStatus, Level, str, int]] = {
        "a webhook that never ran": (
            WebhookStatus("billing", None), Level.FAILED, "billing has never run", 1,
        ),
        "a webhook that does not run": (
            hook(members=0, lag=7, since=5.0, at_us=ago(60)),
            Level.FAILED, "billing does not run, 7 offsets are not acknowledged", 1,
        ),
        "a webhook that halted": (
            hook(members=0, state="halted", what="its receiver answers 410", hint="remove it"),
            Level.FAILED, "billing has halted: its receiver answers 410", 78,
        ),
        "a webhook with a gap": (
            hook(gap="retention has deleted 5 to 9"),
            Level.FAILED, "billing cannot go on: retention has deleted 5 to 9", 78,
        ),
        "a webhook whose member does not report yet": (
            hook()._replace(reports=()), Level.DEGRADED, "has 1 members, and none reports", 0,
        ),
        "a webhook whose members never reported, and deliver nothing": (
            hook(lag=3, since=200.0)._replace(reports=()),
            Level.FAILED, "has 1 members, and none reports", 1,
        ),
        "a webhook whose member hangs": (
            hook(at_us=ago(200)), Level.FAILED, "has 1 members, and none reports", 1,
        ),
        "a receiver that went away": (
            hook(lag=3, since=9.0, state="away", since_us=ago(9), what="HTTP 503"),
            Level.DEGRADED, "the receiver of the webhook billing is away: HTTP 503", 0,
        ),
        "a receiver that stays away": (
            hook(lag=3, since=200.0, state="away", since_us=ago(200), what="HTTP 503"),
            Level.FAILED, "is away: HTTP 503", 1,
        ),
        "a key that is refused": (
            hook(lag=3, since=200.0, failing=1, what="HTTP 400"),
            Level.DEGRADED, "refuses 1 keys: HTTP 400", 0,
        ),
        "nothing but a key that is refused": (
            hook(lag=3, since=300.0, failing=1, what="HTTP 400", moved_at_us=ago(200)),
            Level.FAILED, "refuses 1 keys: HTTP 400", 1,
        ),
        "undelivered events": (
            hook(undelivered=2), Level.FAILED, "billing has given up 2 events", 1,
        ),
        "a webhook that has delivered nothing for some seconds": (
            hook(lag=3, since=17.0, moved_at_us=ago(17)),
            Level.DEGRADED, "the webhook billing lags: the log has held for 17 s", 0,
        ),
        "a webhook that is late and moves": (
            hook(lag=3, since=70.0), Level.DEGRADED, "billing lags: the log has held for 70 s", 0,
        ),
        "a webhook with a stuck process, and one that has nothing to deliver": (
            with_idle(hook(lag=3, since=900.0, held=3, failing=1, moved_at_us=ago(900))),
            Level.FAILED, "refuses 1 keys", 1,
        ),
        "a webhook that delivers in words only": (
            hook(lag=3, since=900.0, moved_at_us=ago(900)),
            Level.FAILED, "billing has delivered nothing for 15 min", 1,
        ),
    }  # fmt: skip
    return {
        name: ({"webhooks": (status,)}, level, says, code)
        for name, (status, level, says, code) in found.items()
    }


@pytest.mark.parametrize("name", states())
def test_a_state_that_does_not_advance_is_not_ok(name: str) -> None:
    given, level, says, code = states()[name]
    found = judged(**given)
    assert (found.level, found.exit_code) == (level, code), found
    assert says in found.sentence
    assert found.sentence.startswith(f"{level.value}: ")
    assert all(each.remedy or each.subject for each in found.causes)


def test_a_failed_snapshot_is_over_when_its_table_was_read_since() -> None:
    failed = live("failed", at_us=ago(DAY))
    again = live("done", id="b2", began_at_us=ago(DAY / 2))
    assert judged(incremental_snapshots=(failed, again)).level is Level.OK
    for other in ({"table": "u"}, {"began_at_us": ago(2 * DAY)}, {"keys": True}, {"where": "x"}):
        changed = msgspec.structs.replace(again, **other)
        assert judged(incremental_snapshots=(failed, changed)).level is Level.FAILED


def test_only_a_snapshot_that_replaces_an_incomplete_topic_repairs_it() -> None:
    for snapshot in live(), live(table="u", anew=True), live("done", emptied_under=1):
        found = judged(incomplete_topics=(_RENAMED,), incremental_snapshots=(snapshot,))
        assert [each.remedy for each in found.causes] == [_RENAMED.remedy]
    about_to = judged(incomplete_topics=(_RENAMED,), incremental_snapshots=(live(anew=True),))
    assert about_to.level is Level.DEGRADED
    paused = live("paused", emptied_under=3)
    assert judged(incomplete_topics=(_RENAMED,), incremental_snapshots=(paused,)).exit_code != 0
    # Nothing changes a topic whose name no captured table has.
    unused = _RENAMED._replace(captured=False)
    assert judged(incomplete_topics=(unused,)).level is Level.OK


def test_many_incomplete_topics_are_one_cause() -> None:
    """As after a schema was renamed."""
    topics = tuple(_RENAMED._replace(name=f"public.t{number}") for number in range(3_000))
    [cause] = judged(incomplete_topics=topics).causes
    assert cause.what.startswith("the topics of 3000 tables are incomplete: public.t0, ")
    assert len(cause.what) < 300
    few = judged(incomplete_topics=topics[:2])
    assert [each.subject for each in few.causes] == ["public.t0", "public.t1"]


def test_a_group_that_holds_compaction_is_named_with_the_command_that_removes_it() -> None:
    held = ("cache", "group billing")
    [cause] = judged(daemon=STREAMING._replace(compaction_held=held)).causes
    assert "while these lag: cache" in cause.what
    assert "group billing" in cause.what
    assert "`cdc group remove billing`" in cause.remedy


def test_reports_that_the_daemon_cannot_read_are_not_taken_for_good_ones() -> None:
    """As without a right on the group: webhooks would be shown as they were, or not at all."""

    def found(seconds: float) -> Verdict:
        unread = Unread("webhooks", "GROUP_AUTHORIZATION_FAILED", "see the rights", seconds)
        return judged(daemon=STREAMING._replace(unread=(unread,)))

    assert found(5.0).level is Level.OK
    assert found(20.0).level is Level.DEGRADED
    assert found(200.0).level is Level.FAILED
    [cause] = found(20.0).causes
    assert cause.what == "what the webhooks deliver is not known: GROUP_AUTHORIZATION_FAILED"
    assert cause.remedy == "see the rights"


def test_a_standbys_report_says_nothing_of_the_daemon_that_holds_the_slot() -> None:
    standby = DaemonReport("standby", ready=True, reason="another daemon has the slot")
    held = {"daemon": standby, "slot": SLOT, "lag_bytes": 9_000}
    assert judged(**held, resume_age_seconds=5.0).level is Level.OK
    [cause] = judged(**held, resume_age_seconds=90.0).causes
    assert "a daemon holds the slot, but has written nothing for 90 s" in cause.what


def test_the_worst_cause_is_first_and_the_others_are_counted() -> None:
    found = judged(
        daemon=STREAMING._replace(warnings=("late", "late")),
        followers=(FollowerStatus("cache", None, None, None),),
    )
    assert [each.level for each in found.causes] == [Level.FAILED, Level.DEGRADED]
    assert found.sentence == "failed: cache has never run, and 1 more"
    fields = found.fields()
    assert fields["causes"][0]["level"] == "failed"
    assert fields["causes"][0]["subject"] == "cache"


_SECONDS = st.floats(0, DAY)


@given(
    state=st.sampled_from(["starting", "following", "catching_up", "waiting", "rebuilding"]),
    lag=st.floats(STILL_SECONDS + 1, DAY),
    reached=st.floats(STILL_SECONDS + 1, DAY),
    moved=_SECONDS,
    began=_SECONDS,
    canary=st.none() | _SECONDS,
    what=st.sampled_from(["", "away"]),
)
def test_no_frontier_that_stays_where_it_is_though_the_log_has_more_is_green(
    state: str, lag: float, reached: float, moved: float, began: float,
    canary: float | None, what: str,
) -> None:  # fmt: skip
    """Regardless of what its job reports: the log decides."""
    found = judged(
        followers=(
            follower(
                lag, reached, state=state, moved_at_us=ago(moved), began_at_us=ago(began),
                canary_at_us=None if canary is None else ago(canary), what=what,
            ),
        )
    )  # fmt: skip
    assert found.level is not Level.OK
    if min(lag, reached) > STALLED_SECONDS + 10 and began > LATE_SECONDS + 10:
        assert found.exit_code != Exit.OK


@given(
    slot=st.sampled_from([SLOT, _UNREAD, _LOST, None]),
    lsn=st.sampled_from([None, LSN(3), LSN(5)]),
    daemon=st.sampled_from(
        [
            None,
            STREAMING,
            COPYING,
            STREAMING._replace(ready=False),
            DaemonReport("halted", ready=False, reason="x"),
        ]
    ),
    failing=st.none() | _SECONDS,
    stage=st.sampled_from([None, "due", "planning", "running", "done"]),
    wanted=st.booleans(),
)
def test_no_log_that_cannot_move_on_is_green(
    slot: Slot | None, lsn: LSN | None, daemon: DaemonReport | None, failing: float | None,
    stage: str | None, wanted: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    if daemon is not None and failing is not None:
        daemon = daemon._replace(failures=3, failing_seconds=failing, error="queue full")
    snapshot = Snapshot(mode="initial" if wanted else "never")
    found = verdict(
        msgspec.structs.replace(CONFIG, snapshot=snapshot),
        facts(slot=slot, resume_lsn=lsn, daemon=daemon, initial_stage=stage),
    )
    complete = stage == "done" or (stage is None and not wanted)
    reads = slot is SLOT and lsn == LSN(5)
    moves = daemon is None or (daemon.ready and not daemon.failures)
    assert (found.level is Level.OK) == (complete and reads and moves)
    assert (found.level is Level.OK) <= (found.exit_code == Exit.OK)


@given(
    members=st.integers(0, 3),
    lag=st.integers(1, 10**6),
    since=st.floats(LATE_SECONDS + 10, DAY),
    age=_SECONDS,
    moved=_SECONDS,
    state=st.sampled_from(["delivering", "away", "halted"]),
    gap=st.sampled_from(["", "deleted"]),
    failing=st.integers(0, 2),
)
def test_no_webhook_that_lacks_what_the_log_has_held_for_long_is_green(
    members: int, lag: int, since: float, age: float, moved: float, state: str, gap: str,
    failing: int,
) -> None:  # fmt: skip
    """Regardless of what its processes report: Kafka's offsets and the log decide."""
    status = hook(
        members, lag, since, gap, state=state, at_us=ago(age), moved_at_us=ago(moved),
        failing=failing,
    )  # fmt: skip
    found = judged(webhooks=(status,))
    assert found.level is not Level.OK
    if not members or gap:
        assert found.level is Level.FAILED
    assert all(each.remedy for each in found.causes)
