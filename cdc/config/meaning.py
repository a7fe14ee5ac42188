"""Refuse values of the right type that Postgres, Kafka or Lockstep could not work with.

One function a section; each yields the field's name and the complaint. They see a section only
after its types are right.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from cdc.config.model import Config, Http, Log, Source, parse_table_pattern
from cdc.config.show import MASK, has_password

if TYPE_CHECKING:
    from collections.abc import Iterator

    import msgspec

# What exactly-once rests on; whoever sets one of these gets it from us, not from the file.
OWNED_KAFKA_SETTINGS = frozenset(
    {
        "acks",
        "bootstrap.servers",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.idempotence",
        "enable.partition.eof",
        "group.id",
        "isolation.level",
        "message.send.max.retries",
        "metadata.broker.list",
        "partitioner",
        "request.required.acks",
        "retries",
        "transactional.id",
    }
)

_SLOT = re.compile(r"[a-z0-9_]{1,63}")
_PIPELINE = re.compile(r"[a-z0-9_]{1,54}")
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,100}")
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_MAX_PORT = 65_535
_MAX_IDENTIFIER_BYTES = 63


def findings(section: msgspec.Struct) -> Iterator[tuple[str, str]]:
    """Yield a field's name and what is wrong with its value, for each such field of `section`."""
    match section:
        case Config():
            if not _PIPELINE.fullmatch(section.pipeline):
                name = repr(section.pipeline)
                yield "pipeline", f"{name} cannot name a pipeline; expected 1 to 54 of a-z 0-9 _"
        case Source():
            yield from _source(section)
        case Log():
            yield from _log(section)
        case Http():
            if section.listen and (wrong := _wrong_host_port(section.listen, least=0)):
                yield "listen", wrong


def _source(source: Source) -> Iterator[tuple[str, str]]:
    dsn = source.dsn.strip()
    if not dsn.startswith(("postgresql://", "postgres://")) and "=" not in dsn:
        yield (
            "dsn",
            "neither a URL (postgresql://user@host:port/db) nor keywords (host=… dbname=… user=…)",
        )
    elif re.search(r"\breplication\s*=", dsn):
        yield "dsn", "must not set `replication`: Lockstep does, where it streams"
    if source.slot is not None and not _SLOT.fullmatch(source.slot):
        yield (
            "slot",
            f"{source.slot!r} cannot name a slot; expected 1 to 63 of a-z 0-9 _",
        )
    name = source.publication
    if name is not None and not _is_identifier(name):
        yield "publication", f"{name!r} cannot name a publication; 1 to 63 bytes"
    for text in source.tables:
        if complaint := _wrong_table(text):
            yield "tables", complaint
    if source.password_file is not None:
        if has_password(dsn):
            yield "password_file", "the dsn has a password already; keep one of them"
        try:
            Path(source.password_file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            yield "password_file", f"cannot read {source.password_file}: {why}"


def _is_identifier(name: str) -> bool:
    return 0 < len(name.encode()) <= _MAX_IDENTIFIER_BYTES and "\0" not in name


def _wrong_table(text: str) -> str | None:
    try:
        pattern = parse_table_pattern(text)
    except ValueError:
        return (
            f"{text!r} names no table; expected schema.table or schema.*, with "
            'double quotes around a name that holds dots or spaces: public."odd.name"'
        )
    if pattern.schema in ("pg_catalog", "information_schema"):
        return f"{text!r}: Postgres does not publish its catalogs"
    return None


def _log(log: Log) -> Iterator[tuple[str, str]]:
    for server in log.bootstrap_servers.split(","):
        if wrong := _wrong_host_port(server.strip(), least=1):
            yield "bootstrap_servers", wrong
    if log.prefix is not None and not _PREFIX.fullmatch(log.prefix):
        yield (
            "prefix",
            f"{log.prefix!r} cannot start a topic's name; expected 1 to 100 of A-Z a-z 0-9 _ -",
        )
    if log.retention_hours == 0 or not math.isfinite(log.retention_hours):
        yield (
            "retention_hours",
            f"{log.retention_hours}: 0 would delete events at once; negative keeps them for ever",
        )
    for name in log.kafka:
        if name in OWNED_KAFKA_SETTINGS:
            yield (
                f"kafka.{name}",
                "is set by Lockstep: exactly-once rests on it; remove it",
            )


def _wrong_host_port(text: str, *, least: int) -> str | None:
    """Return what is wrong with `text` as `host:port`, or None; `least` is the lowest port."""
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        shown = repr(text) if "@" not in text else MASK
        return f"{shown} is no address; expected host:port, such as localhost:9092"
    if not least <= int(match[2]) <= _MAX_PORT:
        return f"{text!r}: a port is a number from {least} to {_MAX_PORT}"
    return None
