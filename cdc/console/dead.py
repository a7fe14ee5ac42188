"""What was given up or was too large, for the panel of dead letters. Read when it is asked for.

Events that webhooks and queues gave up are records in one small topic, read by a consumer that
stays open; an answer, or why there is none, is shared by all viewers for `SHARED_SECONDS`. Events
too large for their topics are in a topic with their content, so `cdc dead list` reads them, one at
a time.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from cdc.console import commands
from cdc.errors import CDCError
from cdc.log.group_records import GroupReadings

if TYPE_CHECKING:
    from pathlib import Path

    from cdc.config import Config

SHARED_SECONDS: Final = 3.0
# More is for the command line; undecided ones come first.
_MOST: Final = 200


class DeadLetterList:
    def __init__(self, config: Config, config_path: Path) -> None:
        self._config = config
        self._config_path = config_path
        self._readings: GroupReadings | None = None
        self._given_up: dict[str, Any] | CDCError = {}
        self._read_at = -SHARED_SECONDS
        self._turn = asyncio.Lock()
        self._large_turn = asyncio.Lock()

    def close(self) -> None:
        """Close the consumer, once no request is answered any more."""
        if self._readings is not None:
            self._readings.close()

    async def given_up(self) -> dict[str, Any]:
        """Return what webhooks and queues gave up and what was decided; raise CDCError."""
        async with self._turn:
            if time.monotonic() - self._read_at >= SHARED_SECONDS:
                try:
                    self._given_up = await asyncio.to_thread(self._read)
                except CDCError as error:
                    self._given_up = error
                self._read_at = time.monotonic()
            if isinstance(self._given_up, CDCError):
                raise self._given_up
            return self._given_up

    async def large(self) -> list[Any]:
        """Return the newest events too large for their topics, oldest first; raise CDCError."""
        async with self._large_turn:
            found = await commands.listed(self._config_path, ("dead", "list", "--json"))
        return found[-_MOST:]

    def _read(self) -> dict[str, Any]:
        if self._readings is None:
            self._readings = GroupReadings(self._config)
        self._readings.read_new()
        found = sorted(
            self._readings.undelivered(),
            key=lambda each: (each.state != "undelivered", -each.at_us),
        )
        return {
            "count": len(found),
            "undecided": sum(each.state == "undelivered" for each in found),
            "events": [
                {
                    "kind": each.group.partition(".")[0],
                    "name": each.group.partition(".")[2],
                    "id": each.id,
                    "place": f"{each.topic} [{each.partition}] {each.offset}",
                    "why": each.why,
                    "attempts": each.attempts,
                    "at_ms": each.at_us // 1_000,
                    "state": each.state,
                    "decided_by": each.decided_by,
                    "decided_at_ms": each.decided_at_us and each.decided_at_us // 1_000,
                }
                for each in found[:_MOST]
            ],
        }
