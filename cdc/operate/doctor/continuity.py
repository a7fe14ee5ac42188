"""The doctor's check that source and log match: the one that the daemon runs at its start.

It uses the same code on the same facts (`cdc.publication.continuity`), so that the doctor never accepts what
the daemon refuses, nor the other way round. May run while a daemon runs: the slot is read before
the log and everything else after it, since each may advance in between.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from cdc.errors import CDCError, FencedError
from cdc.log import topics
from cdc.log.topic_monitor import LogWatch
from cdc.operate.findings import Finding, error, ok
from cdc.publication import continuity
from cdc.publication import diff as publication
from cdc.source import catalog
from cdc.source.connection import connect
from cdc.source.stream import identify

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.records import ResumeIdentity, ResumePosition
    from cdc.source.catalog import Source
    from cdc.source.server import Slot
    from cdc.source.timelines import System

    Resume = tuple[ResumeIdentity, ResumePosition]


def examine(config: Config, slot: Slot | None, resume: Resume | None) -> list[Finding]:
    """Gather the other facts and return the finding; `slot` was read before `resume`."""
    if resume is None:
        return check_unrecorded(slot)
    try:
        system, source = gather(config, slot, resume)
    except CDCError as failure:
        return [error("continuity", failure.what, failure.hint)]
    return [check_meeting(config, resume, system, source)]


def gather(config: Config, slot: Slot | None, resume: Resume) -> tuple[System, Source]:
    """Return the source as the daemon would find it at its start."""
    with connect(config, replication=True) as connection:
        system = identify(connection)
    with connect(config) as connection:
        source = catalog.source(connection, config, resume[0].publication.tables)
    return system, source._replace(slot=slot)


def refusal(config: Config, slot: Slot | None, resume: Resume) -> CDCError | None:
    """Return the error with which the daemon would halt at its start; None if it would run."""
    try:
        prove(config, resume, *gather(config, slot, resume))
        whole_log(config, resume)
    except CDCError as failure:
        return failure
    return None


def whole_log(config: Config, resume: Resume) -> None:
    """Raise where the log contradicts its own records, as the daemon does at its start."""
    with suppress(FencedError):  # a daemon runs, and has checked this
        LogWatch(config, topics.admin(config)).begin(*resume)


def unbroken(config: Config, slot: Slot | None, resume: Resume) -> None:
    """Raise where the daemon would halt at a gap that `cdc setup` must not hide.

    Tables that left the publication are no such gap: setup continues without them.
    """
    system, source = gather(config, slot, resume)
    identity, position = resume
    continuity.same_writer(config, identity)
    continuity.same_stream(config, identity, position, system, source)
    if source.publication is not None:
        found = publication.gaps(identity.publication, source.publication, source.tables)
        since = f"after {position.end_lsn}, where the log ends"
        if broken := publication.joined([gap for gap in found if not gap.left], since):
            raise broken
    whole_log(config, resume)


def prove(config: Config, resume: Resume, system: System, source: Source) -> None:
    """Raise where the source does not continue the log, as the daemon does."""
    identity, position = resume
    continuity.same_writer(config, identity)
    continuity.same_source(config, identity, position, system, source)


def check_unrecorded(slot: Slot | None) -> list[Finding]:
    """Return what is wrong where the log holds no resume record."""
    if slot is None:
        return []
    return [
        error(
            "resume",
            f"the slot {slot.name} exists, but the log holds no resume record: which of its "
            "changes are in the log is unknown",
            f"if the log is new: cdc setup --adopt-slot; else drop it: cdc slot drop {slot.name}",
        )
    ]


def check_meeting(config: Config, resume: Resume, system: System, source: Source) -> Finding:
    """Return whether the source continues the log."""
    identity, position = resume
    try:
        prove(config, resume, system, source)
    except CDCError as failure:
        return error("continuity", failure.what, failure.hint)
    promoted = f"; the promotion to timeline {system.timeline} lost none of it"
    return ok(
        "continuity",
        f"the slot reaches back to {position.end_lsn}, where the log ends"
        + (promoted if identity.timeline != system.timeline else ""),
    )
