"""The end offsets of the topics, from a broker that has just restarted."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from cdc.errors import UnavailableError
from cdc.playground.demo import tail as tail_module
from cdc.playground.demo.tail import Tail

_PARTITION = ("shop.cdc.frontier", 0)


class Returning:
    """An admin client whose broker answers as one that is not yet the leader."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals

    def describe_cluster(self, **_: object) -> Future[SimpleNamespace]:
        answer: Future[SimpleNamespace] = Future()
        answer.set_result(SimpleNamespace())
        return answer

    def list_offsets(self, wanted: dict[TopicPartition, object], **_: object) -> dict[Any, Any]:
        answer: Future[SimpleNamespace] = Future()
        if self.refusals:
            self.refusals -= 1
            answer.set_exception(KafkaException(KafkaError(KafkaError.UNKNOWN_LEADER_EPOCH)))
        else:
            answer.set_result(SimpleNamespace(offset=7))
        return dict.fromkeys(wanted, answer)


def following(refusals: int, monkeypatch: pytest.MonkeyPatch) -> Tail:
    """Return a tail that follows one partition of such a broker."""
    consumer = SimpleNamespace(positions={_PARTITION: 0})
    monkeypatch.setattr(tail_module, "LogConsumer", lambda _: consumer)
    broker = Returning(refusals)
    monkeypatch.setattr("cdc.log.topics.admin", lambda _: broker)
    monkeypatch.setattr(tail_module, "AGAIN_SECONDS", 0.0)
    return Tail(SimpleNamespace(prefix="shop"))  # type: ignore[arg-type]


def test_a_broker_that_does_not_know_yet_what_it_leads_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert following(3, monkeypatch).ends() == {_PARTITION: 7}


def test_a_broker_that_never_knows_what_it_leads_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tail = following(1_000_000_000, monkeypatch)
    monkeypatch.setattr(tail_module, "RETURN_SECONDS", 0.0)
    with pytest.raises(UnavailableError, match="UNKNOWN_LEADER_EPOCH"):
        tail.ends()
