"""Keys → partitions, as Kafka's Java clients compute them: murmur2.

The work is done by librdkafka's own public function, reached through the extension module that
confluent-kafka loads anyway: in Python it would cost more than the rest of a row's encoding.
A test holds it equal to the algorithm written out, and to values from the Java client.
https://github.com/confluentinc/librdkafka/blob/master/src/rdkafka.h (partitioners)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, cast

from confluent_kafka import cimpl

# PyDLL, because releasing and taking the interpreter lock would cost more than the hash.
_library = ctypes.PyDLL(cimpl.__file__)
_murmur2 = _library.rd_kafka_msg_partitioner_murmur2
_murmur2.restype = ctypes.c_int32

# No `argtypes`: converting to declared types doubles the cost of a call. So the only argument whose
# width is not an int's is passed ready-made; longer keys take the slower way of making it anew.
_SIZES: Final = [ctypes.c_size_t(n) for n in range(512)]
_LONG: Final = len(_SIZES)
_call = cast("Callable[..., Any]", _murmur2)


def partition_of(key: bytes, partitions: int) -> int:
    """Return `murmur2(key)` modulo `partitions`: (topic, key, length, count, opaque, opaque)."""
    n = len(key)
    size = _SIZES[n] if n < _LONG else ctypes.c_size_t(n)
    return _call(None, key, size, partitions, None, None)  # type: ignore[no-any-return]
