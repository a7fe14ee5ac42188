"""Rounds of kills of the processes that keep views: every state that a store had is Postgres' own.

All rounds share one world. The seed of a round determines its transactions, DDL among them, which
processes are killed, and the pauses between.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from cdc import failpoints
from tests.faults.follower_injuries import (
    KILLS,
    at_a_failpoint,
    daemon_killed,
    frozen_copy,
    two_copies,
)
from tests.faults.view_history import Replay
from tests.fixtures.daemon import wait_until

if TYPE_CHECKING:
    from tests.faults.view_world import ViewWorld
    from tests.fixtures.servers import Database

_INJURIES_A_ROUND: Final = (2, 3)
_PAUSE_SECONDS: Final = (2.0, 20.0)
# Transactions before the first injury of a round, and after the last.
_LEAST: Final = 10


def redis_flushed(world: ViewWorld) -> str:
    """Lose what the store has: all views are computed again."""
    world.redis.client.flushall()
    return "Redis flushed"


# By name, so that one of them can be tried alone.
INJURIES: Final[dict[str, Callable[[ViewWorld], str]]] = {
    **KILLS,
    "failpoint": at_a_failpoint(failpoints.FOLLOWER_NAMES, (1, 2, 3, 6)),
    "view": at_a_failpoint(failpoints.VIEW_NAMES, (1, 7, 40, 70, 110, 150)),
    "build": at_a_failpoint(failpoints.VIEW_BUILD_NAMES, (1, 3, 20)),
    "two_copies": two_copies,
    "frozen": frozen_copy,
    "daemon": daemon_killed,
    "flush": redis_flushed,
}
WEIGHTS: Final = {"view": 4, "failpoint": 2, "driver": 2, "java": 2, "one_worker": 2}


class ViewCampaign:
    """Call `round` as often as wanted, then `report`."""

    def __init__(
        self, world: ViewWorld, replayed: Database, show: Callable[[str], None] = lambda _: None
    ) -> None:
        """`replayed` is an empty database, in which the history is repeated."""
        self._world, self._show = world, show
        self._replay = Replay(replayed, world.history)
        self._began = time.monotonic()
        self._wrong: list[str] = []
        self.kinds: Counter[str] = Counter()
        self.cuts: Counter[str] = Counter()
        self.rounds = self.compared = 0

    def begin(self) -> None:
        """Fill the tables, and wait until every store has all views."""
        self._world.history.draw(0)
        self._world.history.write(60)
        self._world.begin()
        self._compare("the beginning")

    def round(self, seed: int, injuries: Sequence[str] = ()) -> None:
        """Kill processes under load, repair, compare; `injuries` replaces the seed's choice."""
        began, world = time.monotonic(), self._world
        world.chance = random.Random(f"{seed}/kills")
        world.history.draw(seed)
        names = list(injuries) or self._drawn(world.chance)
        with world.history.load(seed):
            self._wait_for(_LEAST)
            for name in names:
                self.kinds[INJURIES[name](world)] += 1
                world.look()
                time.sleep(world.chance.uniform(*_PAUSE_SECONDS))
            world.leave_one()
            self._wait_for(_LEAST)
        self._compare(f"seed {seed}")
        self.rounds += 1
        self._show(
            f"seed {seed}: {', '.join(names)}: {time.monotonic() - began:.0f} s,"
            f" {self.cuts.total()} cuts so far"
        )

    def _wait_for(self, transactions: int) -> None:
        seen = len(self._world.history.transactions)
        wait_until(lambda: len(self._world.history.transactions) >= seen + transactions, "no load")

    @staticmethod
    def _drawn(chance: random.Random) -> list[str]:
        weights = [WEIGHTS.get(name, 1) for name in INJURIES]
        return chance.choices(list(INJURIES), weights, k=chance.randint(*_INJURIES_A_ROUND))

    def _compare(self, when: str) -> None:
        """Compare every state that was seen with Postgres, once all stores are at the newest."""
        self._world.converged()
        readings = self._world.readings()
        self._wrong += [f"{when}: {each}" for each in self._replay.compare(readings)]
        self._wrong += [
            f"{when}: {table} was not repeated as it was"
            for table in self._replay.differs_from(self._world.line.database)
        ]
        self.cuts.update(each.store for each in readings)
        self.compared += sum(len(each.views) for each in readings)
        assert not self.wrong, "\n".join(self.wrong)

    @property
    def wrong(self) -> list[str]:
        return [*self._wrong, *(each for watch in self._world.watches for each in watch.wrong)]

    def report(self) -> dict[str, Any]:
        history = self._world.history
        return {
            "rounds": self.rounds,
            "injuries": self.kinds.total(),
            "kinds": dict(self.kinds.most_common()),
            "views": self._world.views,
            "transactions": len(history.transactions),
            "ddl": history.altered,
            "cuts": dict(sorted(self.cuts.items())),
            "states": self._replay.states,
            "comparisons": self.compared,
            "differences": len(self.wrong),
            "seconds": round(time.monotonic() - self._began, 1),
        }
