"""Read a follower's values in Redis as of one frontier: a state that the database had.

For applications in Python; docs/FOLLOWERS.md says how any other client does the same. Takes a
client of the `redis` package, of one server or a cluster, and knows nothing else but names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from cdc.errors import UnavailableError
from cdc.events import LSN

T = TypeVar("T")

_FIELDS: Final = ("generation", "seq", "lsn", "committed_at_us", "applying")
_PAUSE_SECONDS: Final = 0.005


class AsOf(NamedTuple, Generic[T]):
    """What was read, and the frontier at which the database was so."""

    found: T
    seq: int
    lsn: LSN
    committed_at_us: int


class RedisReader:
    """Reads of one follower."""

    def __init__(self, client: Any, prefix: str, follower: str) -> None:  # noqa: ANN401 - redis'
        self._client = client
        self._main = f"{prefix}:cdc:{follower}"

    def values(self, names: Sequence[str | bytes], *, seconds: float = 5.0) -> AsOf[list[Any]]:
        """Return the values of keys, None of those that are not there."""

        def get(client: Any) -> list[Any]:  # noqa: ANN401 - redis'
            with client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.get(name)
                return list(pipe.execute())

        return self.read(get, seconds=seconds)

    def read(self, work: Callable[[Any], T], *, seconds: float = 5.0) -> AsOf[T]:
        """Return what `work` reads with the client; it is called again until it met one state.

        Raises UnavailableError where no state stood still for so long.
        """
        deadline = time.monotonic() + seconds
        while True:
            before = self._frontier()
            if before is not None:
                found = work(self._client)
                if self._frontier() == before:
                    return AsOf(found, *before[1:])
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{self._main} was at no frontier for {seconds:g} s",
                    hint="it is being written to: wait, read less at once, or read without asking",
                )
            time.sleep(_PAUSE_SECONDS)

    def _frontier(self) -> tuple[int, int, LSN, int] | None:
        """Return the generation and the frontier; None where rows are on their way to the next."""
        stored = self._client.hmget(self._main, *_FIELDS)
        texts = [each.decode() if isinstance(each, bytes) else each for each in stored]
        generation, seq, lsn, committed_at_us, applying = texts
        if seq is None or applying:
            return None
        return int(generation), int(seq), LSN.parse(lsn), int(committed_at_us)
