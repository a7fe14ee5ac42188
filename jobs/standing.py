"""Where a follower's store stands, once it is sure that it does so in this very log.

A log that is begun anew, or a database that is restored, has other frontiers at the same places. A
store of the one before must not go on, nor may anybody take its LSN for one of this log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.errors import GapError
from cdc.log.tailing import record_at
from jobs.running import opened, with_remedy
from sinks.contract import Applied

if TYPE_CHECKING:
    from cdc.config import Config
    from jobs.running import Run
    from sinks.contract import Generations, Standing


def found(run: Run, sink: Generations) -> Standing:
    """Open the store, and tell where it stands; raise GapError where that is of another log."""
    standing = opened(run, sink)
    applied = standing.applied
    try:
        _expect_frontier(run.config, applied)
    except GapError as error:
        run.stands(Applied.beginning(run.config.pipeline, applied.generation))
        raise with_remedy(error, run.name, "where the store stands") from error
    run.stands(applied)
    return standing


def _expect_frontier(config: Config, applied: Applied) -> None:
    """Raise GapError where the log says something else of the place that the store stands at."""
    record = record_at(config, applied.place - 1) if applied.place else None
    stands = (applied.epoch, applied.lsn, applied.seq)
    if record and (record.epoch, record.lsn, record.seq) != stands:
        raise GapError(
            f"the store stands at {applied.lsn} (seq {applied.seq}), where this log has"
            f" {record.lsn} (seq {record.seq})",
            hint="it followed another log: one that was set up before, or of a database that was"
            " restored since",
        )
