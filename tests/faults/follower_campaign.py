"""Rounds of faults in followers under load: after each, every store equals the database.

All rounds share one world. The seed of a round determines its load, its faults and the pauses
between them. During a round all stores but the mirrors are read all the time; after it, the mirrors
are read at random frontiers of any round. Each state must be one that the database had.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from tests.faults import follower_types
from tests.faults.follower_injuries import INJURIES, WEIGHTS
from tests.faults.follower_load import FollowerLoad
from tests.faults.follower_rows import findings
from tests.fixtures.daemon import wait_until

if TYPE_CHECKING:
    from tests.faults.follower_world import World

_INJURIES_A_ROUND: Final = (2, 4)
_PAUSE_SECONDS: Final = (0.5, 8.0)
_READS_A_ROUND: Final = 20
_PER_SECOND: Final = 40.0


class FollowerCampaign:
    """Call `round` as often as wanted, then `report`."""

    def __init__(self, world: World, show: Callable[[str], None] = lambda _: None) -> None:
        self._world = world
        self._report = show
        self._began = time.monotonic()
        self._wrong: list[str] = []
        self.kinds: Counter[str] = Counter()
        self.rounds = 0
        self.commits = 0
        self.altered: Counter[str] = Counter()
        self.read_again: Counter[str] = Counter()
        self.sizes: Counter[int] = Counter()
        self.reads = 0
        self.rows = 0
        self._frontiers: set[tuple[str, int, int]] = set()

    def begin(self) -> None:
        """Fill the tables, and wait until every store has all rows and all types."""
        with self._world.line.database.connect() as connection:
            follower_types.fill(connection)
            FollowerLoad(self._world.line.database.dsn, 0).begin_with(connection)
        self._world.begin()
        self._compare("the beginning")
        wrong = self._world.wrong_types()
        assert not wrong, "\n".join(wrong)

    def round(self, seed: int, injuries: Sequence[str] = ()) -> None:
        """Inject faults under load, repair, compare; `injuries` replaces the seed's choice."""
        began = time.monotonic()
        world = self._world
        world.chance = random.Random(f"{seed}/injuries")
        names = list(injuries) or self._drawn(world.chance)
        with FollowerLoad(world.line.database.dsn, seed, per_second=_PER_SECOND) as load:
            world.load = load
            wait_until(lambda: load.commits > 20, "no load")
            for name in names:
                self.kinds[INJURIES[name](world)] += 1
                world.look()
                time.sleep(world.chance.uniform(*_PAUSE_SECONDS))
            world.repair()
            seen = load.commits
            wait_until(lambda: load.commits > seen + 20, "no load")
        self.commits += load.commits
        self.altered += load.altered
        self.sizes += load.sizes
        self.read_again.update(world.read_again())
        FollowerLoad(world.line.database.dsn, seed).once()
        self._compare(f"seed {seed}")
        self.read_mirrors(_READS_A_ROUND)
        self.rounds += 1
        self._report(f"seed {seed}: {', '.join(names)}: {time.monotonic() - began:.0f} s")

    @staticmethod
    def _drawn(chance: random.Random) -> list[str]:
        weights = [WEIGHTS.get(name, 1) for name in INJURIES]
        drawn = chance.choices(list(INJURIES), weights, k=chance.randint(*_INJURIES_A_ROUND))
        # One fault follows each of these, while it is applied.
        for name in ("storm", chance.choice(("rewritten", "renamed", ""))):
            drawn.insert(chance.randrange(len(drawn)), name)
        return list(filter(None, drawn))

    def _compare(self, when: str) -> None:
        for store, reported in self._world.converged().items():
            self._wrong += [f"{when}: {store}: {each}" for each in reported]
        self.rows = sum(map(len, self._world.source().values()))
        assert not self.wrong, "\n".join(self.wrong)

    def read_mirrors(self, count: int) -> None:
        """Read the mirrors, histories and marked rows at `count` random frontiers."""
        world = self._world
        mirrors = {"delta": world.delta, "past": world.past, "marked": world.marked}
        rows = {name: each.frontiers() for name, each in mirrors.items()}
        for _ in range(count):
            name = world.chance.choice(list(mirrors))
            reading = mirrors[name].at(world.chance.choice(rows[name]))
            self.reads += 1
            self._frontiers.add((name, reading.generation, reading.seq))
            reported = findings(reading.state)
            self._wrong += [f"{name} at seq {reading.seq}: {each}" for each in reported]
        assert not self._wrong, "\n".join(self._wrong)

    @property
    def wrong(self) -> list[str]:
        return [*self._wrong, *self._world.wrong()]

    def report(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "injuries": self.kinds.total(),
            "kinds": dict(self.kinds.most_common()),
            "commits": self.commits,
            "altered": dict(self.altered.most_common()),
            "read_again": dict(self.read_again),
            "transactions_above": {str(size): many for size, many in sorted(self.sizes.items())},
            "rows": self.rows,
            "differences": len(self.wrong),
            "mirror_reads": self.reads,
            "mirror_frontiers": len(self._frontiers),
            "states": {
                each.name.removeprefix("watch "): [each.readings, len(each.frontiers)]
                for each in self._world.watches
            },
            "seconds": round(time.monotonic() - self._began, 1),
        }
