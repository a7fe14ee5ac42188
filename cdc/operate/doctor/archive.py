"""The doctor's checks of the archive: that it keeps up, and how short Kafka may keep the log.

Pure: from the archive's report and the place in the frontier topic that it names. The archive's own
files are checked by `cdc prove`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.operate.findings import Finding, error, note, ok, warning
from cdc.operate.followers import NEW_ARCHIVE, RUN_ARCHIVE
from cdc.operate.readable import duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.log.follower_reports import FollowerRecord
    from cdc.log.frontier_tail import Unapplied

# What its job, and every follower, may be down for at least: a machine that is replaced at night.
_LEAST_HOURS: Final = 12
# How many times the present lag must fit into the retention.
_TIMES: Final = 4
_HOUR: Final = 3_600.0


class ArchiveFacts(NamedTuple):
    """The archive's report, and what the log holds that it lacks; None: it never reported."""

    record: FollowerRecord | None
    unapplied: Unapplied | None
    now: float  # seconds since 1970


def check_archive(config: Config, facts: ArchiveFacts | None) -> Iterator[Finding]:
    """Yield how far the archive is, and which retention it allows."""
    if config.archive.path is None or facts is None:
        return
    record, unapplied = facts.record, facts.unapplied
    if record is None or unapplied is None:
        what = "an archive is configured, and nothing has archived the log yet"
        yield warning("archive", what, RUN_ARCHIVE)
        return
    if unapplied.forgotten:
        yield error(
            "archive",
            f"the log no longer holds what is not archived after {record.lsn}, seq {record.seq}",
            NEW_ARCHIVE,
        )
        return
    if record.state == "halted":
        yield error("archive", f"it has halted: {record.what}", record.hint)
    elif not record.runs:
        yield warning("archive", f"it is not running; it is at {record.lsn}", RUN_ARCHIVE)
    elif record.what:
        yield warning("archive", f"it is {record.state}: {record.what}", record.hint)
    yield from _retention(config, facts, unapplied)


def _retention(config: Config, facts: ArchiveFacts, unapplied: Unapplied) -> Iterator[Finding]:
    since = unapplied.since_us
    lag = 0.0 if since is None else max(0.0, facts.now - since / 1e6)
    kept = config.log.retention_hours
    needed = max(_LEAST_HOURS, _TIMES * (lag + config.archive.every_seconds) / _HOUR)
    waiting = f"the log has held for {duration(lag)} what is not archived"
    if kept < 0 or kept > needed:
        has = "for ever" if kept < 0 else f"{kept:g}"
        what = (
            f"{waiting}: log.retention_hours may be as low as {needed:.0f} (it is {has}), if no"
            " follower is ever down for longer"
        )
        yield note("archive_retention", what)
    elif lag / _HOUR > kept / _TIMES:
        what = f"{waiting}, and Kafka keeps the log for {kept:g} hours"
        yield warning("archive_retention", what, f"log.retention_hours: {needed:.0f}, `cdc setup`")
    else:
        yield ok("archive_retention", f"{waiting}; Kafka keeps the log for {kept:g} hours")
