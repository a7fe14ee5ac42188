"""Every attack at length, one after another: `make campaign`, or `python -m tests.campaign --help`.

Simulated schedules, fuzzed inputs, the model on every major of Postgres, faults under load, during
snapshots, in followers, of processes that keep views, around the archive; states of the past in
each store. Each run draws a new
seed, unless `--seed` names one. Each attack prints its figures as one line of JSON; `--write FILE`
keeps them all, with what repeats them. Ends with an exit code other than 0 as soon as one of them
finds something.
"""

from __future__ import annotations

import argparse
import os
import platform
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import orjson

ROOT: Final = Path(__file__).parents[1]
# The share of the fuzzed inputs for each target: the readers of the stream's bytes get most.
_SHARES: Final = {"decode": 0.56, "sequence": 0.03, "rows": 0.06, "records": 0.3, "names": 0.05}
_ARCHIVES_AT_ONCE: Final = 3
_PARTS: Final = (
    *("simulation", "fuzz", "model", "faults", "snapshot", "followers", "views"),
    *("archives", "past"),
)


class FoundError(Exception):
    """An attack has found something; its output shows what."""


def _run(*command: str, **env: str) -> str:
    """Return what a module prints; its own output goes on to the terminal."""
    child = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append(line)
        print(line, end="", flush=True)  # noqa: T201 - the progress
    if child.wait() != 0:
        raise FoundError(f"python -m {' '.join(command)} ended with {child.returncode}")
    return "".join(lines)


def _reported(output: str) -> dict[str, Any]:
    lines = [line for line in output.splitlines() if line.startswith("{")]
    reported: dict[str, Any] = orjson.loads(lines[-1])
    return reported


def simulation(chosen: argparse.Namespace) -> dict[str, Any]:
    options = ("--schedules", chosen.schedules, "--seed", chosen.seed)
    processes = ("--processes", os.cpu_count() or 1)
    return _reported(_run("tests.simulation", *map(str, options + processes)))


def fuzz(chosen: argparse.Namespace) -> dict[str, Any]:
    targets = {}
    for name, share in _SHARES.items():
        runs = max(1, int(chosen.inputs * share))
        reported = _reported(
            _run("tests.fuzz", name, "--runs", str(runs), "--seed", str(chosen.seed))
        )
        targets[name] = {key: reported[key] for key in ("runs", "seconds", "seed")}
    return {"inputs": sum(each["runs"] for each in targets.values()), "targets": targets}


