"""Prove at the start that slot, log and source fit together; name the gap if they do not.

Pure. Continuing in spite of a mismatch would lose changes or mix two databases, so each one raises
an error with the difference and the remedy, and an exit code on which no supervisor restarts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from cdc.errors import ConfigError, GapError
from cdc.events import LSN
from cdc.publication import diff as publication

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.records import Publication, ResumeIdentity, ResumePosition
    from cdc.source.catalog import Source
    from cdc.source.server import Slot
    from cdc.source.timelines import System

_ANEW: Final = "`cdc teardown --topics`, then `cdc setup` and a snapshot, begin anew"
# The cause behind each pg_replication_slots.invalidation_reason.
_INVALIDATED: Final = {
    "wal_removed": "it kept more WAL than max_slot_wal_keep_size allows, and that is gone",
    "rows_removed": "rows of the catalog that it needs were vacuumed away",
    "wal_level_insufficient": "wal_level is, or was, below logical",
    "idle_timeout": "no daemon read from it for longer than idle_replication_slot_timeout",
}


class Found(NamedTuple):
    """The server and the source database as they are now."""

    system: System
    source: Source


def check(
    config: Config, identity: ResumeIdentity, position: ResumePosition, found: Found
) -> ResumeIdentity:
    """Return the identity to continue with; raise if the stream does not continue the log.

    It has the server's timeline, which is another one after a promotion, and the publication with
    the tables that were added to it.
    """
    same_writer(config, identity)
    publishes = same_source(config, identity, position, found.system, found.source)
    return replace(identity, timeline=found.system.timeline, publication=publishes)


def begins_at(found: Found) -> LSN:
    """Return the LSN from which the slot sends, before anything is confirmed to it."""
    slot = found.source.slot
    assert slot is not None
    return slot.confirmed_flush_lsn or LSN(0)


def same_writer(config: Config, identity: ResumeIdentity) -> None:
    """Raise ConfigError if the log belongs to another slot, and so to another pipeline."""
    if identity.slot != config.slot:
        raise ConfigError(
            f'the log under "{config.prefix}" is written from slot "{identity.slot}", the'
            f' configuration names "{config.slot}"',
            hint="use that slot, or a log.prefix of its own for the other pipeline",
        )


def same_source(
    config: Config,
    identity: ResumeIdentity,
    position: ResumePosition,
    system: System,
    source: Source,
) -> Publication:
    """Return the publication to continue with.

    Raises if the source is not the one the log comes from, or has lost what must follow.
    """
    same_stream(config, identity, position, system, source)
    if source.publication is None:
        raise GapError(
            f'the publication "{config.publication}" does not exist',
            hint=f"changes made while it is gone are not streamed; {_ANEW}",
        )
    return publication.follow(
        identity.publication,
        source.publication,
        source.tables,
        f"after {position.end_lsn}, where the log ends",
    )


def same_stream(
    config: Config,
    identity: ResumeIdentity,
    position: ResumePosition,
    system: System,
    source: Source,
) -> None:
    """Raise if server, database or slot do not continue the log; ignores the publication."""
    if identity.system_identifier != system.identifier:
        raise GapError(
            f"the log comes from system {identity.system_identifier}, this is {system.identifier}:"
            " another cluster, as after pg_upgrade or where a dump was restored",
            hint=f"point source.dsn at the cluster the log comes from; or {_ANEW}",
        )
    if identity.database != source.database:
        raise GapError(
            f"the log comes from database {identity.database}, this is {source.database};"
            f" {_whereabouts(identity, source)}",
            hint=f"point source.dsn at the database the log comes from; or {_ANEW}",
        )
    _same_history(identity, position, system, source.wal_end)
    _usable_slot(config, identity, system, source.slot)
    assert source.slot is not None
    confirmed_lsn = source.slot.confirmed_flush_lsn
    if confirmed_lsn is not None and confirmed_lsn > position.end_lsn:
        raise GapError(
            f'slot "{config.slot}" is at {confirmed_lsn}, the log only at'
            f" {position.end_lsn}: the changes between are gone from the stream",
            hint="someone moved or recreated the slot, or the resume topic lost its newest"
            f" records; {_ANEW}",
        )


def _whereabouts(identity: ResumeIdentity, source: Source) -> str:
    if identity.database in source.databases:
        return "both exist"
    if source.slot is not None and source.slot.database == source.database:
        return "it was renamed, and the slot with it"
    return "the former is gone: dropped, or renamed"


def _same_history(
    identity: ResumeIdentity, position: ResumePosition, system: System, wal_end: LSN
) -> None:
    """Raise GapError if the server never had some of what the log holds, or lost it."""
    old, now = identity.timeline, system.timeline
    if old > now:
        raise GapError(
            f"the server is on timeline {now}, the log was written from {old}, which is younger:"
            " this is a former primary, or one restored from before the log's end",
            hint=f"point source.dsn at the primary of timeline {old}; or {_ANEW}",
        )
    if old == now:
        if position.end_lsn > wal_end:
            raise GapError(
                f"the server's WAL ends at {wal_end}, the log holds it up to {position.end_lsn}:"
                " the server was set back, as by a copy of its files or a snapshot of its disk",
                hint=f"the log holds changes that the database no longer has; {_ANEW}",
            )
        return
    left_at = next((each.left_at for each in system.ancestors if each.timeline == old), None)
    if left_at is None:
        raise GapError(
            f"the server is on timeline {now} and names no point where it left timeline {old},"
            " from which the log was written: it descends from another, or its history file is"
            " gone",
            hint=f"what the log holds may never have been in this server; {_ANEW}",
        )
    if position.end_lsn > left_at:
        raise GapError(
            f"the server was promoted or restored to timeline {now} at {left_at}, the log holds"
            f" timeline {old} up to {position.end_lsn}: it is {position.end_lsn - left_at} bytes of"
            " WAL ahead of what the server ever had",
            hint="changes in the log between the two never happened there; name the standby's slot"
            f" in synchronized_standby_slots to keep the log from running ahead; {_ANEW}",
        )


def _usable_slot(
    config: Config, identity: ResumeIdentity, system: System, slot: Slot | None
) -> None:
    """Raise if the slot is missing, lost, or of a kind that would lose changes."""
    if slot is None:
        promoted = identity.timeline != system.timeline
        raise GapError(
            f'the replication slot "{config.slot}" does not exist'
            + (
                f" on this server, which was promoted or restored (timeline {system.timeline},"
                f" the log's is {identity.timeline})"
                if promoted
                else ""
            ),
            hint="only a slot with failover = true that a standby had synchronized outlives a"
            f" promotion (Postgres 17 and later: docs/OPERATIONS.md); {_ANEW}"
            if promoted
            else f"changes since it was dropped are in no stream; {_ANEW}",
        )
    if slot.wal_status == "lost" or slot.invalidation_reason:
        raise GapError(
            f'the replication slot "{config.slot}" was invalidated:'
            f" {_INVALIDATED.get(slot.invalidation_reason or '', 'the WAL it needs is gone')}",
            hint=_ANEW,
        )
    same_plugin(config, slot)
    one_phase(config, slot)


def one_phase(config: Config, slot: Slot) -> None:
    """Raise ConfigError if the slot sends prepared transactions before they commit."""
    if slot.two_phase:
        raise ConfigError(
            f'slot "{config.slot}" decodes prepared transactions before they are decided'
            " (two_phase): one that is rolled back would be in the log",
            hint="with no daemon running and no transaction prepared, on Postgres 18:"
            f" `cdc slot alter --no-two-phase`; before 18 a slot cannot be altered: {_ANEW}",
        )


def same_plugin(config: Config, slot: Slot) -> None:
    """Raise ConfigError if the slot has another output plugin than pgoutput."""
    if slot.plugin != "pgoutput":
        raise ConfigError(
            f'slot "{config.slot}" uses the plugin {slot.plugin}',
            hint="name a slot of our own in source.slot; `cdc setup` creates it with pgoutput",
        )
