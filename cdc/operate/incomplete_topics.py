"""Which topics do not equal the tables of their names, by log and catalog."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.log import reader
from cdc.snapshot.incremental import topic
from cdc.source.members import read_members

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.completeness import Completeness, IncompleteTopic
    from cdc.source.connection import Connection


def read_incomplete(
    connection: Connection, config: Config, completeness: Completeness
) -> list[IncompleteTopic]:
    """Return the incomplete topics. Queries the catalog only if there may be any. Blocks."""
    if not completeness.incomplete_names:
        return []
    members = read_members(connection, config.publication)
    return completeness.incomplete({(each.schema, each.table) for each in members})


def incomplete_by_log(config: Config) -> list[IncompleteTopic]:
    """Return the incomplete topics without asking the catalog. Blocks."""
    versions = reader.read_schemas(config)
    # After the versions, which its records name.
    return topic.completeness(versions, topic.read_all(config)).incomplete(None)
