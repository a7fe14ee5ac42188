"""Give data topics the cleanup.policy that the configuration has, when a session starts.

Which one a topic was given is in the resume record. So a changed configuration alters the topic,
and a policy that somebody else has set stays, and is found (`cdc.log.policies`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from msgspec.structs import replace

from cdc.errors import ConfigError
from cdc.events import table_name
from cdc.log import names, topics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.config import Config
    from cdc.log.records import ResumeIdentity, SchemaRecord
    from cdc.log.topics import Admin

log = logging.getLogger("cdc.log.cleanup")


def is_compacted(config: Config, version: SchemaRecord) -> bool:
    """Whether the table's topic is to be compacted."""
    return topics.cleanup(config, version.schema, version.table) != "delete"


def expect_keys(config: Config, versions: Iterable[SchemaRecord]) -> None:
    """Raise ConfigError for a table without a key whose topic is to be compacted."""
    for version in versions:
        if not version.key and is_compacted(config, version):
            name = table_name(version.schema, version.table)
            raise ConfigError(
                f"{name} has no key, so its topic can't be compacted: Kafka refuses its events",
                hint=f"tables.{name}.cleanup: delete, or give the table a key",
            )


def give(
    config: Config,
    admin: Admin,
    identity: ResumeIdentity,
    chosen: Iterable[str],
    versions: Iterable[SchemaRecord],
) -> ResumeIdentity:
    """Alter those of the chosen topics whose configuration has changed; return the new identity.

    `versions` are the tables' newest ones. A topic without one is not compacted yet: whether its
    table has a key is not known. Blocks. Raises ConfigError for a table without a key, with nothing
    altered.
    """
    newest = {each.topic: each for each in sorted(versions, key=lambda each: each.schema_id)}
    wanted = {topic: topics.cleanup_of(config, topic) for topic in chosen}
    given = identity.cleanup
    changed = {
        topic: its
        for topic, its in wanted.items()
        if given.get(topic, "delete") != its and (its == "delete" or topic in newest)
    }
    if not changed:
        return identity
    expect_keys(config, (newest[topic] for topic in changed if topic in newest))
    tables = {topic: names.table_of(config.prefix, topic) for topic in changed}
    settings = {topic: topics.data_topic(config, *table) for topic, table in tables.items()}
    topics.alter(admin, {topic: _held(each.config) for topic, each in settings.items()})
    log.info("cleanup.policy changed", extra={"fields": changed})
    return replace(identity, cleanup={**given, **changed})


def _held(settings: dict[str, str]) -> dict[str, str]:
    """Return settings with which nothing is compacted before it is known who lags."""
    held = {topics.LAG: str(topics.NO_COMPACTION)} if topics.LAG in settings else {}
    return settings | held


def compacted(identity: ResumeIdentity) -> frozenset[str]:
    """Return the topics that Kafka is to compact."""
    return frozenset(topic for topic, each in identity.cleanup.items() if each != "delete")