def model(chosen: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    env = {
        "LOCKSTEP_TEST_MAJORS": "all",
        "LOCKSTEP_RUNS": str(chosen.runs),
        "LOCKSTEP_STEPS": str(chosen.steps),
        "LOCKSTEP_SEED": str(chosen.seed),
    }
    _run("pytest", "-q", "tests/stateful", "-p", "no:randomly", **env)
    figures = {key.removeprefix("LOCKSTEP_").lower(): value for key, value in env.items()}
    return {**figures, "seconds": round(time.monotonic() - began, 1)}


def faults(chosen: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "faults.json"
        env = {
            "LOCKSTEP_KILLS": str(chosen.kills),
            "LOCKSTEP_SEED": str(chosen.seed),
            "LOCKSTEP_RESULT": str(result),
        }
        _run("pytest", "-q", "tests/faults", "-m", "campaign", **env)
        reported: dict[str, Any] = orjson.loads(result.read_bytes())
        return reported


def snapshot(chosen: argparse.Namespace) -> dict[str, Any]:
    """Take `snapshots` initial snapshots, and as many incremental ones."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "snapshots.jsonl"
        env = {
            "LOCKSTEP_SNAPSHOTS": str(chosen.snapshots),
            "LOCKSTEP_SEED": str(chosen.seed),
            "LOCKSTEP_RESULT": str(result),
        }
        _run("pytest", "-q", "tests/faults", "-m", "snapshots", "-p", "no:randomly", **env)
        reported = [orjson.loads(line) for line in result.read_bytes().splitlines()]
    return {
        "first_seed": chosen.seed,
        "initial": _rounds([each for each in reported if each["kind"] == "Round"]),
        "live": _rounds([each for each in reported if each["kind"] == "LiveRound"]),
    }


def _rounds(reported: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of some rounds, added up."""
    kinds: Counter[str] = Counter()
    for each in reported:
        kinds.update(each["injuries"])
    summed = (
        *("generations", "snapshot_rows", "gone", "changes", "read_again"),
        *("lost", "duplicate", "reordered", "seconds"),
    )
    return {
        "rounds": len(reported),
        "injuries": kinds.total(),
        "kinds": dict(kinds.most_common()),
        **{name: round(sum(each[name] for each in reported), 1) for name in summed},
    }


def followers(chosen: argparse.Namespace) -> dict[str, Any]:
    """Run rounds of faults in followers and their stores, and reads of the mirrors."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "followers.json"
        env = {
            "LOCKSTEP_FOLLOWERS": str(chosen.followers),
            "LOCKSTEP_READS": str(chosen.reads),
            "LOCKSTEP_SEED": str(chosen.seed),
            "LOCKSTEP_RESULT": str(result),
        }
        _run("pytest", "-q", "tests/faults", "-m", "followers", "-p", "no:randomly", **env)
        reported: dict[str, Any] = orjson.loads(result.read_bytes())
        return reported


def views(chosen: argparse.Namespace) -> dict[str, Any]:
    """Compare all views in many seeds of one process, and while real processes are killed."""
    with tempfile.TemporaryDirectory() as folder:
        seeds, killed = Path(folder) / "seeds.jsonl", Path(folder) / "killed.json"
        env = {"LOCKSTEP_VIEWS": str(chosen.views), "LOCKSTEP_SEED": str(chosen.seed)}
        one_process = "tests/integration/test_views_campaign.py"
        ended = ("-q", "--tier", "all", "-p", "no:randomly")
        _run("pytest", one_process, *ended, **env, LOCKSTEP_RESULT=str(seeds))
        env = {"LOCKSTEP_VIEW_KILLS": str(chosen.view_kills), "LOCKSTEP_SEED": str(chosen.seed)}
        killing = ("tests/faults", "-m", "view_kills")
        _run("pytest", *killing, *ended, **env, LOCKSTEP_RESULT=str(killed))
        reported = [orjson.loads(line) for line in seeds.read_bytes().splitlines()]
        processes: dict[str, Any] = orjson.loads(killed.read_bytes())
    kinds: Counter[str] = Counter()
    for each in reported:
        kinds.update(each["kinds"])
    summed = ("cuts", "ddl", "comparisons", "differences")
    return {
        "one_process": {
            "first_seed": chosen.seed,
            "seeds": len(reported),
            "views": min(each["views"] for each in reported),
            "kills": kinds.total(),
            "kinds": dict(kinds.most_common()),
            **{name: sum(each[name] for each in reported) for name in summed},
            "seconds": round(sum(each["seconds"] for each in reported), 1),
        },
        "processes": processes,
    }


def archives(chosen: argparse.Namespace) -> dict[str, Any]:
    """Run rounds of faults around the archive, several at a time: most of a round is waiting."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "archives.jsonl"
        share, more = divmod(chosen.archives, _ARCHIVES_AT_ONCE)

        def rounds(first: int, many: int) -> None:
            env = {
                "LOCKSTEP_ARCHIVES": str(many),
                "LOCKSTEP_SEED": str(first),
                "LOCKSTEP_RESULT": str(result),
            }
            _run("pytest", "-q", "tests/faults", "-m", "archives", "-p", "no:randomly", **env)

        with ThreadPoolExecutor(_ARCHIVES_AT_ONCE) as pool:
            first, running = chosen.seed, []
            for number in range(min(chosen.archives, _ARCHIVES_AT_ONCE)):
                many = share + (number < more)
                running.append(pool.submit(rounds, first, many))
                first += many
            for each in running:
                each.result()
        reported = [orjson.loads(line) for line in result.read_bytes().splitlines()]
    kinds: Counter[str] = Counter()
    for each in reported:
        kinds.update(each["kinds"])
    summed = ("writes", "events", "bases", "deleted", "seconds")
    return {
        "first_seed": chosen.seed,
        "rounds": len(reported),
        "faults": kinds.total(),
        "kinds": dict(kinds.most_common()),
        **{name: round(sum(each[name] for each in reported), 1) for name in summed},
    }


def past(chosen: argparse.Namespace) -> dict[str, Any]:
    """Fill each store with the source's states at random LSNs of a workload."""
    began = time.monotonic()
    env = {"LOCKSTEP_PAST_STATES": str(chosen.states), "LOCKSTEP_SEED": str(chosen.seed)}
    test = "tests/integration/test_past_lsns.py"
    _run("pytest", "-q", test, "--tier", "all", "-p", "no:randomly", **env)
    seconds = round(time.monotonic() - began, 1)
    return {"seed": chosen.seed, "states": chosen.states, "seconds": seconds}


def summary(figures: dict[str, Any]) -> str:
    """Return in words what the figures are: a paragraph of docs/GUARANTEES.md."""
    faults, fuzz, rounds = (figures[name] for name in ("faults", "fuzz", "followers"))
    archive = figures["archives"]
    simulated, snapshot = figures["simulation"], figures["snapshot"]
    snapshots = (snapshot["initial"], snapshot["live"])
    (seed,) = {each["seed"] for each in fuzz["targets"].values()}
    return (
        f"The last long runs: {faults['faults']:,} faults under load (seed {faults['seed']}):"
        f" {faults['events']:,} events, {faults['lost']} lost, {faults['duplicate']} duplicate,"
        f" {faults['reordered']} reordered; {sum(each['rounds'] for each in snapshots)} snapshots"
        f" with {sum(each['injuries'] for each in snapshots)} faults (from seed"
        f" {snapshot['first_seed']}): {sum(each['lost'] for each in snapshots)} lost,"
        f" {sum(each['duplicate'] for each in snapshots)} duplicate,"
        f" {sum(each['reordered'] for each in snapshots)} reordered;"
        f" {simulated['schedules']:,} simulated schedules (seed"
        f" {simulated['seed']}): {simulated['sessions']:,} sessions, no finding;"
        f" {fuzz['inputs']:,} fuzzed inputs (seed {seed}): no finding; {rounds['rounds']} rounds of"
        f" followers with {rounds['injuries']} faults (from seed {rounds['first_seed']}):"
        f" {rounds['commits']:,} commits, {rounds['differences']} differences,"
        f" {rounds['mirror_reads']:,} reads of mirrors without half a transaction;"
        f" {archive['rounds']} rounds around the archive with {archive['faults']} faults (from seed"
        f" {archive['first_seed']}): {archive['events']:,} events, each archived once,"
        f" {archive['deleted']:,} offsets deleted by retention meanwhile, each store the database"
        f"{_of_views(figures['views']) if 'views' in figures else ''}."
    )


def _of_views(figures: dict[str, Any]) -> str:
    one, many = figures["one_process"], figures["processes"]
    return (
        f"; {one['seeds']} seeds of {one['views']} views in one process with {one['kills']} kills"
        f" (from seed {one['first_seed']}): {one['comparisons']:,} comparisons after"
        f" {one['cuts']:,} cuts with {one['ddl']:,} commands of DDL,"
        f" {one['differences']} differences; {many['rounds']} rounds of {many['views']} views"
        f" in three stores with {many['injuries']} faults (from seed {many['first_seed']}):"
        f" {many['comparisons']:,} comparisons at {sum(many['cuts'].values()):,} frontiers,"
        f" {many['differences']} differences"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--only", choices=_PARTS, help="one attack")
    parser.add_argument("--schedules", type=int, default=100_000, help="simulated schedules")
    parser.add_argument("--inputs", type=int, default=10_000_000, help="fuzzed inputs")
    parser.add_argument("--runs", type=int, default=5, help="runs of the model on each major")
    parser.add_argument("--steps", type=int, default=600, help="operations in a run of the model")
    parser.add_argument("--kills", type=int, default=1_000, help="faults under load")
    parser.add_argument(
        "--snapshots", type=int, default=50, help="snapshots with faults, of each kind"
    )
    parser.add_argument("--followers", type=int, default=50, help="rounds of followers with faults")
    parser.add_argument("--reads", type=int, default=500, help="reads at random frontiers")
    parser.add_argument("--views", type=int, default=50, help="seeds of views in one process")
    parser.add_argument(
        "--view-kills", type=int, default=50, help="rounds of kills of processes that keep views"
    )
    parser.add_argument("--archives", type=int, default=50, help="rounds around the archive")
    parser.add_argument("--states", type=int, default=30, help="states of the past, in each store")
    parser.add_argument("--seed", type=int, default=1 + secrets.randbelow(1_000_000))
    parser.add_argument("--write", type=Path, help="keep the figures in this file")
    chosen = parser.parse_args()
    figures: dict[str, Any] = {}
    if chosen.write and chosen.write.exists():
        figures = orjson.loads(chosen.write.read_bytes())
    figures["machine"] = {"processors": os.cpu_count(), "python": platform.python_version()}
    attacks = {
        "simulation": simulation,
        "fuzz": fuzz,
        "model": model,
        "faults": faults,
        "snapshot": snapshot,
        "followers": followers,
        "views": views,
        "archives": archives,
        "past": past,
    }
    for name, attack in attacks.items():
        if chosen.only in (None, name):
            try:
                figures[name] = attack(chosen)
            except FoundError as error:
                print(error, file=sys.stderr)  # noqa: T201 - the result
                return 1
            if chosen.write:
                options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
                chosen.write.write_bytes(orjson.dumps(figures, option=options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
