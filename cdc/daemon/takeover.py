"""Take over slot and log from the session before: a start, in the order that makes it safe.

1. Take the slot: a stray second daemon gets no further, so it harms nobody.
2. Fence older writers.
3. Read the resume record, which none of them can change any more.
4. Prove that slot, log and source fit together. The session may stream.

What does not fit raises, with the remedy (docs/GUARANTEES.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc import failpoints
from cdc.errors import CDCError, GapError, Policy
from cdc.log import names, reader, records, resume, topics
from cdc.log.producer_pool import ProducerPool
from cdc.log.topic_monitor import TopicMonitor
from cdc.operate.health import HealthState
from cdc.publication import continuity
from cdc.snapshot.initial import due
from cdc.source import catalog
from cdc.source.connection import connect_for_lookups

if TYPE_CHECKING:
    from contextlib import ExitStack

    from cdc.config import Config
    from cdc.daemon.process_state import ProcessState
    from cdc.events import LSN
    from cdc.sequence.intake import RunBlocking
    from cdc.source.connection import Connection
    from cdc.source.stream import Stream
    from cdc.source.timelines import System


class TakenOver(NamedTuple):
    """What the session has from then on."""

    producers: ProducerPool
    admin: topics.Admin
    sql: Connection
    topic_monitor: TopicMonitor
    identity: records.ResumeIdentity  # as the log has it
    proven: records.ResumeIdentity  # as it is to be written, after a promotion for example
    position: records.ResumePosition
    start_lsn: LSN


def take_over(
    process: ProcessState, stream: Stream, run_blocking: RunBlocking, closing: ExitStack
) -> TakenOver:
    """Take the slot, fence older writers, read the resume record, prove that both fit.

    `closing` releases all of it, also what was taken before an error.
    """
    config = process.config
    system = stream.identify()
    try:
        stream.start()
    except CDCError as error:
        if error.policy is Policy.HALT:
            _prove_source(config, system, run_blocking)
        raise
    failpoints.reach("after_slot")
    producers = ProducerPool(config, process.producer_workers, process.transaction_seconds)
    closing.callback(producers.abandon)
    admin = topics.admin(config)
    process.to(HealthState.STARTING, "fencing older writers and reading the resume record")
    identity, position = _fence(config, producers, run_blocking)
    run_blocking(lambda: due.expect_done(config, identity))
    sql = run_blocking(lambda: connect_for_lookups(config))
    # On the worker, after any call that a failing session has abandoned: closing earlier would
    # make libpq free memory that the call still reads.
    closing.callback(process.worker.submit, sql.close)
    with reader.unless_overtaken(config, position):
        source = run_blocking(lambda: catalog.read_state(sql, config, identity.publication))
        proven = continuity.check(config, identity, position, system, source)
    topic_monitor = TopicMonitor(config, admin, process.metrics)
    run_blocking(lambda: topic_monitor.start(identity, position))
    start_lsn = continuity.start_lsn(source)
    return TakenOver(producers, admin, sql, topic_monitor, identity, proven, position, start_lsn)


def _fence(
    config: Config, producers: ProducerPool, run_blocking: RunBlocking
) -> tuple[records.ResumeIdentity, records.ResumePosition]:
    """Fence older writers; return the resume record that they have left."""
    if stale := run_blocking(lambda: reader.read_resume(config)):
        # Before anything is fenced: a stray daemon with another slot must not stop this log's.
        continuity.require_same_writer(config, stale[0])
    run_blocking(producers.open)
    failpoints.reach("after_fence")
    resumed = run_blocking(lambda: reader.read_last_resume(config))
    resume.expect_not_older(stale, resumed)
    if resumed is None:
        raise GapError(
            f'there is no resume record of pipeline "{config.pipeline}" in'
            f" {names.resume_topic(config.prefix)}",
            hint="run `cdc setup`; where the pipeline has run before, its log was lost",
        )
    return resumed


def _prove_source(config: Config, system: System, run_blocking: RunBlocking) -> None:
    """Raise why the slot is not available, as exactly as log and catalog show it, or return."""
    if resumed := run_blocking(lambda: reader.read_resume(config)):
        identity, position = resumed
        with connect_for_lookups(config) as sql:
            source = catalog.read_state(sql, config, identity.publication)
        continuity.require_same_source(config, identity, position, system, source)
