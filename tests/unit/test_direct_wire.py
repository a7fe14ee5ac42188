"""Kafka's primitive types, requests and answers as bytes, and which bytes are rejected.

The answers are those of a broker 4.3.1, recorded (tests/golden/direct/answers.json).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdc.log.direct import requests, wire
from cdc.log.direct.requests import (
    Authenticated,
    Broker,
    Error,
    Features,
    Leaders,
    Producer,
    Written,
)
from cdc.log.direct.wire import AnswerReader, MalformedError

_GOLDEN = Path(__file__).parents[1] / "golden" / "direct" / "answers.json"
ANSWERS = {name: bytes.fromhex(text) for name, text in json.loads(_GOLDEN.read_text()).items()}
READ: dict[str, Callable[[AnswerReader], Any]] = {
    "api_versions": requests.read_api_versions,
    "metadata": requests.read_metadata,
    "find_coordinator": requests.read_find_coordinator,
    "init_producer_id": requests.read_producer,
    "produce": requests.read_produce,
    "end_txn": requests.read_producer,
    "end_txn_refused": requests.read_producer,
}


def answer(name: str) -> Any:  # noqa: ANN401 - each has a type of its own
    return READ[name](AnswerReader(ANSWERS[name]))


@pytest.mark.parametrize(
    ("value", "encoded"),
    [(0, "00"), (1, "01"), (127, "7f"), (128, "8001"), (300, "ac02"), (2**63 - 1, "ff" * 8 + "7f")],
)
def test_unsigned_varints_are_protobufs(value: int, encoded: str) -> None:
    assert wire.uvarint(value).hex() == encoded
    assert AnswerReader(bytes.fromhex(encoded)).uvarint() == value


def test_lengths_are_one_more_and_null_is_none() -> None:
    assert wire.string("ab") == b"\x03ab"
    assert wire.string("") == b"\x01"
    assert wire.string(None) == b"\x00"
    assert wire.array([b"x", b"y"]) == b"\x03xy"
    reader = AnswerReader(b"\x03ab\x01\x00")
    assert [reader.string() for _ in range(3)] == ["ab", "", None]
    reader.end()


@pytest.mark.parametrize("text", ["ff" * 10 + "01", "80"])
def test_a_varint_without_an_end_is_malformed(text: str) -> None:
    with pytest.raises(MalformedError):
        AnswerReader(bytes.fromhex(text)).uvarint()


def test_a_string_that_is_no_utf_8_and_a_length_beyond_all_measure_are_malformed() -> None:
    with pytest.raises(MalformedError):
        AnswerReader(b"\x02\xff").string()
    with pytest.raises(MalformedError):
        AnswerReader(b"\xff\xff\xff\xff\x0f").array(lambda: 0)
    with pytest.raises(MalformedError):
        AnswerReader(b"\xff\xff\xff\xff\x0f").tags()


def test_bytes_after_the_answer_are_malformed() -> None:
    with pytest.raises(MalformedError):
        AnswerReader(b"\x00").end()


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_cut_short_anywhere_is_malformed(name: str) -> None:
    READ[name](AnswerReader(ANSWERS[name]))
    for size in range(len(ANSWERS[name])):
        with pytest.raises(MalformedError):
            READ[name](AnswerReader(ANSWERS[name][:size]))


def test_a_brokers_features_hold_the_level_of_transactions() -> None:
    found = answer("api_versions")
    assert isinstance(found, Features)
    assert found.finalized[requests.TRANSACTION_VERSION] == requests.TRANSACTIONS_V2
    for key, version in requests.NEEDED:
        lowest, highest = found.versions[key]
        assert lowest <= version <= highest


def test_metadata_names_the_leaders_and_the_unknown_topics() -> None:
    assert answer("metadata") == Leaders(
        nodes={1: Broker("127.0.0.1", 19092)},
        leaders={("golden", 0): 1, ("golden", 1): 1},
        errors={("missing", -1): 3},
    )


def test_the_coordinator_is_a_host_and_a_port() -> None:
    assert answer("find_coordinator") == Broker("127.0.0.1", 19092)


def test_the_first_producer_of_an_id_has_epoch_0_and_each_end_raises_it() -> None:
    first, following = answer("init_producer_id"), answer("end_txn")
    assert isinstance(first, Producer)
    assert first.epoch == 0
    assert following == Producer(first.id, 1)


def test_an_answer_to_a_write_names_each_partitions_first_offset() -> None:
    assert sorted(answer("produce")) == [
        Written("golden", 0, 0, 0, None),
        Written("golden", 1, 0, 0, None),
    ]


def test_the_end_of_no_transaction_is_refused() -> None:
    assert answer("end_txn_refused") == Error(48)


def test_sasl_s_answers() -> None:
    assert requests.read_sasl_handshake(AnswerReader(b"\x00\x00\x00\x00\x00\x00")) is None
    assert requests.read_sasl_handshake(AnswerReader(b"\x00\x21\x00\x00\x00\x00")) == Error(33)
    lasting = b"\x00\x00\x00\x02x" + (5_000).to_bytes(8, "big") + b"\x00"
    assert requests.read_sasl_authenticate(AnswerReader(lasting)) == Authenticated(b"x", 5_000)
    refused = b"\x00\x3a\x03no\x01" + bytes(8) + b"\x00"
    assert requests.read_sasl_authenticate(AnswerReader(refused)) == Error(58, "no")


def test_a_request_is_framed_with_its_header() -> None:
    framed = requests.frame(requests.END_TXN, 7, b"me", b"body")
    assert framed.hex() == "00000011" + "001a" + "0005" + "00000007" + "0002" + b"me".hex() + (
        "00" + b"body".hex()
    )
    # Not flexible: no tagged fields in its header.
    assert requests.frame(requests.SASL_HANDSHAKE, 1, b"", b"").hex() == (
        "0000000a" + "0011" + "0001" + "00000001" + "0000"
    )


def test_a_write_names_the_id_the_partitions_and_that_all_copies_are_waited_for() -> None:
    body = requests.produce("id", {"t": [(3, b"batch")]}, 1_500)
    expected = b"\x03id" + b"\xff\xff" + (1_500).to_bytes(4, "big")
    expected += b"\x02\x02t\x02" + (3).to_bytes(4, "big") + b"\x06batch" + b"\x00\x00\x00"
    assert body == expected
