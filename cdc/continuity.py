"""Prove at the start that slot, log and source meet; name the gap where they do not.

Pure. Going on in spite of any of these would lose changes or mix two databases, so each raises with
what differs and the remedy, and exits with a code on which no supervisor restarts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.errors import ConfigError, GapError

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.records import Publication, ResumeIdentity, ResumePosition
    from cdc.source.catalog import Slot

_ANEW = "`cdc teardown --topics`, then `cdc setup` and a snapshot, begin anew"


class Found(NamedTuple):
    """What stands on both sides now."""

    system_identifier: str
    timeline: int
    database: str
    slot: Slot
    publication: Publication
    partitions: dict[str, int]  # of the pinned topics that exist
    topic_ids: dict[str, str]
    tables: frozenset[str]  # those of the pinned publication that still exist


def check(config: Config, identity: ResumeIdentity, position: ResumePosition, found: Found) -> None:
    """Raise GapError or ConfigError where the stream does not continue the log."""
    same_writer(config, identity)
    _same_source(identity, found)
    same_plugin(config, found.slot)
    if found.slot.confirmed_lsn > position.end_lsn:
        raise GapError(
            f'slot "{config.slot}" is at {found.slot.confirmed_lsn}, the log only at'
            f" {position.end_lsn}: the changes between are gone from the stream",
            hint=f"someone moved or recreated the slot; {_ANEW}",
        )
    _same_topics(identity, found)


def same_plugin(config: Config, slot: Slot) -> None:
    """Raise ConfigError where the slot speaks another language than ours."""
    if slot.plugin != "pgoutput":
        raise ConfigError(
            f'slot "{config.slot}" uses the plugin {slot.plugin}',
            hint="name a slot of our own in source.slot; `cdc setup` creates it with pgoutput",
        )


def same_writer(config: Config, identity: ResumeIdentity) -> None:
    """Raise ConfigError where the log belongs to another slot, and so to another pipeline."""
    if identity.slot != config.slot:
        raise ConfigError(
            f'the log under "{config.prefix}" is written from slot "{identity.slot}", the'
            f' configuration names "{config.slot}"',
            hint="use that slot, or a log.prefix of its own for the other pipeline",
        )


def _same_source(identity: ResumeIdentity, found: Found) -> None:
    if (identity.system_identifier, identity.database) != (
        found.system_identifier,
        found.database,
    ):
        raise GapError(
            f"the log comes from database {identity.database} of system"
            f" {identity.system_identifier}, this is {found.database} of"
            f" {found.system_identifier}",
            hint=f"point source.dsn at the database the log comes from; or {_ANEW}",
        )
    if identity.timeline != found.timeline:
        raise GapError(
            f"the server is on timeline {found.timeline}, the log was written from"
            f" {identity.timeline}: it was promoted or restored, and may have lost changes that"
            " the log holds",
            hint=_ANEW,
        )
    same_publication(identity.publication, found.publication, found.tables)


def same_publication(old: Publication, new: Publication, existing: frozenset[str]) -> None:
    """Raise GapError where a table has left the publication since `old`, even if it came back.

    A table that was dropped (not in `existing`) or renamed (its membership goes on under another
    name) has lost no change.
    """
    if old.oid != new.oid:
        raise GapError(
            f'publication "{new.name}" was dropped and created again',
            hint=f"changes made in between were not streamed; {_ANEW}",
        )
    back = sorted(t for t, member in old.tables.items() if new.tables.get(t, member) != member)
    if back:
        raise GapError(
            f'{", ".join(back)} left the publication "{new.name}" and came back',
            hint=f"changes made in between are in no stream; {_ANEW}",
        )
    members = set(new.tables.values()) - {0}
    gone = sorted(
        table
        for table, member in old.tables.items()
        if table not in new.tables and member not in members and table in existing
    )
    if gone:
        raise GapError(
            f'publication "{new.name}" no longer has {", ".join(gone)}',
            hint="changes of a table are lost while it is out; put it back and re-snapshot it, or"
            " run `cdc setup` to accept that it is no longer captured",
        )


def _same_topics(identity: ResumeIdentity, found: Found) -> None:
    for topic, pinned in identity.partitions.items():
        actual = found.partitions.get(topic)
        if actual is None:
            raise GapError(
                f"topic {topic} is gone, though the log's resume record counts on it",
                hint=f"its events are lost downstream; {_ANEW}",
            )
        known = identity.topic_ids.get(topic)
        if known is not None and found.topic_ids.get(topic, known) != known:
            raise GapError(
                f"topic {topic} was deleted and created again: what it held is gone",
                hint=f"its events are lost downstream; {_ANEW}",
            )
        if actual != pinned:
            raise ConfigError(
                f"topic {topic} has {actual} partitions, the resume record pins {pinned}: keys"
                " would change partition and lose their order",
                hint=_ANEW,
            )
