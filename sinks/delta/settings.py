"""How a follower keeps its mirrors, and what may apply a batch to one."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deltalake import DeltaTable

    from lockstep.sinks.delta.lake import CommitInfo
    from lockstep.sinks.delta.work import Work


class Applier(Protocol):
    """A writer of large tables, and of those with features that only it supports."""

    def apply(self, table: DeltaTable, work: Work, commit: CommitInfo) -> None:
        """Apply the work in one commit; raise ConflictError if another came first."""
        ...

    def alter(
        self,
        table: DeltaTable,
        facts: Mapping[str, object],
        *,
        columns: Sequence[Mapping[str, object]] = (),
        properties: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Add columns, as a schema has them in JSON, or set properties."""
        ...

    def maintain(self, table: DeltaTable, cluster: Sequence[str], hours: int | None) -> None:
        """Join small files; delete files that were removed so many hours ago, if given."""
        ...


class DeltaSettings(NamedTuple):
    """How a follower keeps its mirrors: `cdc.config.followers.DeltaFollower`, completed."""

    pipeline: str
    follower: str
    prefix: str  # of topics
    path: str
    storage: Mapping[str, str] = {}
    history: frozenset[str] = frozenset()
    soft: bool = False
    partition: Mapping[str, Sequence[str]] = {}
    cluster: Mapping[str, Sequence[str]] = {}
    # Whether the initial rows of a table, by schema and name, bypassed the log
    # (jobs/copying/direct.py).
    is_direct: Callable[[str, str], bool] | None = None
    applier: str = "auto"  # delta-rs, vectors, spark
    # The applier for tables above `spark_above_bytes`; this module does not depend on Spark.
    large: Applier | None = None
    spark_above_bytes: int = 1_000_000_000
    optimize_minutes: float = 60.0
    vacuum_hours: float = 168.0
    # For how long a frontier is held back at which no mirror has changed.
    idle_seconds: float = 0.0

    @property
    def owner(self) -> dict[str, object]:
        """The owner of the lake."""
        return {"pipeline": self.pipeline, "follower": self.follower}
