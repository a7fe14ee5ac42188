"""Where followers stand: from their reports and the log, whether or not their jobs run.

`cdc status` looks once; the daemon looks every few seconds, on a thread of its own, and shows what
it saw in /readyz and /metrics. A follower's trouble is never the daemon's: it stays ready.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cdc.errors import CDCError, Exit
from cdc.log.followers import REPORT_SECONDS, Readings
from cdc.log.unapplied import Places, Unapplied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cdc.config import Config
    from cdc.events import LSN
    from cdc.log.followers import FollowerRecord

log = logging.getLogger("cdc.control.followers")

# What a state can be beside those that a job reports.
NEW: Final = "new"  # has never reported
NOT_RUNNING: Final = "not_running"  # has reported nothing of late, and not that it stops
STATES: Final = (
    *("starting", "following", "catching_up", "waiting", "rebuilding", "halted", "stopped"),
    *(NOT_RUNNING, NEW),
)
# A canary passes a follower that keeps up within a batch or two.
_CANARY_SECONDS: Final = 60.0


class Standing(NamedTuple):
    """A follower at one moment; what cannot be told is None."""

    name: str
    record: FollowerRecord | None
    wal_end: LSN | None
    unapplied: Unapplied | None

    @property
    def state(self) -> str:
        if self.record is None:
            return NEW
        over = self.record.state in {"halted", "stopped"}
        return self.record.state if over or self.record.runs else NOT_RUNNING

    @property
    def lag_bytes(self) -> int | None:
        """WAL between its end and the applied frontier."""
        if self.record is None or self.wal_end is None:
            return None
        return max(0, self.wal_end - self.record.lsn)

    @property
    def lag_seconds(self) -> float | None:
        """For how long the log has held what is not applied; 0 where all is."""
        if self.unapplied is None:
            return None
        since = self.unapplied.since_us
        return 0.0 if since is None else max(0.0, time.time() - since / 1e6)

    @property
    def canary_age_seconds(self) -> float | None:
        """How long ago the newest canary that is applied was sent."""
        if self.record is None or self.record.canary_at_us is None:
            return None
        return max(0.0, time.time() - self.record.canary_at_us / 1e6)

    def fields(self) -> dict[str, Any]:
        """Return it as JSON-ready values."""
        told = (
            *("store", "generation", "epoch", "lsn", "seq", "committed_at_us", "tables", "events"),
            *("batches", "errors", "events_per_second", "batch_seconds", "what", "hint", "owner"),
        )
        lags = ("lag_bytes", "lag_seconds", "canary_age_seconds")
        record = self.record
        return {
            "name": self.name,
            "state": self.state,
            **{name: _rounded(getattr(self, name)) for name in lags},
            "report_age_seconds": record and round(record.age_seconds, 3),
            **{name: record and _plain(getattr(record, name)) for name in told},
        }


def _rounded(value: float | None) -> float | None:
    return round(value, 3) if isinstance(value, float) else value


def _plain(value: object) -> object:
    return str(value) if type(value) is not int and isinstance(value, int) else value  # an LSN


class Look:
    """Looks at the followers of a configuration; what is open stays open."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._readings = Readings(config)
        self._places = Places(config)

    def take(self, wal_end: LSN | None) -> list[Standing]:
        """Return where each stands now."""
        newest = self._readings.refresh()
        found = []
        for name in self._config.followers:
            record = newest.get(name)
            unapplied = self._places.unapplied(record.place) if record else None
            found.append(Standing(name, record, wal_end, unapplied))
        return found

    def close(self) -> None:
        """Let go of the connections."""
        self._readings.close()
        self._places.close()


class Complaint(NamedTuple):
    """What is wrong with a follower; with exit code 0 it may pass by itself."""

    what: str
    hint: str
    exit_code: int


def judge(config: Config, standings: list[Standing]) -> Iterator[Complaint]:
    """Yield what is wrong with followers, or will be."""
    for each in standings:
        record, name = each.record, each.name
        run = f"cdc follow --followers {name}"
        if record is None:
            yield Complaint(f"{name} has never run", run, Exit.FAILED)
            continue
        if each.unapplied is not None and each.unapplied.forgotten:
            what = f"the log no longer holds what {name} has not applied"
            yield Complaint(what, f"cdc rebuild {name}", Exit.CONFIG)
        if each.state == "halted":
            yield Complaint(f"{name} has halted: {record.what}", record.hint, Exit.CONFIG)
        elif not record.runs:
            what = f"{name} is not running; its last report is {record.age_seconds:.0f} s old"
            yield Complaint(what, run, Exit.FAILED)
        elif record.what:
            what = f"{name} is {each.state.replace('_', ' ')}: {record.what}"
            yield Complaint(what, record.hint, Exit.OK)
        elif _is_silent(config, each.canary_age_seconds):
            what = f"{name}: no canary has come out of it for {each.canary_age_seconds:.0f} s"
            yield Complaint(what, "see what it lags behind: cdc status", Exit.OK)


def _is_silent(config: Config, age: float | None) -> bool:
    seconds = config.canary_seconds
    return bool(seconds) and age is not None and age > _CANARY_SECONDS + 2 * seconds


class Watch:
    """Looks until `close`; `standings` is what the newest look saw."""

    def __init__(self, config: Config, wal_end: Callable[[], LSN | None]) -> None:
        """Begin at once, where there are followers."""
        self.standings: list[Standing] = []
        self._config = config
        self._wal_end = wal_end
        self._over = threading.Event()
        if config.followers:
            threading.Thread(target=self._run, name="cdc-followers", daemon=True).start()

    def close(self) -> None:
        """Stop looking; the thread ends with its look."""
        self._over.set()

    def _run(self) -> None:
        look, told = Look(self._config), False
        while not self._over.is_set():
            try:
                self.standings = look.take(self._wal_end())
                told = False
            except CDCError as error:
                # What was seen last stays, and grows old.
                if not told:
                    fields = {"error": error.what, "hint": error.hint}
                    log.warning("cannot look at the followers", extra={"fields": fields})
                told = True
            self._over.wait(REPORT_SECONDS)
        look.close()
