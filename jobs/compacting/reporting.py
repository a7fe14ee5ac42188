"""Report the newest base into the log: so it is known to have existed if all bases are lost.

A base is made without a broker, too: the next run reports it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import TYPE_CHECKING

from cdc.errors import CDCError
from cdc.events import LSN
from cdc.log.follower_reports import FollowerRecord, Reports
from cdc.operate.followers import BASES
from lockstep.jobs.compacting.bases import bases_of

if TYPE_CHECKING:
    from cdc.config import Config

log = logging.getLogger("lockstep.jobs.compact")


def report(config: Config) -> None:
    """Report the newest base and its commit, if there is one; log a warning if that fails."""
    bases = bases_of(config)
    base = bases.newest() if bases.find() else None
    if base is None:
        return
    record = FollowerRecord(
        pipeline=config.pipeline,
        follower=BASES,
        store="delta",
        generation=1,
        state="stopped",
        epoch=base.epoch,
        lsn=LSN.parse(base.lsn),
        seq=base.seq,
        committed_at_us=base.committed_at_us,
        place=base.place,
        tables=len(base.tables),
        commit=bases.newest_commit(),
        owner=f"{socket.gethostname()}:{os.getpid()}",
        at_us=time.time_ns() // 1_000,
    )
    try:
        reports = Reports(config)
        reports.write(record)
        reports.flush()
    except CDCError as error:
        log.warning("base %s was not reported to the log: %s", base.number, error.what)
