"""The doctor's check that log and source meet: what the daemon would say at its start.

The same proof, from the same facts (`cdc.continuity`), so that the doctor never finds well what the
daemon refuses, nor the other way round. May run beside a daemon: the slot was looked at before the
log and all else is after it, since either may move on in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc import continuity
from cdc.control.findings import Finding, error, ok
from cdc.errors import CDCError
from cdc.source import catalog
from cdc.source.connection import connect
from cdc.source.stream import identify

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.records import ResumeIdentity, ResumePosition
    from cdc.source.catalog import Source
    from cdc.source.inspection import Slot
    from cdc.source.timelines import System

    Resume = tuple[ResumeIdentity, ResumePosition]


def examine(config: Config, slot: Slot | None, resume: Resume | None) -> list[Finding]:
    """Gather what is missing and return the finding; `slot` is older than `resume`."""
    if resume is None:
        return check_unrecorded(slot)
    try:
        with connect(config, replication=True) as connection:
            system = identify(connection)
        with connect(config) as connection:
            source = catalog.source(connection, config, resume[0].publication.tables)
    except CDCError as failure:
        return [error("continuity", failure.what, failure.hint)]
    return [check_meeting(config, resume, system, source._replace(slot=slot))]


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
        continuity.same_writer(config, identity)
        continuity.same_source(config, identity, position, system, source)
    except CDCError as failure:
        return error("continuity", failure.what, failure.hint)
    promoted = f"; the promotion to timeline {system.timeline} lost none of it"
    return ok(
        "continuity",
        f"the slot reaches back to {position.end_lsn}, where the log ends"
        + (promoted if identity.timeline != system.timeline else ""),
    )
