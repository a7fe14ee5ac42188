"""The partitioner equals Kafka's Java clients."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.encode.partition import partition_of
from tests.property import reference

# From the Java client's own test (UtilsTest.testMurmur2).
JAVA = [
    (b"21", -973932308),
    (b"foobar", -790332482),
    (b"a-little-bit-long-string", -985981536),
    (b"a-little-bit-longer-string", -1486304829),
    (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
    (b"abc", 479470107),
]


@pytest.mark.parametrize(("key", "hashed"), JAVA)
def test_known_values_of_the_java_client(key: bytes, hashed: int) -> None:
    assert reference.murmur2(key) == hashed
    for partitions in (1, 2, 3, 4, 7, 10_000):
        assert partition_of(key, partitions) == (hashed & 0x7FFFFFFF) % partitions


@given(st.binary(max_size=80), st.integers(1, 10_000))
def test_any_key_goes_where_the_written_out_algorithm_sends_it(key: bytes, partitions: int) -> None:
    assert partition_of(key, partitions) == reference.partition_of(key, partitions)


@pytest.mark.parametrize("size", [510, 511, 512, 513, 70_000])
def test_long_keys(size: int) -> None:
    key = bytes(range(256)) * (size // 256 + 1)
    assert partition_of(key[:size], 97) == reference.partition_of(key[:size], 97)
