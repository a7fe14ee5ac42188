"""Send every change of some tables to a receiver, each key's in order, at least once.

One thread reads the log as a member of a group and decides; a pool of threads waits for answers. An
event is acknowledged when it is delivered, or given up and noted. While the receiver as such does
not answer, only one request at a time tries it, and nothing is given up.
"""

from __future__ import annotations

import logging
import random
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from typing import TYPE_CHECKING, Final

import msgspec

from cdc.deliver import undelivered
from cdc.deliver.group_changes import topics_of
from cdc.deliver.lanes import KeyedEvent, Lanes
from cdc.deliver.reporter import DeliveryCounts, Reporter
from cdc.deliver.sender import DeliveryResult, Sender
from cdc.errors import CDCError, ConfigError, Policy, UnavailableError
from cdc.log import names
from cdc.log.group_records import UndeliveredRecord, webhook_group
from cdc.log.groups import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cdc.config import Config
    from cdc.config.webhooks import Webhook
    from cdc.deliver.lanes import Sending
    from cdc.log.groups import Received
    from cdc.log.partitions import Partition

log = logging.getLogger("cdc.deliver.webhooks")

# How many events, and bytes of them, are held; then reading pauses.
MOST_HELD: Final = 20_000
_MOST_BYTES: Final = 64 << 20
# So many requests in a row without an answer: the receiver is away.
_AWAY_AFTER: Final = 8
_LONGEST_AWAY_SECONDS: Final = 30.0
_MOST_DOUBLINGS: Final = 5
_IDLE_SECONDS: Final = 0.05
_AGAIN_SECONDS: Final = 5.0
_OPENING, _BETWEEN, _END = b'{"type":"lockstep.changes","events":[', b",", b"]}"


