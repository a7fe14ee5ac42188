"""A session that fails in the middle of a batch leaves none of librdkafka's threads."""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from cdc.config import Config, Log, Source
from cdc.log.batch import Batch
from cdc.log.producer_pool import ProducerPool
from cdc.runtime.background import BackgroundThread
from tests.fixtures.daemon import wait_until
from tests.fixtures.servers import KafkaServer


def threads_of_librdkafka() -> int:
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            count += (task / "comm").read_text().startswith("rdk:")
    return count


@pytest.mark.slow
@pytest.mark.parametrize("fenced", [False, True])
def test_a_batch_that_was_sent_in_part_leaves_no_thread(
    kafka_server: KafkaServer, topic_prefix: str, *, fenced: bool
) -> None:
    """Also where the next session fences it first."""
    topic = f"{topic_prefix}.t"
    admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(60)
    del admin
    config = Config(
        pipeline=topic_prefix,
        source=Source(dsn=""),
        log=Log(bootstrap_servers=kafka_server.bootstrap, direct="off"),
    )
    workers = [BackgroundThread() for _ in range(2)]
    gc.collect()
    before = threads_of_librdkafka()
    for _ in range(2):
        pool = ProducerPool(config, workers)
        pool.open()
        batch = Batch()
        batch.topic(topic, 1)[0].append({"key": b"k", "value": b"v"})
        pool.begin(None)
        if fenced:
            ProducerPool(config, workers).open()
        pool.current.produce(batch)
        assert threads_of_librdkafka() > before
        pool.abandon()
        del pool, batch

    def ended() -> bool:
        gc.collect()
        return threads_of_librdkafka() <= before

    wait_until(ended, "threads are left")
    for worker in workers:
        worker.close()
