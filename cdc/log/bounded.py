"""A publisher that holds at most a stated number of bytes that no broker has acknowledged.

The daemon keeps its transactions small enough for the producer's queue. A snapshot's are as large
as a range of a table, and reading is faster than writing: here `produce` waits for the brokers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from cdc.errors import UnavailableError
from cdc.log.client import translate, translated
from cdc.log.publisher import Publisher

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

    from cdc.config import Config
    from cdc.log.batch import Batch

# What may wait in the producer: some batches for each of a few brokers, a fraction of a second.
IN_FLIGHT_BYTES: Final = 16 << 20
_POLL_SECONDS: Final = 0.05
# Brokers that accept nothing for this long are down; librdkafka itself would wait for minutes.
_STALLED_SECONDS: Final = 60.0


class _Chunk:
    """Records that were handed over together: how many partitions have not acknowledged theirs."""

    __slots__ = ("bytes", "partitions")

    def __init__(self, size: int, partitions: int) -> None:
        self.bytes, self.partitions = size, partitions


class BoundedPublisher(Publisher):
    """One task's writer."""

    def __init__(self, config: Config, name: str, transaction_seconds: int) -> None:
        """`name` is the end of the transactional id."""
        super().__init__(config, name, transaction_seconds=transaction_seconds)
        self._waiting = 0  # bytes handed over and not acknowledged

    def produce(self, batch: Batch) -> None:
        """Hand over the batch's waiting messages; wait while too many bytes are in flight."""
        self.begin()
        self.send_letters(batch)
        partitions = batch.waiting()
        if not partitions:
            return
        chunk = _Chunk(batch.bytes, len(partitions))
        batch.bytes = 0
        self._waiting += chunk.bytes

        # Looked up beforehand: after a fatal error the client reports with an exception pending,
        # and then the interpreter finds no inherited method.
        delivered = self._delivered

        def taken(error: KafkaError | None, message: Message) -> None:
            delivered(error, message)
            chunk.partitions -= 1
            if not chunk.partitions:
                self._waiting -= chunk.bytes

        for partition in partitions:
            self._hand_over(partition, taken)
        self._wait()

    def _wait(self) -> None:
        with translated("producing"):
            self._producer.poll(0)
            left, moved_at = self._waiting, time.monotonic()
            while self._waiting > IN_FLIGHT_BYTES:
                self._producer.poll(_POLL_SECONDS)
                if self._failed:
                    raise translate(self._why(self._failed), "sending rows")
                if self._waiting < left:
                    left, moved_at = self._waiting, time.monotonic()
                elif time.monotonic() - moved_at > _STALLED_SECONDS:
                    raise UnavailableError(
                        f"Kafka has taken nothing for {_STALLED_SECONDS:.0f} s",
                        hint="see that the brokers run and log.bootstrap_servers is right",
                    )
