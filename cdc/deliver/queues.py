"""A work queue: each change goes to one member at a time, until one acknowledges it.

Members share single changes, so their number is not limited, and there is no order.
A change that was given out `attempts` times and never acknowledged is given up: noted in the log
(`cdc.deliver.undelivered`), and only then taken out of the queue. The note is written before the
broker's own limit, at which it would drop the change silently. What was given up can be given out
again: its place is written into a topic that every queue reads as well (`names.retries_topic`).
What the broker's files have damaged is noted at once: Kafka's clients take it out of the queue.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import msgspec

from cdc.deliver import undelivered
from cdc.deliver.group_changes import GroupChange, change_of, topics_of
from cdc.errors import ConfigError, GapError, UnreadableError
from cdc.log import names, queues, records, topics
from cdc.log.acknowledged import AcknowledgedWriter
from cdc.log.client import DAMAGED
from cdc.log.group_records import UndeliveredRecord, queue_group
from cdc.log.queues import Delivered

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cdc.config import Config
    from cdc.log.group_records import QueueRecord
    from cdc.log.groups import Start
    from cdc.log.partitions import Partition

ATTEMPTS: Final = 5
LOCK_SECONDS: Final = 30.0
_WAIT_SECONDS: Final = 0.5
_SEND_SECONDS: Final = 0.5
# A change is given out while at least this share of its lock's time is left.
_LEFT: Final = 0.5
_NEVER_ACKNOWLEDGED: Final = "was given out and never acknowledged"


class Delivery(NamedTuple):
    """A change that this member has now; `attempt` is 1 the first time.

    Start its work before `until` (monotonic): later, its lock may end before the work does. `place`
    is what Kafka calls it: of a change that is given out again not its own.
    """

    change: GroupChange
    attempt: int
    until: float
    place: tuple[Partition, int]


class Queue:
    """Yields deliveries until it is closed; belongs to one thread."""

    def __init__(self, config: Config, record: QueueRecord, attempts: int) -> None:
        """Become a member of a queue that was started."""
        self._config, self._group = config, queue_group(record.queue)
        self._attempts, self._lock_seconds = attempts, record.lock_seconds
        self._start_seq = record.start_seq
        self._sent_at = 0.0
        self._retries = names.retries_topic(config.prefix), 0
        # Connected before the first change is given out, so that giving one up takes no time.
        self._notes = AcknowledgedWriter(config, topics.groups_topic(config).name)
        self._given_up: dict[tuple[Partition, int], UndeliveredRecord] = {}  # not noted yet
        self._member = queues.ShareMember(config, record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Delivery]:
        while True:
            for each in self.receive(_WAIT_SECONDS):
                # The rest would be late: the next `receive` releases it for others.
                if time.monotonic() > each.until:
                    break
                yield each

    def receive(self, seconds: float) -> list[Delivery]:
        """Return the changes that this member has now; wait up to `seconds` for some.

        Those of the last call that were not acknowledged are released: they are delivered again.
        What the last call gave up is noted first: a note that takes long costs no change its time.
        """
        self._give_up()
        decided = [self._decided(each) for each in self._member.receive(seconds)]
        found = [each for each in decided if each is not None]
        if not found:
            self._give_up()
        return found

    def _decided(self, delivered: Delivered) -> Delivery | None:
        """Return a change to give out; None if it is done or given up."""
        if delivered.partition == self._retries:
            return self._again(delivered)
        if delivered.damage:
            self._given_up[delivered.place] = self._note(delivered)
            return None
        change = change_of(
            self._config, delivered.partition, delivered.offset, delivered.key, delivered.value
        )
        if change.seq <= self._start_seq:
            self._member.accept(*delivered.place)
        elif delivered.deliveries > self._attempts:
            self._given_up[delivered.place] = self._note(delivered)
        else:
            return self._delivery(change, delivered)
        return None

    def acknowledge(self, delivery: Delivery) -> None:
        """Note that a change is done. Within half a second, or by `close`, Kafka has it."""
        self._member.accept(*delivery.place)
        self._send()

    @property
    def is_done(self) -> bool:
        """Whether everything that this member gave out is decided."""
        return self._member.undecided <= self._given_up.keys()

    def release(self, delivery: Delivery) -> None:
        """Give a change back: it is delivered again, to any member, unless this was the last time.

        `close` and the next `receive` do so with all that are not acknowledged.
        """
        self._member.release(*delivery.place)
        self._send()

    def _delivery(self, change: GroupChange, delivered: Delivered) -> Delivery:
        until = delivered.until - _LEFT * self._lock_seconds
        return Delivery(change, delivered.deliveries, until, delivered.place)

    def _again(self, delivered: Delivered) -> Delivery | None:
        """Return the change that is to be given out again; None if that is another queue's."""
        if delivered.damage:
            raise UnreadableError(delivered.damage, hint=DAMAGED)
        record = records.decode(UndeliveredRecord, delivered.value, self._retries[0])
        if (record.pipeline, record.group) != (self._config.pipeline, self._group):
            self._member.accept(*delivered.place)
            return None
        why = _NEVER_ACKNOWLEDGED
        if delivered.deliveries <= self._attempts:
            try:
                key, value = undelivered.message(self._config, record)
            except (GapError, UnreadableError) as error:
                why = error.what
            else:
                partition = record.topic, record.partition
                if value:
                    change = change_of(self._config, partition, record.offset, key, value)
                    if change.seq > self._start_seq:
                        return self._delivery(change, delivered)
                # Of a batch that was damaged: a tombstone, or from before the queue's start.
                self._member.accept(*delivered.place)
                return None
        self._given_up[delivered.place] = msgspec.structs.replace(
            record,
            why=why,
            attempts=record.attempts + delivered.deliveries - 1,
            at_us=time.time_ns() // 1_000,
            state="undelivered",
            decided_by="",
            decided_at_us=None,
        )
        return None

    def _note(self, delivered: Delivered) -> UndeliveredRecord:
        return UndeliveredRecord(
            pipeline=self._config.pipeline,
            group=self._group,
            id=undelivered.place_id(*delivered.place)
            if delivered.damage
            else undelivered.event_id(self._config, delivered.value),
            topic=delivered.partition[0],
            partition=delivered.partition[1],
            offset=delivered.offset,
            why=delivered.damage or _NEVER_ACKNOWLEDGED,
            attempts=delivered.deliveries - 1,
            at_us=time.time_ns() // 1_000,
        )

    def _give_up(self) -> None:
        """Note what is given up, and only then take it out of the queue.

        What can't be noted stays here for the next call, though Kafka may have dropped it by then.
        """
        if not self._given_up:
            return
        self._notes.write(undelivered.encoded(list(self._given_up.values())))
        for place in self._given_up:
            self._member.reject(*place)
        self._given_up.clear()
        self._member.send(wait=True)

    def _send(self) -> None:
        if time.monotonic() >= self._sent_at + _SEND_SECONDS:
            self._sent_at = time.monotonic()
            self._member.send()

    def close(self) -> None:
        """Note what is given up, release what is not acknowledged, and leave."""
        with closing(self._member):
            self._give_up()


def started(
    config: Config,
    tables: Sequence[str],
    name: str,
    start: Start,
    attempts: int,
    lock_seconds: float,
) -> QueueRecord:
    """Return the record of a queue, which starts at `start` if it is new."""
    _expect("attempts", attempts, 1, queues.MOST_ATTEMPTS)
    _expect("lock_seconds", lock_seconds, queues.LEAST_LOCK_SECONDS, queues.MOST_LOCK_SECONDS)
    return queues.start(config, name, topics_of(config, tables), start, lock_seconds)


def _expect(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(
            f"{name} of a queue is {value:g}", hint=f"give {least:g} to {most:g} (Kafka's limits)"
        )
