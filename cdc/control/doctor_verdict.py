"""The doctor on how the pipeline runs: the verdict that `cdc status` gives, cause by cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdc.control.findings import Finding, Severity, error, listed, note, ok, warning
from cdc.control.status import read_status
from cdc.control.verdict import Level
from cdc.errors import Exit

if TYPE_CHECKING:
    from cdc.config import Config

# The others have checks of their own, which say more.
_ABOUT: Final = {"daemon", "snapshot", "live_snapshot", "follower"}


def examine(config: Config) -> list[Finding]:
    """Return what does not move on; nothing before the pipeline is set up.

    What was never started, or was stopped, is no error here: the doctor is asked before it runs.
    """
    status = read_status(config)
    if status.resume is None or status.slot is None:
        return []
    running = {each.name for each in status.followers if each.record and each.record.runs}
    reads = status.slot.active_pid is not None
    found, named = [], set()
    for cause in status.verdict.causes:
        if cause.about not in _ABOUT or (cause.about == "snapshot" and not reads):
            continue  # what a snapshot that is due will cost is told where its needs are checked
        kind = error if cause.level is Level.FAILED else warning
        follower = cause.subject if cause.about == "follower" else ""
        halted = cause.exit_code == Exit.CONFIG
        waits = (follower not in running and not halted) if follower else not reads
        if cause.about != "live_snapshot" and waits:
            kind = note
        named.add(follower)
        found.append(kind(cause.about, cause.what, cause.remedy))
    well = sorted(running - named)
    if well:
        found.append(ok("follower", f"{listed(well)}: running, and not behind"))
    if reads and not any(each.severity is Severity.ERROR for each in found):
        found.append(ok("verdict", status.verdict.sentence))
    return found
