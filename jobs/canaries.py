"""Canaries among what a follower has read: when the newest one was sent."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import msgspec

from cdc.log import names
from cdc.log.followers import CANARY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cdc.config import Config
    from cdc.log.ranges import Place, Records


def newest(config: Config, records: Mapping[Place, Records]) -> int | None:
    """Return when the newest canary was sent, in microseconds since 1970."""
    found = records.get((names.messages_topic(config.prefix), 0))
    if found is None:
        return None
    key = b'{"prefix":"%b"}' % CANARY.encode()
    for at in range(len(found.keys) - 1, -1, -1):
        if found.keys[at] == key:
            message: Any = msgspec.json.decode(found.values[at])["message"]
            return int(base64.b64decode(message["content"]))
    return None
