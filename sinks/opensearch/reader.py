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
    from collections.abc import Callable, Collection

    from lockstep.sinks.as_of import AsOf

T = TypeVar("T")

_PAUSE_SECONDS: Final = 0.01


class OpenSearchReader:
    """Searches of one follower."""

    def __init__(self, client: Any, prefix: str, follower: str) -> None:  # noqa: ANN401 - any client
        self._client, self._follower = client, follower
        self._records = f"{index_part(prefix)}-followers"

    def read(
        self,
        work: Callable[[Any], T],
        *,
        seconds: float = 5.0,
        tables: Collection[str] | None = None,
    ) -> AsOf[T]:
        """Return what `work` finds with the client; call it again until it has read a single state.

        `work` must search, not get by `_id` in real time, which sees more; `tables` are those that
        it searches, by default all. Raises UnavailableError if no state lasted for one call of
        `work` within `seconds`, and at once if the index of one of these tables is lost.
        """
        error = UnavailableError(
            f"{self._follower} was at no frontier long enough for one search",
            hint="search less at a time, or wait until the follower has caught up",
        )
        waiting = as_of.Waiting(seconds, _PAUSE_SECONDS, error)

        def frontier() -> as_of.StoreFrontier | None:
            found = self.frontier()
            if found is not None:
                self._expect(tables, found.lost)
            return found

        return as_of.read(frontier, lambda: work(self._client), waiting)

    def _expect(self, tables: Collection[str] | None, lost: tuple[str, ...]) -> None:
        """Raise UnavailableError if one of the tables is lost."""
        if missing := [name for name in lost if tables is None or name in tables]:
            raise UnavailableError(
                f"{self._follower} has lost its index of {', '.join(missing)}",
                hint="the follower builds it again: see `cdc status`; to search others meanwhile,"
                " name them in `tables`",
            )

    def frontier(self) -> as_of.StoreFrontier | None:
        """Return the store's frontier; None while a cut is being applied, or if none ever was."""
        got = self._client.get(
            index=self._records,
            id=self._follower,
            _source_includes=",".join((*as_of.FIELDS, "lost")),
            ignore=404,  # no record, or no index of records yet
        )
        found = got.get("_source", {})
        generation, seq, lsn, committed_at_us, applying = map(found.get, as_of.FIELDS)
        if seq is None or applying is not None:
            return None
        lost = tuple(found.get("lost") or ())  # records of older versions have none
        return as_of.StoreFrontier(generation, seq, LSN.parse(lsn), committed_at_us, lost)
