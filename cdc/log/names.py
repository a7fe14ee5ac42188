"""Topic names, reversibly.

`<prefix>.<schema>.<table>` for data, `<prefix>.cdc.<what>` for our own. Kafka allows letters,
digits, `.`, `_` and `-`; Postgres allows anything. So the dot only ever separates, and every other
byte that Kafka refuses becomes `_xHH` of its UTF-8 form. A source schema named `cdc` gets its first
letter escaped, so that its topics do not collide with our own.
"""

from __future__ import annotations

import re

from cdc import events
from cdc.errors import ConfigError

# The broker's limit (org.apache.kafka.common.internals.Topic.MAX_NAME_LENGTH).
MAX_TOPIC_LENGTH = 249

_PLAIN = re.compile(rb"[A-Za-z0-9_-]")
_ESCAPE = re.compile(r"_x([0-9A-F]{2})")


def escape(name: str) -> str:
    """Return `name` in Kafka's alphabet, without dots; `unescape` gives it back."""
    raw = name.encode()
    out = []
    for i, byte in enumerate(raw):
        char = raw[i : i + 1]
        looks_escaped = char == b"_" and re.match(rb"_x[0-9A-F]{2}", raw[i:])
        out.append(
            char.decode() if _PLAIN.match(char) and not looks_escaped else f"_x{byte:02X}",
        )
    return "".join(out)


def unescape(name: str) -> str:
    """Return what `escape` was given."""
    return _ESCAPE.sub(lambda m: chr(int(m[1], 16)), name).encode("latin-1").decode()


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
        schema, table = topic.removeprefix(f"{prefix}.").split(".")
        return unescape(schema), unescape(table)
    except ValueError as error:
        raise ConfigError(
            f"topic {topic} is the topic of no table",
            hint=f"something else writes below {prefix}: give the pipeline a log.prefix of its own",
        ) from error


def table_name(prefix: str, topic: str) -> str:
    """Return `schema.table`, as the configuration writes it, of a data topic; or raise likewise."""
    return events.table_name(*table_of(prefix, topic))


def resume_topic(prefix: str) -> str:
    """Return the topic of the resume records."""
    return f"{prefix}.cdc.resume"


def frontier_topic(prefix: str) -> str:
    """Return the topic of the frontier records."""
    return f"{prefix}.cdc.frontier"


def schema_topic(prefix: str) -> str:
    """Return the topic of the schema records."""
    return f"{prefix}.cdc.schema"


def dead_topic(prefix: str) -> str:
    """Return the topic of the dead letters: complete events too large for their own topics."""
    return f"{prefix}.cdc.dead"


def messages_topic(prefix: str) -> str:
    """Return the topic of the logical messages."""
    return f"{prefix}.cdc.messages"


def snapshot_topic(prefix: str) -> str:
    """Return the topic of the snapshots' state, plans and finished ranges."""
    return f"{prefix}.cdc.snapshot"


def followers_topic(prefix: str) -> str:
    """Return the topic in which followers report."""
    return f"{prefix}.cdc.followers"
