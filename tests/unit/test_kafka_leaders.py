"""A request to a partition without a leader is retried: it gets a leader within moments."""

from __future__ import annotations

from typing import Any, cast

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from cdc.log.client import watermarks

PART = TopicPartition("t", 0)


class LeaderlessConsumer:
    """A consumer whose partition has no leader at first."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)

    def get_watermark_offsets(self, _: TopicPartition, **__: float) -> tuple[int, int]:
        if self.codes:
            raise KafkaException(KafkaError(self.codes.pop(0)))
        return 3, 7


def ask(asked: LeaderlessConsumer, seconds: float) -> Any:  # noqa: ANN401 - a pair
    return watermarks(cast("Consumer", asked), PART, timeout=seconds)


def test_a_partition_that_is_being_given_a_leader_is_asked_again() -> None:
    codes = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE)
    assert ask(LeaderlessConsumer(*codes), 60) == (3, 7)


def test_another_refusal_and_a_leader_that_is_never_elected_are_raised() -> None:
    with pytest.raises(KafkaException):
        ask(LeaderlessConsumer(KafkaError.TOPIC_AUTHORIZATION_FAILED), 60)
    with pytest.raises(KafkaException):
        ask(LeaderlessConsumer(*[KafkaError.NOT_LEADER_FOR_PARTITION] * 99), 0)
