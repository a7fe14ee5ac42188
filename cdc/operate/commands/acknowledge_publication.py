"""Accept a publication that was altered manually: `cdc publication acknowledge`.

What the publication left out meanwhile is in no stream, so the tables concerned are read again: the
commands go into the stream first, then the resume record pins the publication as it is. If this is
stopped in between, the gap is found again, and a table that is read twice ends in the same state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from cdc.errors import ConfigError
from cdc.log import resume
from cdc.operate.commands.acknowledge import refuse_while_streaming, resume_record
from cdc.operate.commands.snapshots import request
from cdc.publication import diff
from cdc.source.commands import require_secret
from cdc.source.connection import connect
from cdc.source.members import read_members
from cdc.source.publications import read_pinned_with_tables

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.records import PinnedPublication, ResumeIdentity, ResumePosition
    from cdc.publication.diff import Gap


class AcceptedPublication(NamedTuple):
    """What can be accepted, and the log's records, which pin another publication."""

    gaps: list[Gap]
    publication: PinnedPublication  # as it is
    identity: ResumeIdentity
    position: ResumePosition

    @property
    def tables(self) -> list[str]:
        """The tables that have lost changes and are still published, by their names in the log."""
        lost = {table for gap in self.gaps for table in gap.tables}
        return sorted(lost & self.publication.tables.keys())


def survey(config: Config) -> AcceptedPublication:
    """Return what can be accepted; raise for what can't, and while a daemon runs."""
    identity, position = resume_record(config)
    old = identity.publication
    with connect(config) as connection:
        now, existing = read_pinned_with_tables(connection, config.publication, old)
    found = diff.gaps(old, now, existing)
    if old.oid != now.oid:
        # Postgres can't decode what was written while there was no publication.
        raise diff.combined_error(found)  # type: ignore[misc] # another oid is a gap
    if now.options is not None and (unsent := diff.unpublished_operations(now.options)):
        raise ConfigError(
            f"the publication {now.name} does not publish {', '.join(unsent)}",
            hint=f"{diff.publish_all_sql(now.name)}; then `cdc publication acknowledge` again",
        )
    return AcceptedPublication(found, now, identity, position)


def acknowledge(
    config: Config, altered: AcceptedPublication, *, read: bool = True
) -> dict[str, str]:
    """Accept the publication as it is; return the requested snapshots, by id."""
    refuse_while_streaming(config)
    requested: dict[str, str] = {}
    if read:
        require_secret(config)
        wanted = {diff.split_name(table) for table in altered.tables}
        with connect(config) as connection, connection.transaction():
            known = read_members(connection, config.publication)
            chosen = [each for each in known if (each.schema, each.table) in wanted]
            requested = request(connection, config, chosen, empty_first=True)
    identity = replace(altered.identity, publication=altered.publication)
    read_before = (altered.identity, altered.position)
    resume.write_fenced(config, identity, altered.position, read=read_before)
    return requested
