"""Kafka client settings and what Kafka's errors mean, in one place.

https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaError, KafkaException

from cdc.errors import (
    CDCError,
    ConfigError,
    FencedError,
    OutcomeUnknownError,
    PermissionDeniedError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config

# Rows larger than Kafka's 1 MB default are common enough; topics are created to take them.
MAX_MESSAGE_BYTES: Final = 16 << 20
# A broker that is gone without a word is given up after this, not after librdkafka's minute: by
# then a cluster has another leader.
_SILENCE_MS: Final = 20_000

_DENIED: Final = {
    KafkaError._AUTHENTICATION,  # noqa: SLF001 - librdkafka's local errors are spelled so
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_FENCED: Final = {
    KafkaError._FENCED,  # noqa: SLF001
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
}
_MISFIT: Final = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD}

_librdkafka = logging.getLogger("cdc.log.librdkafka")
# A command that sets up no logs says what matters in its own words.
_librdkafka.addHandler(logging.NullHandler())


def settings(config: Config, **more: str | float | bool) -> dict[str, Any]:
    """Return librdkafka settings for one client of this pipeline."""
    chosen: dict[str, Any] = {
        "bootstrap.servers": config.log.bootstrap_servers,
        "client.id": f"lockstep-{config.pipeline}",
        # A broker that comes back is found within a second.
        "reconnect.backoff.max.ms": 1_000,
        "logger": _librdkafka,
        **more,
        **config.log.kafka,
    }
    # A producer whose transactions may not last as long is refused.
    longest = min(_SILENCE_MS, int(chosen.get("transaction.timeout.ms", _SILENCE_MS)))
    return {"socket.timeout.ms": longest, **chosen}


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise Kafka's errors as ours; `doing` says what was tried, on what."""
    try:
        yield
    except KafkaException as error:
        raise translate(error.args[0], doing) from error


def translate(error: KafkaError, doing: str) -> CDCError:
    """Return the error of ours that says what may be done about `error`."""
    what, code = f"{doing}: {error.str()} ({error.name()})", error.code()
    if code in _DENIED:
        return PermissionDeniedError(
            what, hint="grant the principal write, create and transactional-id rights"
        )
    if code in _FENCED:
        return FencedError(what, hint="the daemon starts over from the resume record by itself")
    if code in _MISFIT:
        return ConfigError(
            what,
            hint="raise max.message.bytes of the topic and message.max.bytes of the broker, or set"
            " message.max.bytes under log.kafka",
        )
    if error.fatal() or error.txn_requires_abort():
        return OutcomeUnknownError(
            what, hint="the daemon starts over from the resume record by itself"
        )
    return UnavailableError(
        what, hint="see that the brokers run and log.bootstrap_servers is right"
    )
