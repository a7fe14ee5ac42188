"""How much to run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The defaults are the pinned workloads; smaller values are for a quick run."""

    rows: int | None = None  # None: each workload's default
    runs: int = 3
    peer_runs: int = 2
    peer: bool = True
    rate: int = 1000
    warm_up_seconds: float = 30.0  # the peer's JVM needs it
    seconds: float = 60.0
    megabytes: int = 2000
    keep: bool = False
    tables: int = 1_000  # follow-many
    stages: bool = False  # latency: also measure its stages
