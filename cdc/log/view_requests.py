"""Requests to followers' jobs to delete a view or to compute it again, in their reports' topic.

A command makes one, and repeats it until the store shows that it is done. It is a key without a
value: compaction removes it, and readers of reports skip it. A job obeys only requests that were
made while it runs, since one that starts later may have another configuration.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from cdc.errors import CDCError
from cdc.events import row_key
from cdc.log import names
from cdc.log.topic_readings import TopicReadings

if TYPE_CHECKING:
    from confluent_kafka import Message

    from cdc.config import Config

# Between two looks of a job.
LOOK_SECONDS: Final = 3.0
# A look waits no longer for the brokers: the next one reads what this one did not.
ANSWER_SECONDS: Final = 3.0


class ViewRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The key of a request: one of `drop` and `rebuild` is the view."""

    pipeline: str
    follower: str
    drop: str = ""
    rebuild: str = ""
    request: str = ""  # of a rebuild, which the store names once it is done; a drop needs none


def key(config: Config, follower: str, **what: str) -> bytes:
    """Return the key by which a follower's job is asked; `what`: the other fields."""
    return msgspec.json.encode(ViewRequest(config.pipeline, follower, **what))


_decode: Final = msgspec.json.Decoder(ViewRequest).decode


class ViewRequests(TopicReadings):
    """Reads the requests to one follower's job that are made from the first look on."""

    def __init__(self, config: Config, follower: str) -> None:
        super().__init__(config, names.followers_topic(config.prefix))
        self._follower = follower
        self._asked = dict[ViewRequest, None]()
        self._has_read = False
        self._next_look = 0.0  # monotonic

    def due(self) -> list[ViewRequest]:
        """Return what was asked for since the last look, if another one is due."""
        if time.monotonic() < self._next_look:
            return []
        try:
            self.read_new(ANSWER_SECONDS)
        except CDCError:  # what needs the brokers reports that they do not answer
            return []
        finally:
            self._next_look = time.monotonic() + LOOK_SECONDS
        found, self._asked = [*self._asked], {}
        is_first, self._has_read = not self._has_read, True
        return [] if is_first else found

    def note(self, message: Message) -> None:
        if message.value() is not None:  # a report
            return
        with suppress(msgspec.MsgspecError):
            asked = _decode(row_key(message.key()) or b"")
            if (asked.pipeline, asked.follower) == (self._config.pipeline, self._follower):
                self._asked[asked] = None

    def forget(self) -> None:
        # What was obeyed, or made before the job started, is read again: commands repeat the rest.
        self._asked.clear()
        self._has_read = False
