"""Incremental snapshots under constant writes and kills; then the same account.

A round starts with an initial snapshot without faults, or with a log that has none of the existing
rows. Then `cdc snapshot` requests every table with a key, some of them twice. While the daemons
read them, faults hit daemons and servers, and the snapshots are paused and resumed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import orjson

from cdc import failpoints
from tests.faults.snapshot_campaign import Round
from tests.fixtures.daemon import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

_TABLES: Final = (
    *("users", "pairs", "full_rows", "named", "many", "parts", "wide", "holes", "void", "never"),
)
_DONE_SECONDS: Final = 240.0
_INJURIES: Final = 4


class LiveRound(Round):
    """One database, each of its tables read again."""

    def __init__(self, *given: Any, seed: int, **more: Any) -> None:  # noqa: ANN401 - the base class's
        super().__init__(*given, seed=seed, **more)
        self._older = self._chance.random() < 0.4  # rows, than the log
        settings = self.pipeline.settings
        settings["snapshot"] = {"mode": "never" if self._older else "initial", "runner": "local"}
        if self._older:
            # Without a key its rows can't be read again, and the log would never have them.
            settings["source"] = {**settings["source"], "exclude": ["public.lines"]}
        self.pipeline.write("lockstep.yaml")
        self.asked = 0

    def _attack(self) -> None:
        chance, crew = self._chance, self._crew
        crew.look()
        wait_until(self._streams, "nobody streams", _DONE_SECONDS)
        crew.points = (*failpoints.NAMES, *failpoints.CHUNK_NAMES)
        crew.failpoints = True
        for _ in range(_INJURIES):
            # A table that is done is requested again; one that is being read is left alone.
            self._ask(*chance.sample(_TABLES, chance.randint(4, len(_TABLES))))
            self._injure()
        self._ask(*_TABLES)
        crew.quiesce()
        wait_until(self._resumed, "the daemon takes no command", _DONE_SECONDS)
        wait_until(self._all_done, "the live snapshots do not end", _DONE_SECONDS, pause=1.0)

    def _ask(self, *tables: str) -> None:
        names = [f"public.{name}" for name in tables]

        def taken() -> bool:
            return self.cdc("snapshot", "start", *names).returncode == 0

        # Postgres or Kafka may be down for a moment.
        wait_until(taken, "nobody can ask for a snapshot", _DONE_SECONDS, pause=0.5)
        self.asked += len(names)

    def _resumed(self) -> bool:
        done = self.cdc("snapshot", "resume")
        return done.returncode == 0 or "no incremental snapshot" in done.stdout + done.stderr

    def listed(self) -> list[dict[str, Any]]:
        """Return what `cdc snapshot list` shows; nothing where a server is down."""
        done = self.cdc("snapshot", "list", "--json")
        found: list[dict[str, Any]] = orjson.loads(done.stdout) if done.returncode == 0 else []
        return found

    def _all_done(self) -> bool:
        self._crew.look()
        listed = self.listed()
        states = {each["state"] for each in listed}
        assert not {"failed", "stopped"}.intersection(states), listed
        tables = {each["table"].partition(".")[2] for each in listed}
        return states == {"done"} and tables == set(_TABLES)

    def _injure(self) -> None:
        time.sleep(self._chance.uniform(0.0, 1.0))
        kinds: list[Callable[[Any], str]] = [kind for _, kind in self.injuries]
        kind = self._chance.choices(kinds, [weight for weight, _ in self.injuries])[0]
        self.kinds[kind(self)] += 1
        self._crew.look()

    def pause(self) -> str:
        """Pause all of them, for a moment or at times until the end of the round."""
        self.cdc("snapshot", "pause")
        if self._chance.random() < 0.7:
            time.sleep(self._chance.uniform(0.0, 0.5))
            self.cdc("snapshot", "resume")
        return "paused"

    def terminate_walsender(self) -> str:
        self._terminate("backend_type = 'walsender'")
        return "walsender ended"

    def report(self) -> dict[str, Any]:
        """Return the base class's figures, with what was read again."""
        reported = super().report()
        assert reported["read_again"], "no row was read again"
        return {**reported, "asked": self.asked, "older": self._older}


LiveRound.injuries = (
    (8, Round.kill_daemon),
    (4, Round.freeze_daemon),
    (4, Round.kill_postgres),
    (1, Round.kill_kafka),
    (4, LiveRound.terminate_walsender),
    (5, Round.terminate_reader),
    (3, LiveRound.pause),
)
