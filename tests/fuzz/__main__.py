"""Search one target, or all, for an input that breaks it: `python -m tests.fuzz TARGET --runs N`.

An input that breaks a target is written to `--artifacts` and ends the search with an exit code
other than 0; so does one that takes more than ten seconds or more than a gigabyte. The same seed
and number of runs give the same search. The last line of the output is a JSON object: target, runs,
seconds, seed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import atheris
import orjson

# Before the targets are imported: only modules imported in this block are measured for coverage.
with atheris.instrument_imports(include=["cdc"]):
    from tests.fuzz import targets

_TIMEOUT_SECONDS: Final = 10
_RSS_MB: Final = 1_024
# Long enough for a transaction of several tables, short enough to be fast.
_MAX_BYTES: Final = 4_096


def _search(name: str, runs: int, seed: int, artifacts: Path, corpus: str) -> None:
    """Run libFuzzer, which ends the process."""
    target = targets.TARGETS[name]
    for number, data in enumerate(target.seeds()):
        (Path(corpus) / f"{number:05}").write_bytes(data)
    options = [
        f"-runs={runs}",
        f"-seed={seed}",
        f"-timeout={_TIMEOUT_SECONDS}",
        f"-rss_limit_mb={_RSS_MB}",
        f"-max_len={_MAX_BYTES}",
        "-len_control=0",  # the recordings already have the length that inputs need
        f"-artifact_prefix={artifacts}/{name}-",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *options, corpus], target.check)
    atheris.Fuzz()


def _in_child(name: str, runs: int, seed: int, artifacts: Path) -> int:
    """Search in a child, because libFuzzer exits by itself; return its exit status."""
    began = time.monotonic()
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="lockstep-fuzz-") as folder:
        child = os.fork()
        if child == 0:
            tempfile.tempdir = folder  # the parent removes its files
            corpus = tempfile.mkdtemp()
            _search(name, runs, seed, artifacts, corpus)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    seconds = round(time.monotonic() - began, 1)
    reported = {"target": name, "runs": runs, "seconds": seconds, "seed": seed, "broken": code != 0}
    print(orjson.dumps(reported).decode(), flush=True)  # noqa: T201 - the result
    return code


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=[*targets.TARGETS, "all"])
    parser.add_argument("--runs", type=int, default=100_000, help="inputs for each target")
    parser.add_argument("--seed", type=int, default=1, help="not 0, which means by chance")
    parser.add_argument("--artifacts", type=Path, default=Path(tempfile.gettempdir()))
    chosen = parser.parse_args()
    names = [chosen.target]
    if chosen.target == "all":
        names = [name for name in targets.TARGETS if name != targets.PLANTED]
    codes = [_in_child(name, chosen.runs, chosen.seed, chosen.artifacts) for name in names]
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())
