"""Read a follower's documents as of one frontier: a state that the database had.

For applications in Python; docs/FOLLOWERS.md says how any other client does the same. Takes a
client of opensearch-py and knows nothing else but names.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from cdc.errors import UnavailableError
from cdc.events import LSN
from sinks.opensearch.mapping import index_part

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_PAUSE_SECONDS: Final = 0.01
_FIELDS: Final = ("generation", "seq", "lsn", "committed_at_us", "applying")


class SearchedAsOf(NamedTuple, Generic[T]):
    """What was found, and the frontier at which the database was so."""

    found: T
    seq: int
    lsn: LSN
    committed_at_us: int


class OpenSearchReader:
    """Searches of one follower."""

    def __init__(self, client: Any, prefix: str, follower: str) -> None:  # noqa: ANN401 - any client
        self._client, self._follower = client, follower
        self._records = f"{index_part(prefix)}-followers"

    def read(self, work: Callable[[Any], T], *, seconds: float = 5.0) -> SearchedAsOf[T]:
        """Return what `work` finds with the client; it is called again until it met one state.

        `work` is to search, not to get by `_id` in real time, which sees more. Raises
        UnavailableError where no state stood still for so long.
        """
        deadline = time.monotonic() + seconds
        while True:
            before = self._frontier()
            if before is not None:
                found = work(self._client)
                if self._frontier() == before:
                    _, seq, lsn, committed_at_us = before
                    return SearchedAsOf(found, seq, LSN.parse(lsn), committed_at_us)
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{self._follower} stood at no frontier for as long as a search takes",
                    hint="search less at a time, or wait until the follower has caught up",
                )
            time.sleep(_PAUSE_SECONDS)

    def _frontier(self) -> tuple[int, int, str, int] | None:
        """Return generation, seq, LSN and time; None while something is being applied."""
        found = self._client.get(
            index=self._records, id=self._follower, _source_includes=",".join(_FIELDS)
        )["_source"]
        generation, seq, lsn, committed_at_us, applying = (found.get(name) for name in _FIELDS)
        if seq is None or applying is not None:
            return None
        return generation, seq, lsn, committed_at_us
