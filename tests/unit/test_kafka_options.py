"""The broker options of Spark's reader, from librdkafka's settings."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from cdc.config import Config
from cdc.config.model import Log, Source
from cdc.errors import ConfigError
from cdc.log.partitions import OffsetRange
from lockstep.jobs.spark.kafka_options import carried, java, reading


def test_a_login_and_certificates_have_javas_form(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("-----BEGIN CERTIFICATE-----")
    reported = java(
        {
            "security.protocol": "sasl_ssl",
            "sasl.mechanisms": "SCRAM-SHA-512",
            "sasl.username": "me",
            "sasl.password": 'a"b\\c',
            "ssl.ca.location": str(ca),
            "ssl.endpoint.identification.algorithm": "none",
            "socket.timeout.ms": 5,
        }
    )
    assert reported == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required"
        ' username="me" password="a\\"b\\\\c";',
        "ssl.truststore.certificates": "-----BEGIN CERTIFICATE-----",
        "ssl.truststore.type": "PEM",
        "ssl.endpoint.identification.algorithm": "",
    }


def test_a_login_that_java_would_need_more_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="GSSAPI"):
        java({"security.protocol": "SASL_PLAINTEXT"})


def test_ranges_are_read_exactly_and_committed_only() -> None:
    config = Config(
        pipeline="shop", source=Source(dsn="d"), log=Log(bootstrap_servers="one:1,two:2")
    )
    reported = reading(
        config,
        {("b", 1): OffsetRange(5, 9), ("a", 0): OffsetRange(0, 7), ("b", 0): OffsetRange(2, 3)},
    )
    assert json.loads(reported["assign"]) == {"a": [0], "b": [0, 1]}
    assert json.loads(reported["startingOffsets"]) == {"a": {"0": 0}, "b": {"0": 2, "1": 5}}
    assert json.loads(reported["endingOffsets"]) == {"a": {"0": 7}, "b": {"0": 3, "1": 9}}
    assert reported["kafka.isolation.level"] == "read_committed"
    assert reported["failOnDataLoss"] == "true"


def test_tasks_get_the_text_of_certificates_and_name_no_file(tmp_path: Path) -> None:
    """They run where our files may be missing; they get no password but the log's."""
    files = {"ssl.ca": "A", "ssl.certificate": "B", "ssl.key": "C"}
    kafka: dict[str, str | int | float | bool] = {"security.protocol": "SSL"}
    for name, text in files.items():
        path = tmp_path / name
        path.write_text(text, "utf-8")
        kafka[f"{name}.location"] = str(path)
    config = Config(
        pipeline="x",
        source=Source(dsn="postgresql://nobody"),
        log=Log(bootstrap_servers="localhost:1", kafka=kafka),
    )
    pickled = pickle.dumps(carried(config))
    assert b"nobody" not in pickled
    found = pickle.loads(pickled).log.kafka  # noqa: S301 - our own
    assert {f"{name}.pem": text for name, text in files.items()}.items() <= found.items()
    assert str(tmp_path) not in str(found)
    assert config.log.kafka == kafka
    small = {**kafka, "queued.max.messages.kbytes": 1}
    config = Config(
        pipeline="x",
        source=Source(dsn="postgresql://nobody"),
        log=Log(bootstrap_servers="localhost:1", kafka=small),
    )
    assert carried(config).log.kafka["queued.max.messages.kbytes"] == 1
