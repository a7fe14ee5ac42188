"""Canaries among the records that a follower has read: when the newest was sent.

The daemon publishes only canaries that it sent itself. A log may still hold older ones, which any
client could write, so a message that is not a canary, or has a time in the future, is skipped.
"""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Any

import msgspec

from cdc.log import names
from cdc.log.follower_reports import CANARY
from cdc.source.authority import CLOCK_US

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cdc.config import Config
    from cdc.log.partitions import Partition
    from cdc.log.ranges import Records

# The most digits of a time in microseconds since 1970.
_MOST_DIGITS = 18


def newest(config: Config, records: Mapping[Partition, Records]) -> int | None:
    """Return when the newest canary was sent, in microseconds since 1970."""
    found = records.get((names.messages_topic(config.prefix), 0))
    if found is None:
        return None
    key = b'{"prefix":"%b"}' % CANARY.encode()
    for at in range(len(found.keys) - 1, -1, -1):
        if found.keys[at] == key:
            sent = sent_at(found.values[at])
            if sent is not None:
                return sent
    return None


def sent_at(value: bytes | None) -> int | None:
    """Return when a canary was sent; None if it is no canary or its time is in the future."""
    try:
        event: Any = msgspec.json.decode(value or b"null")
        content = base64.b64decode(event["message"]["content"], validate=True)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if not content.isdigit() or len(content) > _MOST_DIGITS:
        return None
    sent = int(content)
    return sent if sent <= time.time_ns() // 1_000 + CLOCK_US else None
