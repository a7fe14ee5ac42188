"""Rows of hundreds of megabytes: published, in bounded memory, with feedback in time."""

from __future__ import annotations

import hashlib
import json
import os
from base64 import b64decode

import pytest

from cdc.log import dead_letter_topic
from tests.fixtures.daemon import Daemon, NewPipeline, PipelineUnderTest, wait_until

_MB = 1 << 20
_BLOBS = "CREATE TABLE blobs (id int PRIMARY KEY, data bytea, note text)"
# The daemon without any row, and what may wait in the producer.
_BASE_MB = 250
# `wal_sender_timeout` is a minute by default; feedback is due every ten seconds.
_FEEDBACK_SECONDS = 10.0


def insert_random(line: PipelineUnderTest, row: int, size: int) -> None:
    with line.database.connect() as connection:
        connection.execute(b"INSERT INTO blobs VALUES (%s, %b, 'note')", (row, os.urandom(size)))


def arrives(line: PipelineUnderTest, daemon: Daemon, seq: int, seconds: float) -> float:
    """Wait for an event; return the longest time without feedback to Postgres meanwhile."""
    longest = 0.0

    def there() -> bool:
        nonlocal longest
        longest = max(longest, daemon.metric("lockstep_feedback_age_seconds"))
        assert daemon.process.poll() is None, daemon.log[-3_000:]
        return line.resume()[1].seq >= seq

    wait_until(there, "the row does not arrive", seconds, pause=0.5)
    return longest


def output(daemon: Daemon, event: str) -> int:
    return sum(each["event"] == event for each in daemon.events)


@pytest.mark.long("volume; test_dead_letters has rows around a topic's limit")
@pytest.mark.parametrize("streaming", ["on", "off"])
def test_a_row_of_random_bytes_larger_than_the_queue_goes_through(
    streaming: str, pipeline: NewPipeline
) -> None:
    """A dead letter larger than the producer's queue is sent in pieces, not retried for ever."""
    size = 250 * _MB
    line = pipeline(_BLOBS, source={"streaming": streaming})
    # Postgres' own default: a walsender that encodes such a row sends nothing for some seconds.
    line.database.execute(f"ALTER DATABASE {line.database.name} SET wal_sender_timeout = '60s'")
    daemon = line.start().wait_ready()
    insert_random(line, 1, size)
    longest = arrives(line, daemon, 1, 600)
    assert longest < _FEEDBACK_SECONDS + 5
    assert output(daemon, "starting over") == 0
    # Postgres sends two characters per byte.
    assert daemon.peak_rss_mb < _BASE_MB + 3 * 2 * size / _MB
    [head] = dead_letter_topic.heads(line.config)
    assert head.bytes > size * 4 / 3
    insert_random(line, 2, 1_000)
    arrives(line, daemon, 2, 120)
    # The dead letter has byte for byte what Postgres has.
    event = json.loads(dead_letter_topic.event(line.config, head.id))
    sha256 = line.query("SELECT encode(sha256(data), 'hex') FROM blobs WHERE id = 1")[0]
    assert hashlib.sha256(b64decode(event["after"]["data"])).hexdigest() == sha256
