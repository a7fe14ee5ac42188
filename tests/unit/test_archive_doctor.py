"""What the doctor says of the archive, from its report and the log."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from cdc.config import Config
from cdc.config.archive import Archive
from cdc.config.model import Log, Source
from cdc.events import LSN
from cdc.log.follower_reports import FollowerRecord
from cdc.log.frontier_tail import Unapplied
from cdc.operate.doctor.archive import ArchiveFacts, check_archive
from cdc.operate.findings import Severity

NOW = time.time()
CONFIG = Config(
    pipeline="shop",
    source=Source(dsn="postgresql:///shop"),
    log=Log(bootstrap_servers="localhost:9092"),
    archive=Archive(path="/srv/archive"),
)
RECORD = FollowerRecord(
    pipeline="shop", follower="archive", store="delta", generation=1, state="following", epoch=1,
    lsn=LSN(0x500), seq=42, committed_at_us=0, place=7, tables=1, events=1, batches=1, errors=0,
    events_per_second=0.0, batch_seconds=0.0, canary_at_us=None, began_at_us=0, moved_at_us=0,
    what="", hint="", owner="host", at_us=int((NOW + 3_600) * 1e6),
)  # fmt: skip


def found(
    unapplied: Unapplied | None, record: FollowerRecord | None = RECORD, hours: float = 168.0
) -> list[tuple[Severity, str]]:
    config = replace(CONFIG, log=replace(CONFIG.log, retention_hours=hours))
    facts = ArchiveFacts(record, unapplied, NOW)
    return [(each.severity, each.what) for each in check_archive(config, facts)]


def lagging(hours: float) -> Unapplied:
    return Unapplied(int((NOW - hours * 3_600) * 1e6))


@pytest.mark.parametrize(
    ("unapplied", "hours", "severity", "words"),
    [
        (Unapplied(), 168.0, Severity.NOTE, "as low as 12 (it is 168)"),
        (Unapplied(), -1.0, Severity.NOTE, "as low as 12 (it is for ever)"),
        (lagging(10), 168.0, Severity.NOTE, "as low as 40"),
        (lagging(50), 168.0, Severity.WARNING, "keeps the log for 168 hours"),
        (lagging(1), 12.0, Severity.OK, "keeps the log for 12 hours"),
    ],
)
def test_retention_may_be_short_if_the_archive_keeps_up(
    unapplied: Unapplied, hours: float, severity: Severity, words: str
) -> None:
    ((actual, what),) = found(unapplied, hours=hours)
    assert actual is severity
    assert words in what


def test_an_archive_that_lost_its_place_or_never_ran_or_halted_is_reported() -> None:
    [lost] = check_archive(CONFIG, ArchiveFacts(RECORD, Unapplied(1, forgotten=True), NOW))
    assert lost.severity is Severity.ERROR
    assert "`cdc teardown --topics`, then `cdc setup`" in lost.fix
    assert "another archive.path" in lost.fix
    assert [each for each, _ in found(None, None)] == [Severity.WARNING]
    halted = replace(RECORD, state="halted", what="a gap")
    assert (Severity.ERROR, "it has halted: a gap") in found(Unapplied(), halted)
    silent = replace(RECORD, at_us=0)
    assert found(Unapplied(), silent)[0][0] is Severity.WARNING
    assert not list(check_archive(replace(CONFIG, archive=Archive()), None))
