"""Write a pipeline's first resume record.

Every later one is written by the daemon, in the same Kafka transaction as the data it speaks of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.log import names, records
from cdc.log.publisher import Publisher

if TYPE_CHECKING:
    from cdc.config import Config


def write_first(
    config: Config, identity: records.ResumeIdentity, position: records.ResumePosition
) -> None:
    """Commit both parts. Fences a running daemon: only for pipelines that have no record."""
    publisher = Publisher(config)
    publisher.open()
    add(publisher, config, identity, position)
    publisher.commit()


def add(
    publisher: Publisher, config: Config, *parts: records.ResumeIdentity | records.ResumePosition
) -> None:
    """Add parts of the resume record to the publisher's transaction."""
    topic = names.resume_topic(config.prefix)
    for part in parts:
        kind = "identity" if isinstance(part, records.ResumeIdentity) else "position"
        publisher.add(topic, records.resume_key(config.pipeline, kind), records.encode(part))
