"""Run schedules: `python -m tests.simulation --schedules N --seed S`."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import yaml

from cdc.config import Config, load
from cdc.errors import CDCError
from tests.property.histories import History
from tests.property.stream import PREFIX
from tests.simulation.edges import played
from tests.simulation.oracle import Oracle
from tests.simulation.walsender import history
from tests.simulation.world import World

# How many schedules share a history: building one, with its expected log, takes as long as a few.
_SHARED: Final = 8
# Mostly short histories, where little hides an error, and some that write partitions often.
_TRANSACTIONS: Final = (4, 6, 6, 20)
# How long changes linger, whether batches are written directly, and their most events.
_SETTINGS: Final = tuple(product((0, 0, 20), ("off", "on", "auto"), (1, 2, 5)))


class BrokenError(AssertionError):
    """A schedule whose resulting log is wrong."""


class Outcome(NamedTuple):
    schedules: int
    sessions: int
    faults: Counter[str]


@cache
def config(max_events: int, direct: str = "off", linger_ms: int = 0) -> Config:
    """Return a configuration with batches so small that transactions are cut."""
    settings = {
        "pipeline": PREFIX,
        "source": {"dsn": "postgresql://localhost/shop_db"},
        "log": {
            "bootstrap_servers": "localhost:1",
            "prefix": PREFIX,
            "partitions": 4,
            "direct": direct,
        },
        "control": {"secret": "the secret of all that is simulated"},
        "batch": {"max_events": max_events, "max_wait_ms": 50, "linger_ms": linger_ms},
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lockstep.yaml"
        file.write_text(yaml.safe_dump(settings), "utf-8")
        return load(file, {})


def schedules(first: int, count: int) -> Iterator[tuple[int, History]]:
    """Yield seeds with their histories; a seed's history depends only on the seed."""
    for seed in range(first, first + count):
        yield seed, _history(seed // _SHARED)


@cache
def _recent(_: int) -> dict[int, History]:
    return {}


def _history(number: int) -> History:
    known = _recent(0)
    if number not in known:
        known.clear()
        known[number] = history(
            number, 1 + Random(number).randrange(_TRANSACTIONS[number % len(_TRANSACTIONS)])
        )
    return known[number]


def simulate(seed: int, happened: History, totals: Counter[str] | None = None) -> int:
    """Run one schedule; return how many sessions it took. Raises BrokenError with the seed."""
    linger_ms, direct, max_events = _SETTINGS[seed % len(_SETTINGS)]
    world = World(config(max_events, direct, linger_ms), happened, seed)
    oracle = Oracle(happened, world.broker, world.slot, PREFIX, due=world.due)
    try:
        world.run()
        assert world.pipeline is not None
        oracle.finish(
            offsets_reported=not world.scheduler.faults["report has no offset"],
            proven=world.pipeline.replay.proven,
        )
    except (AssertionError, CDCError) as error:
        faults = ", ".join(f"{name} {n}" for name, n in sorted(world.scheduler.faults.items()))
        raise BrokenError(f"schedule {seed} ({faults}): {error}") from error
    if totals is not None:
        totals.update(world.scheduler.faults)
    return world.sessions


@contextmanager
def _silent() -> Iterator[None]:
    """Log nothing: every schedule causes many of a daemon's warnings."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(before)


def run(first: int, count: int) -> Outcome:
    """Run `count` schedules, starting at seed `first`."""
    faults: Counter[str] = Counter()
    sessions = 0
    with played(), _silent():
        for seed, happened in schedules(first, count):
            sessions += simulate(seed, happened, faults)
    return Outcome(count, sessions, faults)
