"""The doctor's check that source and log match: the one that the daemon runs at its start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.errors import CDCError
from cdc.operate.findings import Finding, error, ok
from cdc.operate.start_checks import source_at_start, verify_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.log.resume import Resume
    from cdc.source.catalog import SourceState
    from cdc.source.slots import Slot
    from cdc.source.timelines import System


def examine(config: Config, slot: Slot | None, resume: Resume | None) -> Iterator[Finding]:
    """Gather the other facts and yield the finding; `slot` was read before `resume`."""
    if resume is None:
        yield from check_slot_without_log(slot)
    else:
        yield check_continuity(config, resume, *source_at_start(config, slot, resume))


def check_slot_without_log(slot: Slot | None) -> Iterator[Finding]:
    """Yield what is wrong where the log holds no resume record."""
    if slot is not None:
        yield error(
            "resume",
            f"the slot {slot.name} exists, but the log holds no resume record: which of its "
            "changes are in the log is unknown",
            f"if the log is new: cdc setup --adopt-slot; else drop it: cdc slot drop {slot.name}",
        )


def check_continuity(
    config: Config, resume: Resume, system: System, source: SourceState
) -> Finding:
    identity, position = resume
    try:
        verify_source(config, resume, system, source)
    except CDCError as failure:
        return error("continuity", failure.what, failure.hint)
    promoted = f"; the promotion to timeline {system.timeline} lost none of it"
    return ok(
        "continuity",
        f"the slot reaches back to {position.end_lsn}, where the log ends"
        + (promoted if identity.timeline != system.timeline else ""),
    )
