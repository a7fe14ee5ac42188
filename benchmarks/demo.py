"""demo: how long a newcomer waits, from `make demo` until changes flow into all stores.

A clone of this commit runs it twice with a home of its own: the first time everything is downloaded
and built (`first_s`), the second time nothing is. The console has been open by then. `value` is
the second time, which ends when each of the six followers has reported a frontier after the first
change of the load.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.request import urlopen

import orjson

from benchmarks import result
from benchmarks.failure import BenchmarkError
from benchmarks.family import Family
from benchmarks.programs import Program
from benchmarks.progress import Every, say

if TYPE_CHECKING:
    from benchmarks.options import Options

NAME: Final = "demo"
LIMIT_S: Final = 40.0
_FIRST_LIMIT_S: Final = 240.0
_REPOSITORY: Final = Path(__file__).parent.parent
_FOR: Final = "40s"
_CONSOLE: Final = "demo: watch it in a browser: "
_STARTED: Final = "demo: seed "
_TIMEOUT_SECONDS: Final = 900.0
# Rarely: the demo has both cores for itself.
_LOOK_SECONDS: Final = 0.5


def run(options: Options) -> dict[str, Any]:
    """Run the demo twice in a clone, and return its result."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-bench-demo-"))
    try:
        clone = folder / "clone"
        subprocess.run(["git", "clone", "-q", str(_REPOSITORY), str(clone)], check=True)
        (folder / "home").mkdir()
        first = _demo(folder, "first")
        say(f"the first time: {first['every_store_s']:.0f} s")
        again = _demo(folder, "again")
        say(f"the second time: {again['every_store_s']:.0f} s")
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return result.build(
        name=NAME,
        unit="s",
        value=again["every_store_s"],
        limit=LIMIT_S,
        floor=None,
        peer=None,
        cpu_s_per_million=0.0,
        peak_rss_mb=again["peak_rss_mb"],
        versions={},
        details={
            "first_s": first["every_store_s"],
            "first_limit_s": _FIRST_LIMIT_S,
            "first": first,
            "again": again,
        },
    )


def _demo(folder: Path, name: str) -> dict[str, float]:
    """Run `make demo`; return the seconds from its start until the console and stores are there."""
    log, began = folder / f"{name}.log", time.monotonic()
    command = ["make", "demo", f"FOR={_FOR}", "ARGS=--json"]
    with Program(
        "the demo", command, log, environment=_environment(folder), folder=folder / "clone"
    ) as program:
        family, progress = Family(program.pid), Every(10.0)
        started_s = console_s = None
        while program.running():
            elapsed, text = time.monotonic() - began, log.read_text("utf-8", "replace")
            if started_s is None and _STARTED in text:
                started_s = elapsed
            if console_s is None and _CONSOLE in text:
                console_s = elapsed if _answers(text) else None
            progress.say(f"{elapsed:.0f} s")
            if elapsed > _TIMEOUT_SECONDS:
                raise BenchmarkError("the demo does not end", hint=text[-2_000:])
            family.look()
            time.sleep(_LOOK_SECONDS)
        program.wait(1.0)
        outcome = orjson.loads(program.output().splitlines()[-1])
    if not outcome["equal"] or started_s is None or console_s is None:
        raise BenchmarkError("the demo was not shown", hint=str(outcome))
    return {
        # The command counts from its own start, `make` comes before.
        "every_store_s": round(started_s + outcome["every_store_seconds"], 1),
        "first_change_s": round(started_s + outcome["first_change_seconds"], 1),
        "console_s": round(console_s, 1),
        "make_s": round(started_s, 1),
        "peak_rss_mb": round(sum(family.peaks_mb.values()), 1),
    }


def _answers(text: str) -> bool:
    """Return whether the console answers at the address that was printed."""
    address = text.partition(_CONSOLE)[2].split()[0]
    try:
        with urlopen(address, timeout=5) as answer:  # noqa: S310 - loopback, http
            return bool(answer.status == 200)
    except OSError:
        return False


def _environment(folder: Path) -> dict[str, str]:
    """Return an environment with a home of its own, and without this one's virtual environment."""
    kept = {k: v for k, v in os.environ.items() if k not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    own = str(Path(sys.executable).parent)
    path = ":".join(each for each in kept["PATH"].split(":") if each != own)
    caches = {k: v for k, v in kept.items() if not k.startswith(("XDG_", "LOCKSTEP_"))}
    return {**caches, "HOME": str(folder / "home"), "PATH": path}
