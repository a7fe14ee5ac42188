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
from cdc.operate.doctor.log_retention import check_archive
from cdc.operate.findings import Level, Severity
from cdc.operate.followers import RUN_ARCHIVE, FollowerStatus, judge

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


def archive(unapplied: Unapplied | None, record: FollowerRecord | None = RECORD) -> FollowerStatus:
    return FollowerStatus("archive", record, LSN(0x500), unapplied)


def lagging(hours: float) -> Unapplied:
    return Unapplied(int((time.time() - hours * 3_600) * 1e6))


@pytest.mark.parametrize(
    ("lag", "hours", "severity", "words"),
    [
        (None, 168.0, Severity.NOTE, "as low as 12 (it is 168)"),
        (None, -1.0, Severity.NOTE, "as low as 12 (it is for ever)"),
        (10, 168.0, Severity.NOTE, "as low as 40"),
        (50, 168.0, Severity.WARNING, "keeps the log for 168 hours"),
        (1, 12.0, Severity.OK, "keeps the log for 12 hours"),
    ],
)
def test_retention_may_be_short_if_the_archive_keeps_up(
    lag: float | None, hours: float, severity: Severity, words: str
) -> None:
    unapplied = Unapplied() if lag is None else lagging(lag)
    config = replace(CONFIG, log=replace(CONFIG.log, retention_hours=hours))
    [finding] = check_archive(config, [archive(unapplied)])
    assert finding.severity is severity
    assert words in finding.what


def test_an_archive_that_lost_its_place_or_never_ran_or_halted_is_reported() -> None:
    lost = archive(Unapplied(1, forgotten=True))
    [cause, *_] = judge(CONFIG, [lost])
    assert (cause.about, cause.level) == ("archive", Level.FAILED)
    assert "`cdc teardown --topics`, then `cdc setup`" in cause.remedy
    assert "another archive.path" in cause.remedy
    assert not list(check_archive(CONFIG, [lost]))
    [cause] = judge(CONFIG, [archive(None, None)])
    assert (cause.what, cause.remedy) == ("archive has never run", RUN_ARCHIVE)
    [cause] = judge(CONFIG, [archive(Unapplied(), replace(RECORD, state="halted", what="a gap"))])
    assert (cause.what, cause.level) == ("archive has halted: a gap", Level.FAILED)
    [cause] = judge(CONFIG, [archive(Unapplied(), replace(RECORD, at_us=0))])
    assert "archive is not running" in cause.what
