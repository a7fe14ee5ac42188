"""Kafka client settings and what Kafka's errors mean, in one place.

https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, ShareConsumer
from confluent_kafka.admin import AdminClient

from cdc.errors import (
    CDCError,
    ConfigError,
    FencedError,
    OutcomeUnknownError,
    PermissionDeniedError,
    UnavailableError,
    UnreadableError,
)
from cdc.log.broker_log import BrokerLog, without_values
from cdc.runtime.waiting import slow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from confluent_kafka import Consumer, TopicPartition

    from cdc.config import Config

# Rows larger than Kafka's 1 MB default are common enough; topics are created to accept them.
MAX_MESSAGE_BYTES: Final = 16 << 20
# A broker that stops answering is given up after this, not after librdkafka's minute: by then a
# cluster has another leader.
_SILENCE_MS: Final = 20_000

_UNKNOWN_TO_IT: Final = {
    KafkaError._AUTHENTICATION,  # noqa: SLF001 - librdkafka's local errors are spelled so
    KafkaError.SASL_AUTHENTICATION_FAILED,
}
_DENIED: Final = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
# The operation that a refused action needs, by how it begins; any other needs Describe.
_OPERATIONS: Final = {
    "creating topic": "Create",
    "deleting topic": "Delete",
    "altering topic": "AlterConfigs",
    "producing": "Write",
    "sending": "Write",
    "committing": "Write",
    "reading the topics' settings": "DescribeConfigs",
    "reading": "Read",
}
_AWAY: Final = {
    KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
    KafkaError._TIMED_OUT,  # noqa: SLF001
    KafkaError._TRANSPORT,  # noqa: SLF001
}
# What is asked for does not exist, or no longer exists. One such answer proves nothing.
NOT_THERE: Final = {
    KafkaError._AUTO_OFFSET_RESET,  # noqa: SLF001
    KafkaError.OFFSET_OUT_OF_RANGE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
}
# Temporary: until the partition has another leader and we know it.
NO_LEADER: Final = {
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
}
LEADER_SECONDS: Final = 0.1
_KEYS: Final = (
    "see security.protocol, sasl.mechanism, sasl.username and sasl.password under log.kafka"
)
_FENCED: Final = {
    KafkaError._FENCED,  # noqa: SLF001
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
}
_MISFIT: Final = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD}
UNREADABLE: Final = {
    KafkaError._BAD_COMPRESSION,  # noqa: SLF001
    KafkaError._BAD_MSG,  # noqa: SLF001
    KafkaError.INVALID_MSG,
    # Of a batch's version that does not exist: damaged too, or read on from within a damaged one.
    KafkaError._NOT_IMPLEMENTED,  # noqa: SLF001
}
SOUND_COPY: Final = "have a replica with sound files lead the partition"
DAMAGED: Final = f"the broker's files are damaged: `cdc prove` names the ranges; {SOUND_COPY}"

# How long a refusal explains why no broker answers.
_REFUSAL_SECONDS: Final = 60.0
_refusals: dict[str, float] = {}  # the refusal's text, and when it was received (monotonic)

_librdkafka = logging.getLogger("cdc.log.librdkafka")
# A command that sets up no logs reports what matters itself.
_librdkafka.addHandler(logging.NullHandler())
_brokers = BrokerLog()
_librdkafka.addFilter(_brokers)
# How long a command waits for the first answer of a cluster. A broker that runs answers within a
# second, through TLS and SASL too.
REACH_SECONDS: Final = 6.0


def settings(config: Config, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - librdkafka's own
    """Return librdkafka settings for one client of this pipeline."""
    chosen: dict[str, Any] = {
        "bootstrap.servers": config.log.bootstrap_servers,
        "client.id": f"lockstep-{config.pipeline}",
        # A broker that comes back is found within a second.
        "reconnect.backoff.max.ms": 1_000,
        "logger": _librdkafka,
        "error_cb": note_refusal,
        **more,
        **config.log.kafka,
    }
    # librdkafka refuses a transaction timeout that is shorter than the socket timeout.
    longest = min(_SILENCE_MS, int(chosen.get("transaction.timeout.ms", _SILENCE_MS)))
    return {"socket.timeout.ms": longest, **chosen}


def note_refusal(error: KafkaError) -> None:
    """Note what librdkafka reports outside of calls: a refused client gets no answer to a call."""
    if error.code() in _UNKNOWN_TO_IT:
        _refusals[_text(error)] = time.monotonic()


@contextmanager
def translated(doing: str, client: Consumer | None = None) -> Iterator[None]:
    """Raise Kafka's errors as ours; `doing` names what was tried, on what.

    A consumer receives what is reported outside of its calls only when it is polled.
    """
    try:
        yield
    except (KafkaException, SystemError) as error:
        reason = thrown(error)
        if client is not None:
            client.poll(0)
        raise translate(reason, doing) from error


def thrown(error: KafkaException | SystemError) -> KafkaError:
    """Return Kafka's error.

    A fatal one reaches Python from the call that serves callbacks next, in addition to that call's
    result or after it: the interpreter makes a SystemError of it (confluent-kafka 2.16).
    """
    cause = error if isinstance(error, KafkaException) else error.__cause__
    if isinstance(cause, KafkaException):
        reason: KafkaError = cause.args[0]
        return reason
    return KafkaError(KafkaError._FATAL, f"the client gave up: {error}", fatal=True)  # noqa: SLF001


def watermarks(client: Consumer, part: TopicPartition, timeout: float) -> tuple[int, int]:
    """Return the partition's first offset and its end; wait while it has no leader.

    A topic that was just created, or whose broker just failed, has none for a moment. Raises
    TOPIC_AUTHORIZATION_FAILED where we may not see the topic: the client itself calls the partition
    unknown then.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            found: tuple[int, int] = client.get_watermark_offsets(part, timeout=left)
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError._UNKNOWN_PARTITION:  # noqa: SLF001
                _expect_seen(client, str(part.topic), left)
            if code not in NO_LEADER or time.monotonic() > deadline:
                raise
            time.sleep(LEADER_SECONDS)
        else:
            return found


