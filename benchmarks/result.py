"""The result of a benchmark: one JSON object, printed as one line and saved in a file.

It has everything needed to judge a figure later: what it was compared with in the same run, each
single run, the kind of machine, the versions, the commit. No host name, no path.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import confluent_kafka

import cdc

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RESULTS = Path(__file__).parent / "results"
_REPOSITORY = Path(__file__).parent.parent
_MIB_PER_KIB = 1024
_MEASURED = ("cdc", "jobs", "sinks", "lockstep", "benchmarks/*.py")


def build(  # noqa: PLR0913 - the line's fields, by name
    *,
    name: str,
    unit: str,
    value: float,
    limit: float | None,
    floor: float | None,
    peer: float | None,
    cpu_s_per_million: float,
    peak_rss_mb: float,
    versions: Mapping[str, str],
    details: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the result; `value`, `limit`, `floor` and `peer` are medians in the same unit."""
    return {
        "name": name,
        "unit": unit,
        "value": _round(value),
        "limit": _round(limit),
        "floor": _round(floor),
        "peer": _round(peer),
        "of_floor": _ratio(value, floor),
        "of_peer": _ratio(value, peer),
        "cpu_s_per_million": round(cpu_s_per_million, 2),
        "peak_rss_mb": round(peak_rss_mb, 1),
        "machine": machine(),
        "versions": {**client_versions(), **versions},
        "commit": commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **details,
    }


def keep(result: Mapping[str, Any], folder: Path = RESULTS) -> None:
    """Write the result under its name, over the previous one."""
    folder.mkdir(exist_ok=True)
    text = json.dumps(result, indent=2, ensure_ascii=False)
    (folder / f"{result['name']}.json").write_text(text + "\n")


def line(result: Mapping[str, Any]) -> str:
    return json.dumps(result, ensure_ascii=False)


def machine() -> dict[str, Any]:
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    assert memory is not None
    return {
        "cpu": model.group(1) if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory.group(1)) / _MIB_PER_KIB**2, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
    }


def client_versions() -> dict[str, str]:
    return {
        "lockstep": cdc.__version__,
        "python": platform.python_version(),
        "psycopg": version("psycopg"),
        "confluent-kafka": version("confluent-kafka"),
        "librdkafka": confluent_kafka.libversion()[0],
    }


def commit() -> str:
    """Return the commit measured, marked if the measured code has uncommitted changes."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        # The result files are left out: every benchmark changes them.
        changed = _git("status", "--porcelain", "--", *_MEASURED)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=_REPOSITORY, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _round(value: float | None) -> float | None:
    """Round to the figure's precision: integers for rows per second, tenths for milliseconds."""
    if value is None:
        return None
    return round(value) if value >= 1000 else round(value, 2)


def _ratio(value: float, to: float | None) -> float | None:
    return round(value / to, 3) if to else None
