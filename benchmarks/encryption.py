"""encryption: what an encrypted column costs a drain.

`drain-inserts` with its text of 100 to 200 characters encrypted, and as it is, in turns: by keys of
1,000 subjects, and by a new subject's key in each row, which is the most that it can cost.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from benchmarks import result, turns
from benchmarks.daemon import Daemon
from benchmarks.drain_inserts import Inserts

if TYPE_CHECKING:
    from benchmarks.options import Options

NAME: Final = "encryption"
_ROWS: Final = 300_000
_KNOWN: Final = Daemon("encrypted", encrypted={"payload": "some:k"})
_NEW: Final = Daemon("encrypted, new subjects", encrypted={"payload": "each:id"})


def run(options: Options) -> dict[str, Any]:
    """Return the result: how many microseconds of CPU an encrypted value adds to a row."""
    rows = options.rows or _ROWS
    pairs, versions = turns.run(Inserts(), _KNOWN, Daemon(), rows, options.runs, keep=options.keep)
    new, _ = turns.run(Inserts(), _NEW, Daemon(), rows, options.runs, keep=options.keep)
    return result.build(
        name=NAME,
        unit="CPU-us a value",
        value=_added(pairs),
        limit=None,
        floor=None,
        peer=None,
        cpu_s_per_million=statistics.median(pair.first.cpu_s_per_million for pair in pairs),
        peak_rss_mb=max(pair.first.peak_rss_mb for pair in pairs),
        versions=versions,
        details={
            "rows": rows,
            "new_subject_us": round(_added(new), 2),
            "ratios": turns.ratios(pairs),
            "new_ratios": turns.ratios(new),
            "runs": turns.runs(pairs),
            "new_runs": turns.runs(new),
        },
    )


def _added(pairs: list[turns.Pair]) -> float:
    """Return how many CPU-s a million rows cost more: microseconds a row."""
    return statistics.median(
        pair.first.cpu_s_per_million - pair.second.cpu_s_per_million for pair in pairs
    )
