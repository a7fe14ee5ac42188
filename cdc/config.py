"""The configuration: one YAML file, checked once, with the environment above it.

Every field is a field of a frozen struct here, so what is not here is refused by name. Values are
plain; nothing in this module connects to anything.
"""

from __future__ import annotations

import msgspec


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The leader: a Postgres database, its slot and its publication."""

    dsn: str  # a libpq connection string or URL; without the password where password_file names one
    slot: str | None = None  # default lockstep_<pipeline>
    publication: str | None = None  # default lockstep_<pipeline>
    tables: tuple[str, ...] = ("public.*",)  # what `cdc setup` publishes: schema.table or schema.*
    password_file: str | None = None


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The log: a Kafka cluster and the topics' shape."""

    bootstrap_servers: str
    prefix: str | None = None  # default: the pipeline's name
    partitions: int = 4
    replication_factor: int = 1
    retention_hours: float = 168.0  # of data and frontier topics; negative keeps for ever
    kafka: dict[str, str | int | float | bool] = {}  # further librdkafka settings (security, …)


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a Kafka transaction ends: by what comes first of size, time and idleness."""

    max_events: int = 50_000
    max_bytes: int = 33_554_432
    max_wait_ms: int = 200


class Http(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where health and metrics are served; an empty `listen` serves none."""

    listen: str = "127.0.0.1:8080"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pipeline."""

    pipeline: str
    source: Source
    log: Log
    batch: Batch = Batch()
    http: Http = Http()
    log_level: str = "info"

    @property
    def slot(self) -> str:
        return self.source.slot or f"lockstep_{self.pipeline}"

    @property
    def publication(self) -> str:
        return self.source.publication or f"lockstep_{self.pipeline}"

    @property
    def prefix(self) -> str:
        return self.log.prefix or self.pipeline
