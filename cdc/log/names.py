"""Topic names, reversibly.

`<prefix>.<schema>.<table>` for data, `<prefix>.cdc.<what>` for our own. Kafka allows letters,
digits, `.`, `_` and `-`; Postgres allows anything. So the dot only ever separates, and every other
byte that Kafka refuses becomes `_xHH` of its UTF-8 form. A source schema named `cdc` gets its first
letter escaped, so that its topics do not collide with our own.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cdc import events
from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

# The broker's limit (org.apache.kafka.common.internals.Topic.MAX_NAME_LENGTH).
MAX_TOPIC_LENGTH = 249

# What Kafka refuses, and what would look like an escape.
_ESCAPED = re.compile(rb"[^A-Za-z0-9_-]|_(?=x[0-9A-F]{2})")


def escape(name: str) -> str:
    """Return `name` in Kafka's alphabet, without dots; `events.unescape` gives it back."""
    return _ESCAPED.sub(lambda m: b"_x%02X" % ord(m[0]), name.encode()).decode()


def data_topic(prefix: str, schema: str, table: str) -> str:
    """Return the topic of one table's events; raise ConfigError if it is too long for Kafka."""
    first = "_x63dc" if schema == "cdc" else escape(schema)
    topic = f"{prefix}.{first}.{escape(table)}"
    if len(topic) > MAX_TOPIC_LENGTH:
        raise ConfigError(
            f"the topic of {schema}.{table} would be {len(topic)} characters long",
            hint=f"Kafka allows {MAX_TOPIC_LENGTH}: shorten log.prefix or leave the table out",
        )
    return topic


def table_of(prefix: str, topic: str) -> tuple[str, str]:
    """Return (schema, table) of a data topic; raise ConfigError if it can't be one of ours."""
    try:
        return events.unescaped_table(topic.removeprefix(f"{prefix}."))
    except ValueError as error:
        raise ConfigError(
            f"topic {topic} is the topic of no table",
            hint=f"something else writes below {prefix}: give the pipeline a log.prefix of its own",
        ) from error


def table_name(prefix: str, topic: str) -> str:
    """Return `schema.table`, as the configuration writes it, of a data topic; or raise likewise."""
    return events.table_name(*table_of(prefix, topic))


def _own(what: str) -> Callable[[str], str]:
    """Return the function that names one of the pipeline's own topics by its prefix."""
    return lambda prefix: f"{prefix}.cdc.{what}"


resume_topic = _own("resume")
frontier_topic = _own("frontier")
schema_topic = _own("schema")
dead_topic = _own("dead")  # dead letters: complete events too large for their own topics
messages_topic = _own("messages")  # logical messages
snapshot_topic = _own("snapshot")  # the snapshots' state, plans and finished ranges
followers_topic = _own("followers")  # in which followers report
groups_topic = _own("groups")  # where groups of readers started, and what webhooks gave up
retries_topic = _own("retries")  # what queues gave up and are to give out again
