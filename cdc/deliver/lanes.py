"""In which order events are sent: by key, each key's in the order of the log. Pure.

The events of one key are a lane: they are sent one after another, in batches with those of other
keys. If a batch fails, each of its lanes is sent without others from then on, until it succeeds:
so a key that the receiver refuses holds up no other. A lane that fails alone with several events
goes on with its first. Only a failure of one event alone counts against it, and makes its lane
wait, longer each time.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

_FIRST_WAIT_SECONDS: Final = 0.5
_LONGEST_WAIT_SECONDS: Final = 300.0


class KeyedEvent(NamedTuple):
    """An event to be delivered: its key's lane, its place in the log, and its JSON."""

    lane: Hashable
    topic: str
    partition: int
    offset: int
    value: bytes


@dataclass(eq=False)
class Lane:
    """The events of one key that are not delivered yet."""

    events: deque[KeyedEvent] = field(default_factory=deque)
    failures: int = 0  # of the first event, sent alone
    alone: bool = False  # whether it is sent without other lanes
    singly: bool = False  # and one event at a time


class Sending(NamedTuple):
    """Events that are being sent in one request: of several lanes, or of one alone."""

    events: list[KeyedEvent]
    parts: list[tuple[Lane, int]]  # how many of the first events of each lane
    alone: bool

    @property
    def lane(self) -> Lane:
        """The first lane, which is the only one of a request that is sent alone."""
        return self.parts[0][0]


class Lanes:
    """All lanes of one receiver."""

    def __init__(self, most: int, jitter: Callable[[], float] = lambda: 1.0) -> None:
        """Send at most `most` events together; `jitter` is a factor for each wait."""
        self._most = most
        self._jitter = jitter
        self._lanes: dict[Hashable, Lane] = {}
        self._ready: deque[Lane] = deque()  # to be sent with others
        self._alone: deque[Lane] = deque()
        self._waiting: list[tuple[float, int, Lane]] = []
        self._number = count()
        self.held = 0  # events that are not delivered

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def failing(self) -> int:
        """How many lanes have failed and not succeeded since."""
        # A copy, made at once: the thread that reports asks, while the run adds and deletes lanes.
        return sum(lane.failures > 0 for lane in list(self._lanes.values()))

    @property
    def next_at(self) -> float | None:
        """When the next lane has waited long enough; None if none waits."""
        return self._waiting[0][0] if self._waiting else None

    def add(self, event: KeyedEvent) -> None:
        """Add an event after those of its key."""
        lane = self._lanes.get(event.lane)
        if lane is None:
            lane = self._lanes[event.lane] = Lane()
            self._ready.append(lane)
        lane.events.append(event)
        self.held += 1

    def take(self, now: float, *, alone: bool) -> Sending | None:
        """Return what may be sent now: one lane that is sent alone, or a batch of others."""
        self._wake(now)
        if alone:
            return self._sending([self._alone.popleft()], alone=True) if self._alone else None
        lanes, room = list[Lane](), self._most
        while self._ready and room > 0:
            lanes.append(self._ready.popleft())
            room -= len(lanes[-1].events)
        return self._sending(lanes, alone=False) if lanes else None

    def probe(self, now: float) -> Sending | None:
        """Return one lane, to try a receiver that is away; if it fails, the next is another.

        So no key that is never answered keeps the receiver away for the others.
        """
        self._wake(now)
        lanes = self._ready or self._alone
        if not lanes:
            return None
        lane = lanes.popleft()
        lane.alone = True
        return self._sending([lane], alone=True)

    def _wake(self, now: float) -> None:
        while self._waiting and self._waiting[0][0] <= now:
            self._alone.append(heapq.heappop(self._waiting)[2])

    def _sending(self, lanes: Sequence[Lane], *, alone: bool) -> Sending:
        events, parts = list[KeyedEvent](), list[tuple[Lane, int]]()
        for lane in lanes:
            most = 1 if lane.singly else self._most - len(events)
            part = list(islice(lane.events, most))
            events += part
            parts.append((lane, len(part)))
        return Sending(events, parts, alone)

    def delivered(self, sent: Sending) -> None:
        """Note that events are delivered: the next ones of their keys follow."""
        for lane, number in sent.parts:
            first = lane.events[0]
            for _ in range(number):
                lane.events.popleft()
            self.held -= number
            lane.failures, lane.alone, lane.singly = 0, False, False
            if lane.events:
                self._ready.append(lane)
            else:
                del self._lanes[first.lane]

    def give_up(self, sent: Sending) -> None:
        """Note that the only event of a lane, which failed last, is given up: the next follows."""
        # After the failure it waits to be sent again.
        self._waiting = [each for each in self._waiting if each[2] is not sent.lane]
        heapq.heapify(self._waiting)
        self.delivered(sent)

    def failed(self, sent: Sending, now: float) -> int:
        """Note that a request failed; return how often its only event has, 0 if it had more."""
        if len(sent.events) > 1 or not sent.alone:
            for lane, number in sent.parts:
                lane.alone, lane.singly = True, len(sent.parts) == 1 and number > 1
                self._alone.append(lane)
            return 0
        lane = sent.lane
        lane.singly = True
        lane.failures += 1
        wait = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2 ** min(lane.failures - 1, 20))
        self._wait(lane, now + wait * self._jitter())
        return lane.failures

    def postponed(self, sent: Sending, until: float) -> None:
        """Note that a request was not answered for a reason that has nothing to do with it."""
        for lane, _ in sent.parts:
            if lane.alone:
                self._wait(lane, until)
            else:
                self._ready.appendleft(lane)

    @property
    def bytes(self) -> int:
        """The length of what is held."""
        return sum(len(event.value) for lane in self._lanes.values() for event in lane.events)

    def drop(self, keep: Callable[[KeyedEvent], bool]) -> None:
        """Forget events that another member delivers now; none of them may be being sent."""
        for name, lane in list(self._lanes.items()):
            lane.events = deque(filter(keep, lane.events))
            if not lane.events:
                del self._lanes[name]
        self._ready = deque(lane for lane in self._ready if lane.events)
        self._alone = deque(lane for lane in self._alone if lane.events)
        self._waiting = [each for each in self._waiting if each[2].events]
        heapq.heapify(self._waiting)
        self.held = sum(len(lane.events) for lane in self._lanes.values())

    def _wait(self, lane: Lane, until: float) -> None:
        lane.alone = True
        heapq.heappush(self._waiting, (until, next(self._number), lane))
