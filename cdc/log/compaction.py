"""Whether Kafka's compaction explains that a range of a topic lacks events.

Compaction removes events from the middle of a partition, and no offset shows which: only the counts
of the frontiers do. A range that has fewer events than they count was compacted if its topic is
compacted, or ever was; in any other topic they are lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdc.errors import CompactedError, PermissionDeniedError
from cdc.log import reader, topics
from cdc.log.policies import parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.config import Config
    from cdc.log.partitions import Partition

_START: Final = (
    "start from a base (`cdc archive status` shows the newest), or have the rows read again: `cdc"
    " snapshot TABLE`"
)


def explained(config: Config, partition: Partition, what: str) -> CompactedError | None:
    """Return the error for a partition that lacks events; None if nothing compacts its topic.

    `what` says of which range how many are there, and how many should be. Blocks.
    """
    topic, number = partition
    if not is_compacted(config, topic):
        return None
    return CompactedError(f"{topic} [{number}] {what}: Kafka has compacted it", hint=_START)


def is_compacted(config: Config, topic: str) -> bool:
    """Whether Kafka compacts a topic, or did. Blocks."""
    resume = reader.read_resume(config)
    if resume is not None and topic in resume[0].cleanup:
        return True
    settings = readable_settings(config, [topic]).get(topic, {})
    return "compact" in parts(settings.get("cleanup.policy", ""))


def readable_settings(config: Config, chosen: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the topics' settings, none where the principal may not read them. Blocks.

    A reader needs no such right: what the pipeline compacts is in the resume record.
    """
    try:
        return topics.settings_of(topics.admin(config), chosen)
    except PermissionDeniedError:
        return {}
