"""Where events go: a table's encoder with its topic's partitions, and the logical messages' own.

An event that does not fit into its topic becomes a dead letter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from cdc.encode.partition import partition_of

if TYPE_CHECKING:
    from cdc.encode.encoder import Encoder
    from cdc.encode.logical_messages import MessageEncoder
    from cdc.encode.oversize import DeadLetters
    from cdc.log.batch import PartitionQueue


Sent: TypeAlias = "tuple[PartitionQueue, bytes | None]"


class TableRoute(NamedTuple):
    """A relation as the stream last described it: how its rows are encoded, where they go."""

    encoder: Encoder
    partitions: list[PartitionQueue]
    dead: DeadLetters
    observed: bool = False  # whether the sequencer's observer sees its changes
    keyless: bytes | None = None  # the record's key of what has none

    def send(self, key: bytes | None, value: bytes) -> Sent:
        """Put a record into its key's partition; return that and the record's key."""
        key, value = self.dead.fit(self.partitions[0].topic, key, value)
        number = 0 if key is None else partition_of(key, len(self.partitions))
        partition = self.partitions[number]
        partition.append({"key": self.keyless if key is None else key, "value": value})
        return partition, key


class LogicalMessages(NamedTuple):
    """The logical messages' one partition, which keeps their order."""

    encoder: MessageEncoder
    partition: PartitionQueue
    dead: DeadLetters

    def send(self, key: bytes | None, value: bytes) -> Sent:
        """Put a record into the partition; return that and the record's key."""
        key, value = self.dead.fit(self.partition.topic, key, value)
        self.partition.append({"key": key, "value": value})
        return self.partition, key