def _expect_seen(client: Consumer, topic: str, timeout: float) -> None:
    """Raise what the brokers answer about a topic that we may not see; proves nothing else."""
    try:
        known = client.list_topics(topic, timeout=timeout).topics.get(topic)
    except KafkaException:
        return
    if known is not None and known.error is not None and known.error.code() in _DENIED:
        raise KafkaException(known.error)


def translate(error: KafkaError, doing: str) -> CDCError:
    """Return our error for `error`, with what may be done about it."""
    what, code = f"{doing}: {_text(error)} ({error.name()})", error.code()
    if denied := _denied(error, doing):
        return denied
    if code in _FENCED:
        return FencedError(what, hint="the daemon starts over from the resume record by itself")
    if code in _MISFIT:
        return ConfigError(
            what,
            hint="raise max.message.bytes of the topic and message.max.bytes of the broker, or set"
            " message.max.bytes under log.kafka; a compacted topic (cleanup.policy) takes no record"
            " without a key",
        )
    if error.fatal() or error.txn_requires_abort():
        return OutcomeUnknownError(
            what, hint="the daemon starts over from the resume record by itself"
        )
    if code in UNREADABLE:
        return UnreadableError(what, hint=DAMAGED)
    why = _brokers.failures() if code in _AWAY else ""
    return UnavailableError(
        f"{what}; {why}" if why else what,
        hint="see that the brokers run, that log.bootstrap_servers is right, and that the addresses"
        " which the brokers advertise are reached from here",
    )


def close_damaged(client: Consumer | ShareConsumer) -> None:
    """Close a client that has met a damaged batch, in the background.

    librdkafka asks for an offset then that it has read from within the batch, and continues
    wherever the answer leads. Closed before that is answered, it may wait for itself for ever:
    https://github.com/confluentinc/librdkafka/issues/4514
    """
    threading.Thread(target=client.close, name="close-consumer", daemon=True).start()


def _text(error: KafkaError) -> str:
    """Return its text, without the value of a setting that librdkafka refuses."""
    return without_values(str(error.str()))


def reach(config: Config) -> None:
    """Raise UnavailableError if no broker answers; within seconds, since a user may be waiting."""
    servers = config.log.bootstrap_servers
    with slow(f"Kafka at {servers}"):
        client = AdminClient(settings(config))
        try:
            client.describe_cluster(request_timeout=REACH_SECONDS).result()
        except KafkaException as error:
            client.poll(0)  # its log lines and errors are delivered only when it is polled
            what, why = f"no Kafka broker answers at {servers}", _brokers.failures()
            found = translate(error.args[0], what)
            if isinstance(found, UnavailableError) and why:
                found = UnavailableError(f"{what} ({why})", hint=found.hint)
            raise found from error


def _denied(error: KafkaError, doing: str) -> PermissionDeniedError | None:
    """Return the error if the brokers refuse us access; None if they do not."""
    what, code = f"{doing}: {_text(error)} ({error.name()})", error.code()
    if code in _DENIED:
        return PermissionDeniedError(what, hint=_right(code, doing))
    lately = time.monotonic() - _REFUSAL_SECONDS
    refused = [text for text, at in _refusals.items() if at > lately]
    if code in _UNKNOWN_TO_IT or (code in _AWAY and refused):
        return PermissionDeniedError(f"{doing}: {(refused or [what])[-1]}", hint=_KEYS)
    return None


def _right(code: int, doing: str) -> str:
    """Return which right is missing, and how it is given."""
    if code == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
        operation, resource = "Write", "--transactional-id, with log.prefix and the pipeline"
    else:
        found = (its for begins, its in _OPERATIONS.items() if doing.startswith(begins))
        operation, resource = next(found, "Describe"), "--topic, with log.prefix"
    included = " (Read, Write and Delete include it)" if operation == "Describe" else ""
    return (
        f"the right {operation} is missing{included}: kafka-acls.sh --add --allow-principal User:…"
        f" --operation {operation} --resource-pattern-type prefixed {resource}; docs/SECURITY.md"
        " lists the rights of each principal; nothing is lost until then"
    )
