"""The doctor on the running pipeline: the verdict that `cdc status` gives, cause by cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdc.errors import Exit
from cdc.operate.doctor.log_retention import check_archive, check_webhooks
from cdc.operate.findings import Finding, Level, error, note, ok, warning
from cdc.operate.readable import listed
from cdc.operate.status import read_status

if TYPE_CHECKING:
    from cdc.config import Config

_FORGED: Final = (
    "docs/SECURITY.md, Messages in the stream: an older cdc or migration is in use (`cdc setup`),"
    " or a role forges them; the server's log may show which (log_statement)"
)
# The other causes have checks of their own, with more detail.
_ABOUT: Final = {
    *("daemon", "source", "snapshot", "incremental_snapshot", "topic"),
    *("follower", "archive", "webhook"),
}
_JOBS: Final = {"follower", "archive"}
# What is so whether or not a daemon runs.
_LASTING: Final = {"incremental_snapshot", "topic"}
_STOPPED: Final = {"new", "not_running"}


def examine(config: Config) -> list[Finding]:
    """Return what is stalled; nothing before the pipeline is set up.

    What was never started, or was stopped, is no error here: the doctor may be run before that.
    """
    status = read_status(config)
    if status.resume is None or status.slot is None:
        return []
    running = {each.name for each in status.followers if each.record and each.record.runs}
    stopped = {each.name for each in status.webhooks if each.state in _STOPPED}
    reads = status.slot.active_pid is not None
    found, named = [], set()
    for cause in status.verdict.causes:
        if cause.about not in _ABOUT or (cause.about == "snapshot" and not reads):
            continue  # the cost of a snapshot that is due is reported with the checks of its needs
        kind = error if cause.level is Level.FAILED else warning
        job = cause.subject if cause.about in _JOBS else ""
        halted = cause.exit_code == Exit.CONFIG
        waits = (job not in running and not halted) if job else not reads
        if cause.about == "webhook":
            waits = cause.subject in stopped
        if cause.about not in _LASTING and waits:
            # What the archive lacks Kafka deletes some day.
            kind = warning if cause.about == "archive" else note
        named.add(job)
        found.append(kind(cause.about, cause.what, cause.remedy))
    unused = [each for each in status.incomplete_topics if not each.captured]
    found += [note("topic", each.what, each.remedy) for each in unused]
    if refused := status.refused_messages:
        what = (
            "messages in the WAL that claim to be the pipeline's and are not signed by it: "
            f"{refused}, since the daemon started; none was obeyed"
        )
        found.append(note("refused_messages", what, _FORGED))
    found += check_webhooks(config, status.webhooks)
    found += check_archive(config, status.followers)
    well = sorted(running - named)
    if well:
        found.append(ok("follower", f"{listed(well)}: running, without a lag worth reporting"))
    if reads and status.verdict.level is Level.OK:
        found.append(ok("verdict", status.verdict.sentence))
    return found
