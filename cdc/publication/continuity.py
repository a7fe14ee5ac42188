"""Prove at the start that slot, log and source fit together; name the gap if they do not.

Pure. Continuing in spite of a mismatch would lose changes or mix two databases, so each one raises
an error with the difference and the remedy, and an exit code on which no supervisor restarts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from cdc.errors import ConfigError, GapError
from cdc.events import LSN
from cdc.publication import diff

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.records import PinnedPublication, ResumeIdentity, ResumePosition
    from cdc.source.catalog import SourceState
    from cdc.source.slots import Slot
    from cdc.source.timelines import System

_START_OVER: Final = "`cdc teardown --topics`, then `cdc setup` and a snapshot, start over"
# `--topics` alone is refused then: the log may be another pipeline's.
_IF_DELETED: Final = (
    "or, if that no longer exists, `cdc teardown --topics --other-source` starts over"
)


def check(
    config: Config,
    identity: ResumeIdentity,
    position: ResumePosition,
    system: System,
    source: SourceState,
) -> ResumeIdentity:
    """Return the identity to continue with; raise if the stream does not continue the log.

    It has the server's timeline, which is another one after a promotion, and the publication with
    the tables that were added to it.
    """
    require_same_writer(config, identity)
    publishes = require_same_source(config, identity, position, system, source)
    return replace(identity, timeline=system.timeline, publication=publishes)


def start_lsn(source: SourceState) -> LSN:
    """Return the LSN from which the slot sends, before anything is confirmed to it."""
    assert source.slot is not None
    return source.slot.confirmed_flush_lsn or LSN(0)


def require_same_writer(config: Config, identity: ResumeIdentity) -> None:
    """Raise ConfigError if the log belongs to another slot, and so to another pipeline."""
    if identity.slot != config.slot:
        raise ConfigError(
            f'the log under "{config.prefix}" is written from slot "{identity.slot}", the'
            f' configuration names "{config.slot}"',
            hint="use that slot, or a log.prefix of its own for the other pipeline",
        )


def require_same_source(
    config: Config,
    identity: ResumeIdentity,
    position: ResumePosition,
    system: System,
    source: SourceState,
) -> PinnedPublication:
    """Return the publication to continue with.

    Raises if the source is not the one the log comes from, or has lost what must follow.
    """
    require_same_stream(config, identity, position, system, source)
    if source.publication is None:
        raise GapError(
            f'the publication "{config.publication}" does not exist',
            hint=f"changes made while it was missing are not streamed; {_START_OVER}",
        )
    return diff.continue_with(
        identity.publication,
        source.publication,
        source.tables,
        f"after {position.end_lsn}, where the log ends",
    )


def require_same_stream(
    config: Config,
    identity: ResumeIdentity,
    position: ResumePosition,
    system: System,
    source: SourceState,
) -> None:
    """Raise if server, database or slot do not continue the log; ignores the publication."""
    require_same_database(
        identity, system.identifier, source.database, _whereabouts(identity, source)
    )
    _require_same_history(identity, position, system, source.wal_end)
    _require_usable_slot(config, identity, system, source.slot)
    assert source.slot is not None
    confirmed_lsn = source.slot.confirmed_flush_lsn
    if confirmed_lsn is not None and confirmed_lsn > position.end_lsn:
        raise GapError(
            f'slot "{config.slot}" is at {confirmed_lsn}, the log only at'
            f" {position.end_lsn}: the changes between are no longer in the stream",
            hint="someone moved or recreated the slot, or the resume topic lost its newest"
            f" records; {_START_OVER}",
        )


def require_same_database(
    identity: ResumeIdentity, system_identifier: str, database: str, whereabouts: str = ""
) -> None:
    """Raise GapError if the log comes from another database; its name alone is no identity."""
    if identity.system_identifier != system_identifier:
        raise GapError(
            f"the log comes from system {identity.system_identifier}, this is {system_identifier}:"
            " another cluster, as after pg_upgrade or where a dump was restored",
            hint=f"point source.dsn at the cluster the log comes from; {_IF_DELETED}",
        )
    if identity.database != database:
        more = f"; {whereabouts}" if whereabouts else ""
        raise GapError(
            f"the log comes from database {identity.database}, this is {database}{more}",
            hint=f"point source.dsn at the database the log comes from; {_IF_DELETED}",
        )


def _whereabouts(identity: ResumeIdentity, source: SourceState) -> str:
    if identity.database in source.databases:
        return "both exist"
    if source.slot is not None and source.slot.database == source.database:
        return "it was renamed, and the slot with it"
    return "the former no longer exists: dropped, or renamed"


def _require_same_history(
    identity: ResumeIdentity, position: ResumePosition, system: System, wal_end: LSN
) -> None:
    """Raise GapError if the server never had some of what the log holds, or lost it."""
    old, now = identity.timeline, system.timeline
    if old > now:
        raise GapError(
            f"the server is on timeline {now}, the log was written from {old}, which is younger:"
            " this is a former primary, or one restored from before the log's end",
            hint=f"point source.dsn at the primary of timeline {old}; or {_START_OVER}",
        )
    if old == now:
        if position.end_lsn > wal_end:
            raise GapError(
                f"the server's WAL ends at {wal_end}, the log holds it up to {position.end_lsn}:"
                " the server was set back, as by a copy of its files or a snapshot of its disk",
                hint=f"the log holds changes that the database no longer has; {_START_OVER}",
            )
        return
    left_at = next((each.left_at for each in system.ancestors if each.timeline == old), None)
    if left_at is None:
        raise GapError(
            f"the server is on timeline {now} and names no point where it left timeline {old},"
            " from which the log was written: it descends from another, or its history file is"
            " missing",
            hint=f"what the log holds may never have been in this server; {_START_OVER}",
        )
    if position.end_lsn > left_at:
        raise GapError(
            f"the server was promoted or restored to timeline {now} at {left_at}, the log holds"
            f" timeline {old} up to {position.end_lsn}: it is {position.end_lsn - left_at} bytes of"
            " WAL ahead of what the server ever had",
            hint="changes in the log between the two never happened there; name the standby's slot"
            f" in synchronized_standby_slots to keep the log from running ahead; {_START_OVER}",
        )


def _require_usable_slot(
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
            f" promotion (Postgres 17 and later: docs/OPERATIONS.md); {_START_OVER}"
            if promoted
            else f"changes since it was dropped are in no stream; {_START_OVER}",
        )
    if slot.loss:
        raise GapError(
            f'the replication slot "{config.slot}" was invalidated: {slot.loss}',
            hint=_START_OVER,
        )
    if slot.plugin != "pgoutput":
        raise ConfigError(
            f'slot "{config.slot}" uses the plugin {slot.plugin}',
            hint="name a slot of our own in source.slot; `cdc setup` creates it with pgoutput",
        )
    require_one_phase(config, slot)


def require_one_phase(config: Config, slot: Slot) -> None:
    """Raise ConfigError if the slot sends prepared transactions before they commit."""
    if slot.two_phase:
        raise ConfigError(
            f'slot "{config.slot}" decodes prepared transactions before they are decided'
            " (two_phase): one that is rolled back would be in the log",
            hint="with no daemon running and no transaction prepared, on Postgres 18:"
            f" `cdc slot alter --no-two-phase`; before 18 a slot cannot be altered: {_START_OVER}",
        )
