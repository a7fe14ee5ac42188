"""digest: what the digests of the log cost a drain.

`drain-inserts` by the daemon as it is and by one that keeps no digests, in turns.
"""

from __future__ import annotations

import statistics
import sys
from typing import TYPE_CHECKING, Any, Final

from benchmarks import result, turns
from benchmarks.daemon import Daemon
from benchmarks.drain_inserts import Inserts

if TYPE_CHECKING:
    from benchmarks.options import Options

NAME: Final = "digest"
# A pair costs a few seconds, and the median of many is steadier than a few long ones.
_PAIRS_PER_RUN: Final = 4
_ROWS: Final = 600_000
_LIMIT_PERCENT: Final = 4.0
_PROGRAM: Final = """
from cdc.cli.main import main
from cdc.log import batch

class Nothing:
    def add(self, messages): pass
    def add_columns(self, keys, values): pass
    def digest(self): return bytes(32)

batch.ChunkHash = Nothing
main()
"""
# A daemon that keeps no digests.
NO_DIGESTS: Final = (sys.executable, "-c", _PROGRAM)


def run(options: Options) -> dict[str, Any]:
    """Return the result: by how many percent a row costs more CPU time with digests."""
    ours, without = Daemon(), Daemon("without digests", program=NO_DIGESTS)
    rows, count = options.rows or _ROWS, _PAIRS_PER_RUN * options.runs
    pairs, versions = turns.run(Inserts(), ours, without, rows, count, keep=options.keep)
    found = turns.ratios(pairs)
    return result.build(
        name=NAME,
        unit="% CPU a row",
        value=(found["cpu_s_per_million"] - 1) * 100,
        limit=_LIMIT_PERCENT,
        floor=None,
        peer=None,
        cpu_s_per_million=statistics.median(pair.first.cpu_s_per_million for pair in pairs),
        peak_rss_mb=max(pair.first.peak_rss_mb for pair in pairs),
        versions=versions,
        details={"rows": rows, "ratios": found, "runs": turns.runs(pairs)},
    )
