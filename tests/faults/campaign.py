"""A campaign: `kill -9` at random moments over daemon, broker and Postgres, under load.

The daemon is started again at once, as a supervisor would; the servers after a moment. A kill may
come while the one before is still being recovered from: every third time it waits for nothing.
What the seed gives is the load, the targets and the pauses; the moments are the machine's.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from tests.fixtures.daemon import wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.witness import Difference, Witness

if TYPE_CHECKING:
    from cdc.demo.proof import Proof
    from cdc.local.stack import LocalStack
    from tests.fixtures.daemon import NewPipeline, PipelineUnderTest

TARGETS: Final = ("daemon", "kafka", "postgres")
# The daemon is what is under test, and quick to come back.
_WEIGHTS: Final = (6, 2, 2)
_BATCH: Final = {"max_events": 300, "max_wait_ms": 50}
# A broker that was killed is let in again when its session has lapsed.
_RECOVERY_SECONDS: Final = 120.0
_MOVED_EVENTS: Final = 20


class Campaign:
    """Kills until `run` has counted to `kills`; then `report` holds the log against the source."""

    def __init__(self, new: NewPipeline, stack: LocalStack, *, seed: int, kills: int) -> None:
        self._stack = stack
        self._chance = random.Random(f"{seed}/kills")
        self._seed = seed
        self._left = self._targets(kills)
        self.killed: Counter[str] = Counter()
        self.pipeline: PipelineUnderTest = new(*TABLES, batch=_BATCH)
        self.witness = Witness(self.pipeline)

    def _targets(self, kills: int) -> list[str]:
        """Each at least once where there are kills enough, the rest as the weights say."""
        targets = list(TARGETS[:kills])
        targets += self._chance.choices(TARGETS, _WEIGHTS, k=kills - len(targets))
        self._chance.shuffle(targets)
        return targets

    def run(self) -> None:
        with Load(self.pipeline.database.dsn, self._seed, steps_per_second=500) as load:
            self.pipeline.start().wait_ready()
            for target in self._left:
                time.sleep(self._chance.uniform(0.1, 1.2))
                self._kill(target)
                if self._chance.random() < 2 / 3:
                    self._recovered()
            wait_until(lambda: load.commits > 100, "no load")
            self._recovered()

    def report(self) -> tuple[str, Proof, Difference]:
        """Return one line, and what it is made from."""
        proof = self.witness.check()
        difference = self.witness.difference()
        kills = ", ".join(f"{name} {self.killed[name]}" for name in TARGETS)
        line = (
            f"kills {self.killed.total()} ({kills}), events {proof.events}, rows {proof.rows}, "
            f"lost {difference.lost}, duplicate {difference.duplicate}, "
            f"reordered {difference.reordered}, seed {self._seed}"
        )
        return line, proof, difference

    def _kill(self, target: str) -> None:
        if target == "daemon":
            self.pipeline.daemon.kill()
            self.pipeline.start()
        else:
            self._stack[target].kill()
            time.sleep(self._chance.uniform(0.0, 0.5))
            self._stack.start(target)
        self.killed[target] += 1

    def _recovered(self) -> None:
        """Wait until events flow again: the daemon that runs has published some of its own."""
        daemon = self.pipeline.daemon
        seen = daemon.metric("lockstep_events_total")

        def moved() -> bool:
            code = daemon.process.poll()
            assert code is None, f"the daemon ended by itself with {code}"
            return daemon.metric("lockstep_events_total") >= seen + _MOVED_EVENTS

        wait_until(moved, "nothing flows again", _RECOVERY_SECONDS, pause=0.2)
