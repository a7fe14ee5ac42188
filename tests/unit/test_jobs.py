"""The parts of the Spark app that need no Spark: its help, its errors, how ranges are grouped."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError, get_return_value
from pyspark import TaskContext

from cdc.errors import (
    ConfigError,
    FencedError,
    RewrittenError,
    UnavailableError,
    UnreadableError,
)
from cdc.events import LSN
from cdc.runtime.spark import job
from cdc.snapshot.initial.records import PageRange, SnapshotPlan
from lockstep.jobs.copying import direct, tasks
from lockstep.jobs.copying.data_source import table_of
from lockstep.jobs.copying.driving import translated
from lockstep.jobs.spark.session import has_ended

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.snapshot.initial.records import RangeRecord

PLAN = SnapshotPlan(
    pipeline="p", generation=1, token="", epoch=1, database="d", snapshot="s", lsn=LSN(1),
    taken_at_us=0, tasks=2, first_seq=1, next_seq=1, publication=None,  # type: ignore[arg-type]
)  # fmt: skip


def test_the_app_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, job("snapshot"), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "spark-submit jobs/snapshot.py --config lockstep.yaml" in done.stdout


def test_an_error_in_a_task_keeps_its_kind() -> None:
    traceback = "Job aborted\n  File x\ncdc.errors.RewrittenError: the rows of t were rewritten\n"
    assert isinstance(translated(RuntimeError(traceback)), RewrittenError)
    assert isinstance(translated(RuntimeError("[DATA_SOURCE_NOT_FOUND] delta")), ConfigError)
    assert isinstance(translated(RuntimeError("connection refused")), UnavailableError)
    error = tasks.Failure("RewrittenError", "what", "hint").error()
    assert (type(error), error.what, error.hint) == (RewrittenError, "what", "hint")


def test_a_batch_that_executors_cannot_read_is_named() -> None:
    """Kafka's own text, among the lines of Java; a topic's name may have dashes."""
    java = (
        "Job aborted due to stage failure: Task 1 in stage 3.0 failed 4 times\n"
        "Caused by: org.apache.kafka.common.KafkaException: Record batch for partition"
        " a-1.public.users-2 at offset 1507 is invalid, cause: Record is corrupt (stored crc ="
        " 1, computed crc = 2)\n\tat org.apache.kafka.clients.consumer\n"
    )
    error = translated(RuntimeError(java))
    assert isinstance(error, UnreadableError)
    assert error.what == (
        "reading a-1.public.users [2]: the batch at offset 1507 is damaged: Record is corrupt"
        " (stored crc = 1, computed crc = 2)"
    )
    assert "have a replica with sound files lead the partition" in error.hint
    ours = translated(RuntimeError(f"Traceback\ncdc.errors.UnreadableError: {error.what}\n"))
    assert (type(ours), ours.what, ours.hint) == (UnreadableError, error.what, error.hint)


def test_spark_retries_only_temporary_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark would try four times what no retry can fix."""
    thrown: list[Exception] = []

    def fail(*_: object) -> Iterator[RangeRecord]:
        raise thrown[-1]

    class First:
        def attemptNumber(self) -> int:  # noqa: N802 - Spark's name
            return 0

    monkeypatch.setattr(tasks, "run_task", fail)
    monkeypatch.setattr(TaskContext, "get", staticmethod(First))
    thrown.append(RewrittenError("rewritten"))
    [failure] = tasks.copy_ranges(None, PLAN, iter([0]))  # type: ignore[arg-type]
    assert isinstance(failure, tasks.Failure)
    assert isinstance(failure.error(), RewrittenError)
    thrown.append(FencedError("by a dead executor's last try", hint=""))
    with pytest.raises(FencedError):
        list(tasks.copy_ranges(None, PLAN, iter([0])))  # type: ignore[arg-type]


def test_groups_are_the_same_whatever_is_done_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "GROUP_BYTES", 10 * 8_192)
    ranges = [
        PageRange(table=0, number=n, first_page=4 * n, end_page=4 * n + 4, first_seq=n, capacity=1)
        for n in range(5)
    ]
    ranges.append(
        PageRange(table=1, number=0, first_page=None, end_page=None, first_seq=9, capacity=1)
    )
    found = direct.groups(ranges)
    assert [[each.number for each in group.ranges] for group in found] == [[0, 1], [2, 3], [4, 0]]
    assert [group.is_last for group in found] == [False, False, True]
    with pytest.raises(ConfigError, match=r"has no table public\.t"):
        table_of(PLAN, "public.t")


@pytest.mark.parametrize(
    ("answer", "deleted"), [("", True), ("x", True), ("xsno such method", False)]
)
def test_a_jvm_that_ends_during_a_call_is_no_bug(answer: str, deleted: bool) -> None:  # noqa: FBT001 - pytest's
    with pytest.raises(Py4JError) as reported:
        get_return_value(answer, None, "o1", "isActive")
    assert has_ended(reported.value) == deleted
    assert has_ended(Py4JNetworkError("Answer from Java side is empty"))
