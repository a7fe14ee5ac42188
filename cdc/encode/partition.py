"""Keys → partitions, as Kafka's Java clients compute them: murmur2.

The work is done by librdkafka's own public function, reached through the extension module that
confluent-kafka loads anyway: in Python it would cost more than the rest of a row's encoding.
A test compares it with the algorithm written out, and with values from the Java client.
https://github.com/confluentinc/librdkafka/blob/master/src/rdkafka.h (partitioners)
"""

from __future__ import annotations

import ctypes
from typing import Final

from confluent_kafka import cimpl

# PyDLL, because releasing and taking the interpreter lock would cost more than the hash.
_library = ctypes.PyDLL(cimpl.__file__)
murmur2 = _library.rd_kafka_msg_partitioner_murmur2
murmur2.restype = ctypes.c_int32


class _Sizes(dict[int, ctypes.c_size_t]):
    """Lengths in the width that the function takes, created once each."""

    def __missing__(self, length: int) -> ctypes.c_size_t:
        self[length] = ctypes.c_size_t(length)
        return self[length]


# No `argtypes`: converting to declared types doubles the cost of a call. So the one argument whose
# width is not an int's is passed ready-made.
SIZES: Final = _Sizes()


def partition_of(key: bytes, partitions: int) -> int:
    """Return `murmur2(key)` modulo `partitions`: (topic, key, length, count, opaque, opaque)."""
    return murmur2(None, key, SIZES[len(key)], partitions, None, None)  # type: ignore[no-any-return]
