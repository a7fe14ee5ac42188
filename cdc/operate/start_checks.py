"""What the daemon checks at its start, without the daemon: for doctor, status and setup.

The same code on the same facts (`cdc.publication.continuity`), so that none of them accepts what
the daemon refuses, nor the other way round. May run while a daemon runs: the slot is read before
the log and everything else after it, since each may advance in between.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from cdc.errors import FencedError
from cdc.log import topics
from cdc.log.topic_monitor import TopicMonitor
from cdc.publication import continuity, diff
from cdc.source import catalog
from cdc.source.connection import connect
from cdc.source.stream import identify

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.resume import Resume
    from cdc.source.catalog import SourceState
    from cdc.source.slots import Slot
    from cdc.source.timelines import System


def source_at_start(
    config: Config, slot: Slot | None, resume: Resume
) -> tuple[System, SourceState]:
    """Return the source as the daemon would find it at its start."""
    with connect(config, replication=True) as connection:
        system = identify(connection)
    with connect(config) as connection:
        source = catalog.read_state(connection, config, resume[0].publication)
    return system, source._replace(slot=slot)


def verify_start(config: Config, slot: Slot | None, resume: Resume) -> None:
    """Raise the error with which the daemon would halt at its start."""
    verify_source(config, resume, *source_at_start(config, slot, resume))
    verify_log(config, resume)


def verify_log(config: Config, resume: Resume) -> None:
    """Raise where the log contradicts its own records, as the daemon does at its start."""
    with suppress(FencedError):  # a daemon runs, and has checked this
        TopicMonitor(config, topics.admin(config)).start(*resume)


def refuse_gaps(config: Config, slot: Slot | None, resume: Resume) -> None:
    """Raise where the daemon would halt at a gap that `cdc setup` must not hide.

    Tables that left the publication are no such gap: setup continues without them.
    """
    system, source = source_at_start(config, slot, resume)
    identity, position = resume
    continuity.require_same_writer(config, identity)
    continuity.require_same_stream(config, identity, position, system, source)
    if source.publication is not None:
        found = diff.gaps(identity.publication, source.publication, source.tables)
        since = f"after {position.end_lsn}, where the log ends"
        if broken := diff.combined_error([gap for gap in found if not gap.is_removal], since):
            raise broken
    verify_log(config, resume)


def verify_source(config: Config, resume: Resume, system: System, source: SourceState) -> None:
    """Raise where the source does not continue the log, as the daemon does."""
    identity, position = resume
    continuity.require_same_writer(config, identity)
    continuity.require_same_source(config, identity, position, system, source)
