"""All randomness of a schedule, and its threads and clock.

One seed, one `Random`: every question of the world ("does the answer get lost?") takes its next
number, so a schedule is the same every time. Faults have a budget: once it is spent there are no
more faults, and the daemon must reach its end state.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import Any, Final

# The probability of each event where it is possible, within the budget. Not all of them are faults.
_ODDS: Final = {
    "crash": 0.02,  # at each failpoint
    "crash while waiting": 0.01,
    "init times out": 0.05,
    "flush times out": 0.1,
    "commit is refused": 0.02,
    "commit request is lost": 0.05,
    "commit answer is lost": 0.05,
    "commit outcome is unknown": 0.02,
    "abort is lost": 0.3,
    "commit is late": 0.5,  # at a crash
    "report has no offset": 0.05,
    "connection is cut": 0.01,
    "feedback is lost": 0.01,
    "server crashes": 0.1,
    "coordinator is wrong": 0.05,
}
# Likewise, with a separate budget, because a session makes many lookups before it streams.
_LOOKUPS: Final = {
    "topic is unknown": 0.05,
    "partition is unknown": 0.05,
    "metadata is stale": 0.05,
    "end is empty": 0.05,
    "end is stale": 0.05,
    "lookup is not answered": 0.02,
}
_ALWAYS: Final = {
    "slot is saved": 0.3,
    "keepalive": 0.3,
    "keepalive within": 0.05,
    "reply requested": 0.2,
    "block comes": 0.3,
    "thread goes on": 0.2,
    "worker runs": 0.6,
    "late request comes": 0.2,
    "source commits": 0.5,
}


class Crash(BaseException):
    """The process has died. No `except Exception` of the product's may catch it."""


class Scheduler:
    """What happens, and when; `faults` counts what did."""

    def __init__(self, seed: int, budget: int = 12) -> None:
        self.chance = Random(seed)
        self.faults: Counter[str] = Counter()
        self.now = 1_000.0
        self._left = {"faults": budget, "lookups": budget // 2}
        # Half of the schedules have only a few kinds of fault, so that each also occurs alone.
        kinds = sorted(_ODDS)
        few = self.chance.random() < 0.5
        self._kinds = set(self.chance.sample(kinds, 3) if few else kinds)

    def happens(self, what: str) -> bool:
        """Return whether it happens here; a fault is counted and charged to its budget."""
        if what in _ALWAYS:
            return self.chance.random() < _ALWAYS[what]
        if what in _LOOKUPS:
            return self._pays("lookups", what, _LOOKUPS[what])
        return what in self._kinds and self._pays("faults", what, _ODDS[what])

    def _pays(self, budget: str, what: str, odds: float) -> bool:
        if self._left[budget] <= 0 or self.chance.random() >= odds:
            return False
        self._left[budget] -= 1
        self.faults[what] += 1
        return True

    def some(self, count: int) -> int:
        """Return a number from 0 to `count`."""
        return self.chance.randint(0, count) if count > 0 else 0

    def piece(self, size: int) -> int:
        """Return how many of `size` bytes arrive at once: often all, sometimes only a few."""
        kind = self.chance.random()
        if kind < 0.6:
            return size
        return min(size, self.chance.randint(1, 9 if kind < 0.7 else 700))

    def reach(self, _failpoint: str) -> None:
        """Stand in for `cdc.failpoints.reach`."""
        if self.happens("crash"):
            raise Crash


class Clock:
    """Stand in for the module `time`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic(self) -> float:
        # Never the same value twice, so that no loop hangs on a difference of zero.
        self._scheduler.now += 1e-6
        return self._scheduler.now

    def time_ns(self) -> int:
        return int(self._scheduler.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self._scheduler.now += seconds


class Future:
    """Stand in for `concurrent.futures.Future`: waiting for a result runs its thread."""

    def __init__(self, worker: Worker, call: Callable[[], Any]) -> None:
        self._worker, self._call = worker, call
        self.over = False
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        # Its thread may run at any time: between any two checks by the loop.
        if not self.over and self._worker.goes_on():
            self._worker.run_one()
        return self.over

    def result(self) -> Any:  # noqa: ANN401 - a call's own
        while not self.over:
            self._worker.run_one()
        if self._error is not None:
            raise self._error
        return self._result

    def exception(self) -> BaseException | None:
        return self._error

    def run(self) -> None:
        try:
            self._result = self._call()
        except (Crash, AssertionError):
            raise  # a broken invariant is reported at once
        except BaseException as error:  # noqa: BLE001 - raised where the loop looks
            self._error = error
        self.over = True


class Worker:
    """Stand in for `BackgroundThread`: its calls run when the schedule decides, in order."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.wake_fd = -1
        self._scheduler = scheduler
        self._calls: deque[Future] = deque()

    def submit(self, call: Callable[[], Any]) -> Future:
        future = Future(self, call)
        self._calls.append(future)
        return future

    def restart(self) -> None:
        """Forget every call, as a thread does that dies with its process."""
        self._calls.clear()

    @property
    def idle(self) -> bool:
        return not self._calls

    def goes_on(self) -> bool:
        """Return whether its thread runs at this moment."""
        return bool(self._calls) and self._scheduler.happens("thread goes on")

    def run_one(self) -> None:
        """Run the next call to its end."""
        self._calls.popleft().run()

    def wake(self) -> None:
        """Do nothing: the loop is never asleep."""

    def drain(self) -> None:
        """Do nothing: there is nothing to drain."""
