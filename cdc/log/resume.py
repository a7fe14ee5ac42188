"""The resume record as it goes into the log, and the writing of a pipeline's first.

Every later one is written by the daemon, in the same Kafka transaction as the data it speaks of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.log import names, records
from cdc.log.publisher import LANES, Publisher

if TYPE_CHECKING:
    from cdc.config import Config


def write_first(
    config: Config,
    identity: records.ResumeIdentity,
    position: records.ResumePosition,
    *beside: tuple[str, bytes, bytes | None],
) -> None:
    """Commit both parts, and what goes with them. Fences a daemon: only while none may run."""
    for lane in reversed(range(LANES)):
        publisher = Publisher(config, lane)
        publisher.open()
    publisher.add(*record(config, identity))
    publisher.add(*record(config, position))
    for each in beside:
        publisher.add(*each)
    publisher.commit()


def record(
    config: Config, part: records.ResumeIdentity | records.ResumePosition
) -> tuple[str, bytes, bytes]:
    """Return topic, key and value of a part of the resume record."""
    kind = "identity" if isinstance(part, records.ResumeIdentity) else "position"
    key = records.resume_key(config.pipeline, kind)
    return names.resume_topic(config.prefix), key, records.encode(part)