class WebhookRun:
    """One webhook that runs; `run` returns when `stopping` says so."""

    def __init__(self, config: Config, name: str) -> None:
        """Join the webhook's group."""
        self._config, self._name = config, name
        self._settings = settings = chosen(config, name)
        self._sender = Sender(settings)
        self._lanes = Lanes(settings.batch, lambda: random.uniform(0.5, 1.0))  # noqa: S311 - no secret
        self._running: dict[Future[DeliveryResult], Sending] = {}
        self._pool = ThreadPoolExecutor(settings.connections, thread_name_prefix=f"webhook {name}")
        self._bytes = 0
        self._delivered = self._given_up = 0
        self._failures = 0  # requests in a row to which the receiver gave no answer
        self._why = ""
        self._refused = ""
        self._moved_at_us = time.time_ns() // 1_000
        self._resume_at = 0.0
        self._group = Group(
            config,
            webhook_group(name),
            topics_of(config, settings.tables),
            settings.start,
            released=self._released,
        )

    @property
    def counts(self) -> DeliveryCounts:
        """What it has done."""
        away = self._why if self._is_away else ""
        lanes = self._lanes
        return DeliveryCounts(
            self._delivered,
            self._given_up,
            lanes.held,
            lanes.failing,
            away,
            self._refused,
            self._moved_at_us,
        )

    def run(self, stopping: Callable[[], bool]) -> None:
        """Deliver until `stopping` returns true; what is being sent then is waited for."""
        while not stopping():
            self.step(_IDLE_SECONDS)

    def step(self, seconds: float) -> None:
        """Read what has arrived, start requests, and note what came of others."""
        full = self._lanes.held >= MOST_HELD or self._bytes >= _MOST_BYTES
        self._group.pause(paused=full)
        busy = bool(self._running)
        if not self._lanes.held:
            self._moved_at_us = time.time_ns() // 1_000
        for received in self._group.receive(0 if busy else seconds):
            self._lanes.add(_event(received))
            self._bytes += len(received.value)
        self._start()
        if self._running:
            wait(self._running, timeout=seconds, return_when=FIRST_COMPLETED)
        for future in [each for each in self._running if each.done()]:
            self._note(self._running.pop(future), future.result())

    def close(self) -> None:
        """Wait for what is being sent, and leave the group."""
        try:
            self._finish()
        finally:
            self._pool.shutdown()
            self._group.close()
            self._sender.close()

    # --- requests ---

    @property
    def _is_away(self) -> bool:
        return self._failures >= _AWAY_AFTER

    def _start(self) -> None:
        """Start as many requests as may run; keys that fail get at most half of them."""
        now = time.monotonic()
        if now < self._resume_at:
            return
        most = 1 if self._is_away else self._settings.connections
        while len(self._running) < most:
            sending = self._next(now, most)
            if sending is None:
                return
            self._running[self._pool.submit(self._send, sending)] = sending

    def _next(self, now: float, most: int) -> Sending | None:
        if self._is_away:
            return self._lanes.probe(now)
        alone = sum(sending.alone for sending in self._running.values())
        found = self._lanes.take(now, alone=True) if alone < max(1, most // 2) else None
        return found or self._lanes.take(now, alone=False)

    def _send(self, sending: Sending) -> DeliveryResult:
        # An event's own id is in the message; the message's stays the same when it is sent again.
        first = event_id(self._config, sending.events[0])
        message_id = first if len(sending.events) == 1 else f"{first}+{len(sending.events) - 1}"
        return self._sender.send(message_id, message(self._config, sending.events))

    def _note(self, sending: Sending, answer: DeliveryResult) -> None:
        now = time.monotonic()
        if answer.over:
            raise ConfigError(
                f"the receiver of the webhook {self._name} answers 410: it wants no more messages",
                hint="remove the webhook, or correct its url; it goes on where it was",
            )
        if answer.delivered:
            if self._is_away:
                log.info("the receiver of the webhook %s answers again", self._name)
            self._failures = 0
            self._delivered += len(sending.events)
            self._done(sending)
            return
        self._why = answer.why
        self._failures = self._failures + 1 if answer.away else 0
        if self._failures == _AWAY_AFTER:
            log.warning("the receiver of the webhook %s: %s", self._name, answer.why)
        if self._is_away or answer.pause:
            self._resume_at = now + (answer.pause or away_seconds(self._failures))
            self._lanes.postponed(sending, self._resume_at)
            return
        self._refused = answer.why
        if self._lanes.failed(sending, now) >= self._settings.attempts:
            self._give_up(sending, answer.why)

    def _give_up(self, sending: Sending, why: str) -> None:
        (event,) = sending.events
        record = UndeliveredRecord(
            pipeline=self._config.pipeline,
            group=webhook_group(self._name),
            id=event_id(self._config, event),
            topic=event.topic,
            partition=event.partition,
            offset=event.offset,
            why=why,
            attempts=self._settings.attempts,
            at_us=time.time_ns() // 1_000,
        )
        try:
            undelivered.write(self._config, record)
        except UnavailableError as error:
            # It is tried once more after its wait, and then noted.
            log.warning("the webhook %s can't note what it gives up: %s", self._name, error.what)
            return
        self._given_up += 1
        self._lanes.give_up(sending)
        self._acknowledge(sending)

    def _done(self, sending: Sending) -> None:
        self._lanes.delivered(sending)
        self._acknowledge(sending)

    def _acknowledge(self, sending: Sending) -> None:
        for event in sending.events:
            self._group.acknowledge((event.topic, event.partition), event.offset)
            self._bytes -= len(event.value)
        self._moved_at_us = time.time_ns() // 1_000

    def _finish(self) -> None:
        """Wait for what is being sent."""
        wait(self._running)
        for future, sending in list(self._running.items()):
            del self._running[future]
            self._note(sending, future.result())

    def _released(self, leaving: set[Partition]) -> None:
        """Deliver no more of partitions that another member gets."""
        self._finish()
        self._lanes.drop(lambda event: (event.topic, event.partition) not in leaving)
        self._bytes = self._lanes.bytes


def away_seconds(failures: int) -> float:
    """Return how long a receiver is not tried after so many failures in a row."""
    doublings = max(0, min(failures - _AWAY_AFTER, _MOST_DOUBLINGS))
    return min(_LONGEST_AWAY_SECONDS, 2.0**doublings)


def deliver(
    config: Config, name: str, stopping: Callable[[], bool], running: dict[str, WebhookRun]
) -> None:
    """Run a webhook until `stopping` returns true, again after an error that may pass.

    `running` has the webhook by its name while it runs. Raises what only a person can fix.
    """
    with Reporter(config, name, lambda: _counts_of(running.get(name))) as reporter:
        while not stopping():
            try:
                running[name] = WebhookRun(config, name)
                with closing(running[name]):
                    running[name].run(stopping)
            except CDCError as error:
                if error.policy is Policy.HALT:
                    raise
                log.warning("the webhook %s starts again: %s", name, error.what)
                reporter.failed(error)
                ends = time.monotonic() + _AGAIN_SECONDS
                while not stopping() and time.monotonic() < ends:
                    time.sleep(_IDLE_SECONDS)


def _counts_of(webhook: WebhookRun | None) -> DeliveryCounts:
    return DeliveryCounts() if webhook is None else webhook.counts


def chosen(config: Config, name: str) -> Webhook:
    """Return a webhook's settings; raise ConfigError for an unknown name."""
    found = config.webhooks.get(name)
    if found is None:
        raise ConfigError(
            f"there is no webhook {name}",
            hint="`webhooks` in the configuration has: " + (", ".join(config.webhooks) or "none"),
        )
    return found


def event_id(config: Config, event: KeyedEvent) -> str:
    """Return an event's id: the same whenever it is sent."""
    return undelivered.event_id(config, event.value)


def message(config: Config, events: Sequence[KeyedEvent]) -> bytes:
    """Return a message's body: the events as the log has them, each with its id and table."""
    parts = []
    for event in events:
        opening = {
            "id": event_id(config, event),
            "table": names.table_name(config.prefix, event.topic),
        }
        parts.append(msgspec.json.encode({**opening, "change": msgspec.Raw(event.value)}))
    return _OPENING + _BETWEEN.join(parts) + _END


def send_again(config: Config, name: str, ids: tuple[str, ...]) -> list[tuple[str, str]]:
    """Send undelivered events once more; return each id, and why it failed or ""."""
    sender = Sender(chosen(config, name))
    found = []
    for record in undelivered.chosen(config, webhook_group(name), ids):
        value = undelivered.event(config, record)
        event = KeyedEvent(None, record.topic, record.partition, record.offset, value)
        answer = sender.send(record.id, message(config, [event]))
        if answer.delivered:
            undelivered.write(config, undelivered.decided(record, "sent again"))
        found.append((record.id, answer.why))
    sender.close()
    return found


def _event(received: Received) -> KeyedEvent:
    topic, number = received.partition
    # Without a key rows have no order but the partition's.
    lane = (topic, received.key if received.key is not None else number)
    return KeyedEvent(lane, topic, number, received.offset, received.value)
