"""Run many schedules: `python -m tests.simulation --schedules 100000 --seed 0`.

The last line is a JSON object: schedules, sessions, faults by kind, seconds. A failing schedule is
named by its seed, which is enough to repeat it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import orjson

from tests.simulation.run import BrokenError, run

# How many schedules one process runs at a time; a multiple of those that share a history.
_PIECE = 1_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="the first schedule")
    parser.add_argument("--processes", type=int, default=1)
    chosen = parser.parse_args()
    began = time.monotonic()
    faults: Counter[str] = Counter()
    sessions = 0
    last = chosen.seed + chosen.schedules
    firsts = range(chosen.seed, last, _PIECE)
    counts = [min(_PIECE, last - first) for first in firsts]
    with ProcessPoolExecutor(chosen.processes) as pool:
        try:
            for outcome in pool.map(run, firsts, counts):
                sessions += outcome.sessions
                faults += outcome.faults
        except BrokenError as error:
            print(error, file=sys.stderr)  # noqa: T201 - the result
            pool.shutdown(cancel_futures=True)
            return 1
    reported = {
        "schedules": chosen.schedules,
        "seed": chosen.seed,
        "sessions": sessions,
        "faults": dict(faults.most_common()),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(orjson.dumps(reported).decode())  # noqa: T201 - the result
    return 0


if __name__ == "__main__":
    sys.exit(main())
