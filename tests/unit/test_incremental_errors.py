"""An incremental snapshot that meets errors retries later each time, and not for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from cdc.log.completeness import Completeness
from cdc.operate.commands import snapshots
from cdc.snapshot.incremental.commands import Command
from cdc.snapshot.incremental.job import MAX_ERRORS, Job
from cdc.snapshot.incremental.manager import IncrementalSnapshots
from cdc.snapshot.incremental.records import (
    KEPT,
    MOST_KEPT,
    IncrementalRecord,
    TableName,
    forgettable,
)
from cdc.snapshot.incremental.topic import IncrementalLog
from tests.unit.test_control_doctor import CONFIG


def ended(number: int, state: str = "done", **given: Any) -> IncrementalRecord:  # noqa: ANN401
    fields: dict[str, Any] = {
        "pipeline": "p",
        "id": f"a{number}",
        "schema": "public",
        "table": f"t{number}",
    }
    fields |= {"began_at_us": number, "at_us": number, "state": state, **given}
    return msgspec.convert(fields, IncrementalRecord)


def kept(known: list[IncrementalRecord]) -> set[str]:
    """Return the ids that a session keeps when it writes its first records."""
    verifier: Any = SimpleNamespace(adopt=lambda _: None, take=list)
    fetcher: Any = SimpleNamespace(signer=None)
    sequencer: Any = SimpleNamespace()
    session = IncrementalSnapshots(CONFIG, fetcher, sequencer, verifier, {})
    session.adopt(IncrementalLog(known, [], []), Completeness())
    session.take()
    return {record.id for record in session.known()}


def test_errors_in_a_row_are_counted_spaced_and_bounded() -> None:
    table = TableName("public", "t")
    clock: Any = SimpleNamespace(monotonic=lambda: 100.0, time_ns=lambda: 1_000)
    job = Job.start("p", "a1", Command(do="start", id="a1", tables=(table,)), table, clock=clock)
    pauses = []
    for number in range(1, MAX_ERRORS + 1):
        goes_on = job.count_error("no memory")
        pauses.append(job.not_before - clock.monotonic())
        assert goes_on is (number < MAX_ERRORS)
        assert (job.record.errors, job.record.why) == (number, "no memory")
        assert not job.runnable
    assert job.record.failing_since_us is not None
    assert pauses == sorted(pauses)
    assert pauses[0] == 1
    assert pauses[-1] == 30


def test_a_failed_snapshot_is_kept_until_it_is_acknowledged_or_read_since() -> None:
    later = [ended(number) for number in range(10, 10 + KEPT)]
    read_again = ended(9, table="t2")
    known = [ended(1, "failed"), ended(2, "failed"), ended(3, "stopped"), read_again, *later]
    known.append(ended(4, "stopped", emptied_under=1))  # what its topic lacks is shown by this
    # Its keys were not logged, so that the session can't continue it.
    fails = ended(0, "running", keys=True, withheld=True)
    assert kept([fails, *known]) == {"a0", "a1", "a4", *(each.id for each in later[1:])}


def test_the_snapshots_that_ended_first_are_forgotten_first() -> None:
    """So `--wait` sees the end of one that began before all others, and of many that are short."""
    minute_us = 60_000_000
    known = [ended(1, at_us=minute_us), *(ended(number) for number in range(2, 4 + KEPT))]
    assert forgettable(known, 2 * minute_us) == ["a2", "a3", "a4"]
    assert forgettable(known, minute_us) == []


def test_a_bounded_number_of_failed_snapshots_is_kept() -> None:
    known = [ended(number, "failed") for number in range(MOST_KEPT + 2)]
    assert forgettable(known, 0) == ["a0", "a1"]


def test_a_wait_remembers_the_snapshots_that_the_log_forgets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = ended(2, "running")
    read = iter([[ended(1), running], [replace(running, state="done")]])
    monkeypatch.setattr("cdc.snapshot.incremental.topic.read", lambda _: next(read))
    monkeypatch.setattr(snapshots, "daemon_streams", lambda _: True)
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert [each.state for each in snapshots.wait(CONFIG, ["a1", "a2"])] == ["done", "done"]
