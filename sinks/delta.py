"""Mirrors in Delta Lake: a table each, all of them at one frontier after each batch.

A cut is gathered first: `write` makes Arrow of it, and nothing is in any table until `commit`
applies it to all tables that it changes, several at a time, one Delta commit each. Behind the last
one the row of `_frontiers` says which version of each mirror stands at the cut's end. Killed in
between, some mirrors are ahead of that row, and readers of the row do not see it; the next cut goes
at least as far as any of them.

Two copies of a follower: each commit is one of Delta's transactions of the same app, so the later
one fails, looks again, and finds the work done. A copy that is behind skips what the mirrors hold,
and writes no row while any mirror is ahead of its own frontier.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from cdc.errors import InvariantError, StoreLostError
from cdc.events import LSN
from sinks import delta_layout, delta_merge
from sinks.contract import Applied, Changes, Standing
from sinks.delta_frontiers import Frontiers
from sinks.delta_table import Keeper, Mirror

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sinks.contract import Version

T = TypeVar("T")
R = TypeVar("R")

# Commits wait for storage more than they compute.
_AT_ONCE: Final = 4


class Settings(NamedTuple):
    """How a follower keeps its mirrors: `cdc.config.followers.DeltaFollower`, made whole."""

    pipeline: str
    follower: str
    prefix: str  # of topics
    path: str
    storage: Mapping[str, str] = {}
    history: frozenset[str] = frozenset()
    soft: bool = False
    partition: Mapping[str, Sequence[str]] = {}
    cluster: Mapping[str, Sequence[str]] = {}
    # Whether the first rows of a table, by schema and name, went past the log (jobs/direct.py).
    is_direct: Callable[[str, str], bool] | None = None
    applier: str = "auto"
    spark_above_bytes: int = 1_000_000_000
    optimize_minutes: float = 60.0
    vacuum_hours: float = 168.0


class DeltaSink:
    """The mirrors of one follower."""

    whole_rows = False
    parallel = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        owner = {"pipeline": settings.pipeline, "follower": settings.follower}
        self._frontiers = Frontiers(settings.path, settings.storage, owner)
        self._mirrors: dict[str, Mirror] = {}
        self._pending: dict[str, list[Changes]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> Settings:
        return self._settings

    def __setstate__(self, settings: Settings) -> None:
        self.__init__(settings)  # type: ignore[misc]

    def open(self) -> Standing | None:
        self._frontiers.open()
        self._mirrors.clear()
        self._pending.clear()
        newest, reached = self._frontiers.newest, self._frontiers.reached
        if newest is None:
            return Standing(self._nothing(), reached) if reached else None
        found = self._every(self._standing, list(newest.versions.items()))
        return Standing(newest.applied, max(reached, *found, 0))

    def _standing(self, place: str, version: int) -> int:
        """Return the seq of a mirror that must be there, at that version at least."""
        mirror = self._mirror(place)
        if not mirror.find() or mirror.table.version() < version:
            raise StoreLostError(f"the mirror {mirror.path} is not what it was")
        return mirror.seq

    def _nothing(self) -> Applied:
        return Applied(self._settings.pipeline, self._frontiers.generation, 0, LSN(0), 0, 0, 0, {})

    def anew(self, generation: int) -> None:
        self._frontiers.anew(generation)

    def histories(self) -> frozenset[str]:
        return self._settings.history

    def begin(self, reached: int, versions: Sequence[Version]) -> None:
        self._pending.clear()
        self._frontiers.begin(reached)
        newest = {version.topic: version for version in versions}
        self._every(self._meet, [(self._place(each), each) for each in newest.values()])

    def _meet(self, place: str, version: Version) -> None:
        """Find the mirror, or make it where there was none."""
        mirror = self._mirror(place)
        mirror.name = version.name
        if not mirror.find():
            if self._frontiers.newest and place in self._frontiers.newest.versions:
                raise StoreLostError(f"there is no Delta table {mirror.path} any more")
            mirror.make(version)
        elif mirror.seq > self._frontiers.reached:
            raise StoreLostError(f"{mirror.path} is ahead of all that _frontiers knows of")

    def write(self, changes: Changes) -> int:
        place = self._place(changes.version)
        seq = self._mirrors[place].seq
        news = [change for change in changes.changes if change.seq > seq]
        truncated = changes.truncated if (changes.truncated or 0) > seq else None
        if news or truncated is not None:
            part = changes._replace(changes=news, truncated=truncated)
            self._pending.setdefault(place, []).append(part)
        return len(news) + (truncated is not None)

    def commit(self, applied: Applied) -> None:
        self._every(
            lambda place, parts: self._apply(place, parts, applied), list(self._pending.items())
        )
        self._pending.clear()
        mirrors = self._mirrors
        if all(mirror.seq <= applied.seq for mirror in mirrors.values()):
            versions = {place: mirror.table.version() for place, mirror in mirrors.items()}
            self._frontiers.commit(applied, versions)

    def _apply(self, place: str, parts: list[Changes], applied: Applied) -> None:
        mirror, changes = self._mirrors[place], _joined(parts)
        mirror.make(changes.version, changes.changes)
        mirror.apply(mirror.work(changes), applied, delta_merge.apply)

    def rows(self, version: Version, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:  # noqa: ARG002
        raise InvariantError(f"rows of {version.name} are asked for, and mirrors keep their own")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _place(self, version: Version) -> str:
        """Return where a table's mirror is, below the path: named as its topic."""
        return version.topic.removeprefix(f"{self._settings.prefix}.")

    def _mirror(self, place: str) -> Mirror:
        if place not in self._mirrors:
            mine = self._settings
            keeper = Keeper(
                mine.pipeline,
                mine.follower,
                self._frontiers.generation,
                mine.storage,
                mine.soft,
                mine.history,
                mine.partition,
                mine.is_direct,
            )
            path = delta_layout.path(mine.path, mine.prefix, place)
            self._mirrors[place] = Mirror(place, path, keeper)
        return self._mirrors[place]

    def _every(self, do: Callable[[str, T], R], of: Sequence[tuple[str, T]]) -> list[R]:
        """Do it for each table, several at a time; raise the first error once all have ended."""
        if len(of) < 2:  # noqa: PLR2004 - one needs no thread
            return [do(place, each) for place, each in of]
        self._pool = self._pool or ThreadPoolExecutor(_AT_ONCE, "delta")
        running = [self._pool.submit(do, place, each) for place, each in of]
        wait(running)
        return [each.result() for each in running]


def _joined(parts: list[Changes]) -> Changes:
    """Return what came in several parts as one."""
    if len(parts) == 1:
        return parts[0]
    versions = {version.schema_id: version for part in parts for version in part.versions}
    truncated = max((part.truncated or 0 for part in parts), default=0)
    return Changes(
        tuple(versions.values()),
        [change for part in parts for change in part.changes],
        truncated or None,
    )
