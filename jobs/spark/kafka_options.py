"""Settings of Spark's Kafka reader, which is a Java client, from those of `log.kafka`.

librdkafka and Java use the same names for most settings. Differences are handled here; tuning of
one client does not apply to the other and is left out.

https://kafka.apache.org/documentation/#consumerconfigs
https://spark.apache.org/docs/latest/structured-streaming-kafka-integration.html
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from cdc.config import Config, Source
from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cdc.log.partitions import OffsetRange, Partition

_ALIKE: Final = {"security.protocol", "sasl.mechanism", "ssl.key.password", "client.id"}
# Settings that name PEM files, whose content Java takes as text.
_FILES: Final = {
    "ssl.ca.location": "ssl.truststore.certificates",
    "ssl.certificate.location": "ssl.keystore.certificate.chain",
    "ssl.key.location": "ssl.keystore.key",
}
_TEXTS: Final = {
    "ssl.ca.pem": "ssl.truststore.certificates",
    "ssl.certificate.pem": "ssl.keystore.certificate.chain",
    "ssl.key.pem": "ssl.keystore.key",
}
_PEM: Final = {
    "ssl.ca.location": "ssl.ca.pem",
    "ssl.certificate.location": "ssl.certificate.pem",
    "ssl.key.location": "ssl.key.pem",
}
# What a task fetches ahead; by default 64 MB.
_AHEAD_BYTES: Final = 16 << 20
_LOGINS: Final = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}


def java(settings: Mapping[str, object]) -> dict[str, str]:
    """Return the Java client's settings; raise ConfigError for a login that Java does not have."""
    given = {name: str(value) for name, value in settings.items()}
    if "sasl.mechanisms" in given:
        given["sasl.mechanism"] = given.pop("sasl.mechanisms")
    options = {name: value for name, value in given.items() if name in _ALIKE}
    if "security.protocol" in options:
        options["security.protocol"] = options["security.protocol"].upper()
    for name, to in _FILES.items():
        if name in given:
            options[to] = Path(given[name]).read_text("utf-8")
    options |= {to: given[name] for name, to in _TEXTS.items() if name in given}
    if any(name.startswith("ssl.truststore") for name in options):
        options["ssl.truststore.type"] = "PEM"
    if any(name.startswith("ssl.keystore") for name in options):
        options["ssl.keystore.type"] = "PEM"
    if given.get("ssl.endpoint.identification.algorithm") == "none":
        options["ssl.endpoint.identification.algorithm"] = ""
    if options.get("security.protocol", "").startswith("SASL"):
        options["sasl.jaas.config"] = _login(options.get("sasl.mechanism", "GSSAPI"), given)
    return options


def carried(config: Config) -> Config:
    """Return the configuration with which tasks read, where our files may be missing.

    It has nothing of the source or of followers: tasks have no use for their passwords.
    """
    kafka = {"queued.max.messages.kbytes": _AHEAD_BYTES >> 10, **config.log.kafka}
    for name, to in _PEM.items():
        if name in kafka:
            kafka[to] = Path(str(kafka.pop(name))).read_text("utf-8")
    log = replace(config.log, kafka=kafka)
    return Config(pipeline=config.pipeline, source=Source(dsn=""), log=log)


def _login(mechanism: str, given: Mapping[str, str]) -> str:
    module = _LOGINS.get(mechanism.upper())
    if module is None:
        raise ConfigError(
            f"large cuts are read by Spark's Kafka reader, which can't log in by {mechanism} with"
            " the settings in log.kafka",
            hint=f"use one of {', '.join(_LOGINS)}, or let the driver apply all cuts: max_events of"
            " the follower of 60,000 at most, and no larger transaction",
        )
    user, password = (_quoted(given.get(f"sasl.{what}", "")) for what in ("username", "password"))
    return f"{module} required username={user} password={password};"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def reading(config: Config, ranges: Mapping[Partition, OffsetRange]) -> dict[str, str]:
    """Return the options of `spark.read.format("kafka")` that read exactly these ranges."""
    assigned: dict[str, list[int]] = {}
    starts: dict[str, dict[str, int]] = {}
    ends: dict[str, dict[str, int]] = {}
    for (topic, number), (start, end) in sorted(ranges.items()):
        assigned.setdefault(topic, []).append(number)
        starts.setdefault(topic, {})[str(number)] = start
        ends.setdefault(topic, {})[str(number)] = end
    ours = {
        "bootstrap.servers": config.log.bootstrap_servers,
        "isolation.level": "read_committed",
        # After the last record there are only transaction markers: a fetch there must not wait for
        # more data, which by default takes half a second in each partition.
        "fetch.max.wait.ms": "10",
        # After each poll Spark asks the broker for the partition's first and last offset. The
        # default of 500 would ask ten times for one answer of 1 MB.
        "max.poll.records": "10000",
    }
    return {
        **{f"kafka.{name}": value for name, value in (java(config.log.kafka) | ours).items()},
        "assign": json.dumps(assigned),
        "startingOffsets": json.dumps(starts),
        "endingOffsets": json.dumps(ends),
        "failOnDataLoss": "true",
    }
