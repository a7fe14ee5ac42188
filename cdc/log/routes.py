"""Where events go: a table's encoder with its topic's partitions, and the logical messages' own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.log.partition import partition_of

if TYPE_CHECKING:
    from cdc.log.batch import Partition
    from cdc.log.encoder import Encoder
    from cdc.log.message import MessageEncoder


class Table(NamedTuple):
    """A relation as the stream last described it: how its rows are encoded, where they go."""

    encoder: Encoder
    partitions: list[Partition]

    def send(self, key: bytes | None, value: bytes) -> Partition:
        """Put a record into its key's partition, and return that."""
        number = 0 if key is None else partition_of(key, len(self.partitions))
        partition = self.partitions[number]
        partition.append({"key": key, "value": value})
        return partition


class LogicalMessages(NamedTuple):
    """The logical messages' one partition, which keeps their order."""

    encoder: MessageEncoder
    partition: Partition

    def send(self, key: bytes | None, value: bytes) -> Partition:
        """Put a record into the partition, and return that."""
        self.partition.append({"key": key, "value": value})
        return self.partition
