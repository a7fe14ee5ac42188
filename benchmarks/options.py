"""How much to run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The defaults are the pinned workloads; less is for a quick try, and the result says so."""

    rows: int | None = None  # each workload's own
    runs: int = 3
    peer_runs: int = 2
    peer: bool = True
    rate: int = 1000
    warm_up_seconds: float = 30.0  # the peer's JVM needs it
    seconds: float = 60.0
    megabytes: int = 2000
    keep: bool = False
    stages: bool = False  # of latency: where it comes from
