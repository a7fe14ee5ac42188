"""Read a follower's values in Redis as of one frontier: a state that the database had.

For applications in Python; docs/FOLLOWERS.md describes how any other client does the same. Takes a
client of the `redis` package, of one server or a cluster, and needs only names in addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from cdc.errors import UnavailableError
from cdc.events import LSN
from lockstep.sinks import as_of
from lockstep.sinks.as_of import AsOf

T = TypeVar("T")

_PAUSE_SECONDS: Final = 0.005


class RedisReader:
    """Reads of one follower."""

    def __init__(self, client: Any, prefix: str, follower: str) -> None:  # noqa: ANN401 - redis'
        self._client = client
        self._main = f"{prefix}:cdc:{follower}"

    def values(self, names: Sequence[str | bytes], *, seconds: float = 5.0) -> AsOf[list[Any]]:
        """Return the values of keys, None for missing ones."""

        def get(client: Any) -> list[Any]:  # noqa: ANN401 - redis'
            with client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.get(name)
                return list(pipe.execute())

        return self.read(get, seconds=seconds)

    def read(self, work: Callable[[Any], T], *, seconds: float = 5.0) -> AsOf[T]:
        """Return what `work` reads with the client; call it again until it has read a single state.

        Raises UnavailableError if no state lasted for one call of `work` within `seconds`.
        """
        error = UnavailableError(
            f"{self._main} was at no frontier for {seconds:g} s",
            hint="it is being written to: wait, read less at once, or read without asking",
        )
        waiting = as_of.Waiting(seconds, _PAUSE_SECONDS, error)
        return as_of.read(self.frontier, lambda: work(self._client), waiting)

    def frontier(self) -> as_of.StoreFrontier | None:
        """Return the store's frontier; None while a cut is being written."""
        stored = self._client.hmget(self._main, *as_of.FIELDS)
        texts = [each.decode() if isinstance(each, bytes) else each for each in stored]
        generation, seq, lsn, committed_at_us, applying = texts
        if seq is None or applying:
            return None
        return as_of.StoreFrontier(int(generation), int(seq), LSN.parse(lsn), int(committed_at_us))
