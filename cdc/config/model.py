"""What can be configured: one frozen struct a section, each field with its meaning and its limits.

The reference in docs/CONFIG.md, the file that `cdc init` writes and every message about a wrong
value are made from what stands here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from cdc.errors import ConfigError

LogLevel = Literal["debug", "info", "warning", "error"]


class TablePattern(NamedTuple):
    """One entry of `source.tables`; `table` is None for every table of the schema."""

    schema: str
    table: str | None

    def matches(self, schema: str, table: str) -> bool:
        return schema == self.schema and self.table in (None, table)


_NAME = r'"(?:[^"]|"")+"|[^\s".*]+'
_TABLE_PATTERN = re.compile(rf"({_NAME})\.({_NAME}|\*)")


def parse_table_pattern(text: str) -> TablePattern:
    """Return the pattern that `text` writes: `schema.table` or `schema.*`; raise ValueError.

    Names stand as the catalog holds them (no folding to lower case); double quotes, doubled inside,
    are needed only around dots, spaces, stars and quotes.
    """
    match = _TABLE_PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"not a table pattern: {text!r}")
    schema, table = match.groups()
    return TablePattern(_unquote(schema), None if table == "*" else _unquote(table))


def _unquote(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The leader: a Postgres database, its slot and its publication."""

    dsn: Annotated[
        str,
        Meta(
            min_length=1,
            description="A libpq URL or connection string. Keep its password elsewhere: in "
            "`password_file`, in `${VAR}`, or in libpq's own passfile.",
            examples=["postgresql://lockstep@localhost:5432/shop"],
        ),
    ]
    slot: Annotated[
        str | None,
        Meta(
            description="The replication slot: 1 to 63 of `a-z 0-9 _`. "
            "Default `lockstep_<pipeline>`.",
            examples=["lockstep_shop"],
        ),
    ] = None
    publication: Annotated[
        str | None,
        Meta(
            description="The publication, as the catalog names it. Default `lockstep_<pipeline>`.",
            examples=["lockstep_shop"],
        ),
    ] = None
    tables: Annotated[
        tuple[str, ...],
        Meta(
            min_length=1,
            description="What `cdc setup` publishes: `schema.table`, or `schema.*` for the tables "
            'that the schema holds at that time. Exact case; `"…"` around dots and spaces.',
            examples=[["public.users", "public.orders"]],
        ),
    ] = ("public.*",)
    password_file: Annotated[
        str | None,
        Meta(
            description="A file that holds the password, read at every connect, so that it may be "
            "rotated. A relative path counts from the configuration file.",
            examples=["/run/secrets/postgres"],
        ),
    ] = None


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The log: a Kafka cluster and the topics' shape."""

    bootstrap_servers: Annotated[
        str,
        Meta(
            min_length=1,
            description="Kafka brokers, `host:port`, separated by commas.",
            examples=["localhost:9092"],
        ),
    ]
    prefix: Annotated[
        str | None,
        Meta(
            description="The first part of every topic's name: 1 to 100 of `A-Z a-z 0-9 _ -`. "
            "Default: the pipeline's name.",
            examples=["shop"],
        ),
    ] = None
    partitions: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000,
            description="Partitions of each data topic that `cdc` creates. The resume record pins "
            "the count; a changed one is refused.",
        ),
    ] = 4
    replication_factor: Annotated[
        int,
        Meta(ge=1, le=100, description="Copies of each topic. Use 3 wherever loss matters."),
    ] = 1
    retention_hours: Annotated[
        float,
        Meta(description="How long data and frontier topics are kept; negative keeps for ever."),
    ] = 168.0
    kafka: Annotated[
        dict[str, str | int | float | bool],
        Meta(
            description="Further librdkafka settings by their own names: security, timeouts, "
            "compression. Those that exactly-once rests on are refused.",
            examples=[{"security.protocol": "sasl_ssl", "sasl.password": "${KAFKA_PASSWORD}"}],
        ),
    ] = {}


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a Kafka transaction ends: by what comes first of size, time and idleness."""

    max_events: Annotated[
        int, Meta(ge=1, le=10_000_000, description="Events in one Kafka transaction.")
    ] = 50_000
    max_bytes: Annotated[
        int,
        Meta(
            ge=65_536,
            le=1_073_741_824,
            description="Bytes of events in one Kafka transaction; bounds the daemon's memory.",
        ),
    ] = 33_554_432
    max_wait_ms: Annotated[
        int,
        Meta(ge=1, le=30_000, description="How long a Kafka transaction stays open under load."),
    ] = 200


class Http(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where health and metrics are served."""

    listen: Annotated[
        str,
        Meta(
            description="`host:port` of `/livez`, `/readyz` and `/metrics`; port 0 takes a free "
            "one (the daemon logs it); empty serves none. There is no login: keep it private.",
        ),
    ] = "127.0.0.1:8080"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pipeline: one database, one slot, one daemon at a time."""

    pipeline: Annotated[
        str,
        Meta(
            description="The pipeline's name: 1 to 54 of `a-z 0-9 _`. Slot, publication, topics "
            "and the transactional id are named after it, so it never changes.",
            examples=["shop"],
        ),
    ]
    source: Source
    log: Log
    batch: Batch = Batch()
    http: Http = Http()
    log_level: Annotated[
        LogLevel, Meta(description="The least severe log line that is written.")
    ] = "info"

    @property
    def slot(self) -> str:
        return self.source.slot or f"lockstep_{self.pipeline}"

    @property
    def publication(self) -> str:
        return self.source.publication or f"lockstep_{self.pipeline}"

    @property
    def prefix(self) -> str:
        return self.log.prefix or self.pipeline

    @property
    def password(self) -> str | None:
        """The password in `source.password_file`, read anew, so that it may be rotated."""
        name = self.source.password_file
        if name is None:
            return None
        try:
            return Path(name).read_text("utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(
                f"cannot read source.password_file {name}: {why}",
                hint="put the password there, readable for the user that runs cdc",
            ) from error

    @property
    def table_patterns(self) -> tuple[TablePattern, ...]:
        return tuple(parse_table_pattern(text) for text in self.source.tables)
