"""How long tests take: a committed file, from which several processes share the tests out.

`tests/durations.json` has the seconds of one case of each test function, set-up and teardown
included, by module. It is written by `make test ARGS=--record-durations`, or from a report of any
earlier run: `python -m tests.durations junit.xml`. Only their relation matters, so a file from
another machine is as good. Functions that take next to nothing are left out.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Final
from xml.etree import ElementTree as ET

FILE: Final = Path(__file__).with_name("durations.json")
# What is shorter is left out of the file.
_SHORTEST_SECONDS: Final = 0.05
_LEFT_OUT_SECONDS: Final = 0.01
# A test of a module without records, by folder.
_UNKNOWN_SECONDS: Final = {"unit": 0.02, "property": 1.0, "golden": 0.02, "cases": 1.0}
_UNKNOWN_ELSEWHERE_SECONDS: Final = 5.0

# Module → function → seconds of one case.
Durations = dict[str, dict[str, float]]


def load() -> Durations:
    """Return what the file holds; nothing where there is none."""
    if not FILE.exists():
        return {}
    found: Durations = json.loads(FILE.read_text("utf-8"))
    return found


def recorded(durations: Durations, nodeid: str) -> float | None:
    """Return how long a test took; None if the file does not say it."""
    module, _, rest = nodeid.partition("::")
    return durations.get(module, {}).get(rest.partition("[")[0])


def seconds(durations: Durations, nodeid: str) -> float:
    """Return how long a test takes, or is likely to take."""
    module = nodeid.partition("::")[0]
    if module not in durations:
        return _UNKNOWN_SECONDS.get(Path(module).parent.name, _UNKNOWN_ELSEWHERE_SECONDS)
    took = recorded(durations, nodeid)
    return _LEFT_OUT_SECONDS if took is None else took


def record(cases: Iterable[tuple[str, str, float]]) -> None:
    """Write the file: (module, name, seconds) of each case; modules that did not run are kept."""
    took: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for module, name, each in cases:
        took[module][name.partition("[")[0]].append(each)
    root = FILE.parents[1]
    kept = {module: known for module, known in load().items() if (root / module).exists()}
    for module, functions in took.items():
        means = {name: round(fmean(each), 1) for name, each in functions.items()}
        kept[module] = {
            **{name: each for name, each in kept.get(module, {}).items() if name not in means},
            **{name: each for name, each in means.items() if each >= _SHORTEST_SECONDS},
        }
    FILE.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", "utf-8")


def in_report(junit: Path) -> list[tuple[str, str, float]]:
    """Return the cases of a junit report that ran."""
    return [
        (
            case.get("classname", "").replace(".", "/") + ".py",
            case.get("name", ""),
            float(case.get("time", "0")),
        )
        for case in ET.parse(junit).iter("testcase")  # noqa: S314 - our own report
        if case.find("skipped") is None and case.get("classname", "").startswith("tests.")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("junit", type=Path, nargs="+", help="reports of pytest --junitxml")
    record(case for junit in parser.parse_args().junit for case in in_report(junit))


if __name__ == "__main__":
    main()
