"""Read a follower's documents as of one frontier: a state that the database had.

For applications in Python; docs/FOLLOWERS.md describes how any other client does the same. Takes a
client of opensearch-py and needs only names in addition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from cdc.errors import UnavailableError
from cdc.events import LSN
from lockstep.sinks import as_of
from lockstep.sinks.opensearch.mapping import index_part

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.sinks.as_of import AsOf

T = TypeVar("T")

_PAUSE_SECONDS: Final = 0.01


class OpenSearchReader:
    """Searches of one follower."""

    def __init__(self, client: Any, prefix: str, follower: str) -> None:  # noqa: ANN401 - any client
        self._client, self._follower = client, follower
        self._records = f"{index_part(prefix)}-followers"

    def read(self, work: Callable[[Any], T], *, seconds: float = 5.0) -> AsOf[T]:
        """Return what `work` finds with the client; call it again until it has read a single state.

        `work` must search, not get by `_id` in real time, which sees more. Raises UnavailableError
        if no state lasted for one call of `work` within `seconds`.
        """
        error = UnavailableError(
            f"{self._follower} was at no frontier long enough for one search",
            hint="search less at a time, or wait until the follower has caught up",
        )
        waiting = as_of.Waiting(seconds, _PAUSE_SECONDS, error)
        return as_of.read(self.frontier, lambda: work(self._client), waiting)

    def frontier(self) -> as_of.StoreFrontier | None:
        """Return the store's frontier; None while a cut is being applied, or if none ever was."""
        got = self._client.get(
            index=self._records,
            id=self._follower,
            _source_includes=",".join(as_of.FIELDS),
            ignore=404,  # no record, or no index of records yet
        )
        found = got.get("_source", {})
        generation, seq, lsn, committed_at_us, applying = map(found.get, as_of.FIELDS)
        if seq is None or applying is not None:
            return None
        return as_of.StoreFrontier(generation, seq, LSN.parse(lsn), committed_at_us)
