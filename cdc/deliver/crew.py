"""Threads that call a function for each change of a work queue.

As many members as threads, by default two for each partition, and no thread owns one: a thread that
has nothing to do takes the next change of any member, or asks a member that has none. So a slow
change occupies its thread and its member, and holds up nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from cdc.deliver.queues import Delivery, Queue
from cdc.errors import CDCError, Policy
from cdc.log import queues

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.log.group_records import QueueRecord

log = logging.getLogger("cdc.deliver.crew")

# Of one process; each member has a connection to every broker.
_MOST_WORKERS: Final = 32
_WAIT_SECONDS: Final = 0.5
_AGAIN_SECONDS: Final = 5.0


class Crew:
    """Works until `stopping` returns true; what is being handled then is waited for."""

    def __init__(
        self,
        config: Config,
        record: QueueRecord,
        attempts: int,
        handle: Callable[[Delivery], object],
        stopping: Callable[[], bool],
    ) -> None:
        self._config, self._record, self._attempts = config, record, attempts
        self._handle, self._stopping = handle, stopping
        self._changed = threading.Condition()
        self._idle: deque[_Member] = deque()  # members that have nothing
        self._ready: deque[tuple[_Member, Delivery]] = deque()
        self._failed: list[BaseException] = []

    def work(self, workers: int | None) -> None:
        """Run so many threads. Raises what only a person can fix, and bugs."""
        most = min(_MOST_WORKERS, 2 * queues.partitions_of(self._config, self._record))
        number = workers or most
        with ExitStack() as stack:
            for _ in range(number):
                queue = Queue(self._config, self._record, self._attempts)
                self._idle.append(_Member(stack.enter_context(queue)))
            with ThreadPoolExecutor(number, f"queue {self._record.queue}") as pool:
                for _ in range(number):
                    pool.submit(self._run)
        if self._failed:
            raise self._failed[0]

    @property
    def _is_over(self) -> bool:
        return bool(self._failed) or self._stopping()

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._step()
        except BaseException as error:
            self._failed.append(error)
            raise

    def _step(self) -> None:
        """Handle a change that a member has, or ask one for some."""
        with self._changed:
            ready = self._ready.popleft() if self._ready else None
            asked = self._idle.popleft() if self._idle and ready is None else None
            if ready is None and asked is None:
                self._changed.wait(_WAIT_SECONDS)
        if ready is not None:
            self._do(*ready)
        elif asked is not None:
            self._ask(asked)

    def _ask(self, member: _Member) -> None:
        found = list[Delivery]()
        try:
            found = member.queue.receive(_WAIT_SECONDS)
        except CDCError as error:
            if error.policy is Policy.HALT:
                raise
            log.warning("the queue %s: %s", self._record.queue, error.what)
            time.sleep(_AGAIN_SECONDS)
        with self._changed:
            self._ready += [(member, each) for each in found]
            if not found:
                self._idle.append(member)
            self._changed.notify_all()

    def _do(self, member: _Member, delivery: Delivery) -> None:
        done = False
        if time.monotonic() < delivery.until:
            try:
                self._handle(delivery)
                done = True
            except Exception as error:  # noqa: BLE001 - whatever it raises, the change comes again
                # Without its text, which may have values of the row.
                kind, seq = type(error).__name__, delivery.change.seq
                log.warning("seq %d, attempt %d: %s", seq, delivery.attempt, kind)
        with member.lock:
            try:
                (member.queue.acknowledge if done else member.queue.release)(delivery)
            except CDCError as error:
                log.warning("the queue %s: %s", self._record.queue, error.what)
            has_nothing = member.queue.is_done
        if has_nothing:
            with self._changed:
                self._idle.append(member)
                self._changed.notify()


class _Member:
    """A member that several threads use, one at a time."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.lock = threading.Lock()
