"""What can be configured: one frozen struct per section, each field with its meaning and limits.

The reference in docs/CONFIG.md, the file that `cdc init` writes and every message about a wrong
value are generated from this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cdc.config.control import Control
from cdc.config.delta import Delta
from cdc.config.followers import Follower
from cdc.config.migrations import Migrations
from cdc.config.secrecy import KAFKA, Address, Options, described
from cdc.config.selection import Selection
from cdc.config.snapshot import Snapshot, SnapshotKind
from cdc.config.value_options import Values
from cdc.errors import ConfigError

LogLevel = Literal["debug", "info", "warning", "error"]
Streaming = Literal["off", "on", "parallel"]
# Where there are followers and the configuration gives no other value.
CANARY_SECONDS = 5.0


class Mask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What replaces a column's value: `value` is the hmac's key, the length, or the fixed value."""

    kind: Literal["keep", "null", "fixed", "truncate", "hmac"]
    value: str | int | float | bool | None = None

    def __repr__(self) -> str:
        """Return it without its value, which may be a key."""
        return f"Mask({self.kind})"


class TableRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is captured of a table, and how."""

    columns: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="The only columns captured; `*` stands for any text. Must hold the key.",
            examples=[["id", "name"]],
        ),
    ] = None
    exclude: Annotated[
        tuple[str, ...],
        Meta(
            description="Columns left out; not beside `columns`. Where Postgres sends one all the "
            "same (14, REPLICA IDENTITY FULL), it is null in every event.",
            examples=[["password_*"]],
        ),
    ] = ()
    where: Annotated[
        str | None,
        Meta(
            description="The publication's row filter (Postgres 15 and later), in SQL. May name "
            "columns of the replica identity only.",
            examples=["region = 'eu'"],
        ),
    ] = None
    key: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="The key's columns, in this order, instead of the primary key's. The "
            "replica identity must hold them.",
            examples=[["tenant", "id"]],
        ),
    ] = None
    mask: Annotated[
        dict[str, Mask],
        Meta(
            description="How columns are hidden, in every event, key, dead letter and log line: "
            "`null`; `{fixed: value}`; `{truncate: n}`, the first n characters; `{hmac: key}`, "
            "the HMAC-SHA256 in hex, with a key of 16 characters or more; `keep`, as it is.",
            examples=[{"email": {"hmac": "${HMAC_KEY}"}}],
        ),
    ] = {}
    snapshot: Annotated[
        SnapshotKind | None,
        Meta(
            description="How the initial snapshot copies the table: into the `log`; `direct` into "
            "Delta Lake, beside the log; or `none` of it. Default `log`.",
            examples=["none"],
        ),
    ] = None
    snapshot_where: Annotated[
        str | None,
        Meta(
            description="The rows that the initial snapshot copies, in SQL, of those that `where` "
            "lets pass. May name any column.",
            examples=["created_at > now() - interval '90 days'"],
        ),
    ] = None


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The leader: a Postgres database, its slot and its publication."""

    __repr__ = described

    dsn: Annotated[
        Address,
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
            description="What `cdc setup` publishes: `schema.table`, `schema.*` for a schema's "
            "tables; `*` stands for any text, also within a name (`public.log_*`). Exact case; "
            '`"…"` around dots, spaces and stars.',
            examples=[["public.users", "public.orders"]],
        ),
    ] = ("public.*",)
    exclude: Annotated[
        tuple[str, ...],
        Meta(
            description="Tables that `tables` matches and that are left out all the same, written "
            "alike.",
            examples=[["public.audit_*"]],
        ),
    ] = ()
    new_tables: Annotated[
        Literal["setup", "publish"],
        Meta(
            description="When tables created later in a schema that `tables` takes whole "
            "(`schema.*`) are captured: after the next `cdc setup`, or `publish`: from their first "
            "row. The latter takes Postgres 15, a superuser, and no row filter, column list or "
            "excluded table there; Postgres refuses UPDATE and DELETE on one without a key.",
        ),
    ] = "setup"
    partitions: Annotated[
        Literal["root", "leaf"],
        Meta(
            description="Whether a partitioned table is one topic (`root`) or each of its "
            "partitions one (`leaf`). Stays as it is within a log.",
        ),
    ] = "root"
    generated_columns: Annotated[
        Literal["stored", "none"],
        Meta(
            description="Whether stored generated columns are captured. Postgres sends them from "
            "18 on; before, they are in no event.",
        ),
    ] = "stored"
    origin: Annotated[
        Literal["any", "none"],
        Meta(
            description="Whether changes that came to this database by replication are captured: "
            "`any`, or `none` of them (Postgres 16 and later).",
        ),
    ] = "any"
    streaming: Annotated[
        Streaming,
        Meta(
            description="Whether Postgres sends a transaction larger than its "
            "`logical_decoding_work_mem` while it is open; the daemon keeps it in `spool_dir` "
            "until it commits. `off`: Postgres keeps it on its own disk. `parallel` is the same "
            "with what Postgres 16 and later tell besides of rolled back parts.",
        ),
    ] = "off"
    spool_dir: Annotated[
        str | None,
        Meta(
            description="Where open transactions are kept, in a private directory of the "
            "pipeline's own: needs room for the largest of them, and survives nothing. Default: "
            "the system's directory for temporary files.",
            examples=["/var/lib/lockstep"],
        ),
    ] = None
    failover: Annotated[
        bool | Literal["auto"],
        Meta(
            description="Whether `cdc setup` makes the slot one that standbys copy, so that it "
            "outlives a promotion: Postgres 17 and later can, `auto` does it there. See "
            "docs/OPERATIONS.md for what the standbys need.",
        ),
    ] = "auto"
    canary_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=3_600)] | None,
        Meta(
            description="How often the daemon puts a logical message of its own, `cdc.canary`, "
            "into the WAL: it comes out of every follower, and its age there is their health. 0: "
            "never. Default 5 where there are followers, else 0.",
            examples=[5],
        ),
    ] = None
    password_file: Annotated[
        str | None,
        Meta(
            description="A file that holds the password, read at every connect, so that it may be "
            "rotated. A relative path counts from the configuration file.",
            examples=["/run/secrets/postgres"],
        ),
    ] = None


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The log: a Kafka cluster and the form of its topics."""

    __repr__ = described

    bootstrap_servers: Annotated[
        Address,
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
    direct: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="Whether small Kafka transactions are written by Lockstep's own client, in "
            "fewer round trips (`on`), where the brokers have transactions V2 (Kafka 4.0) and "
            "`kafka` has nothing that only librdkafka knows; or all by librdkafka (`off`). "
            "`auto`: `on` where topics have more than one copy.",
        ),
    ] = "auto"
    kafka: Annotated[
        dict[str, str | int | float | bool],
        Options(KAFKA),
        Meta(
            description="Further librdkafka settings by their own names: security, timeouts, "
            "compression. Those that exactly-once rests on are refused.",
            examples=[{"security.protocol": "sasl_ssl", "sasl.password": "${KAFKA_PASSWORD}"}],
        ),
    ] = {}


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a Kafka transaction ends: at its limit of size, time or idleness, whichever is first."""

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

    __repr__ = described

    listen: Annotated[
        Address,
        Meta(
            description="`host:port` of `/livez`, `/readyz`, `/healthz` and `/metrics`; port 0 "
            "takes a free one (the daemon logs it); empty serves none. There is no login: keep it "
            "private.",
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
    tables: Annotated[
        dict[str, TableRule],
        Meta(
            description="What is captured of single tables. A name may be a pattern, as in "
            "`source.tables`; of several that match, later ones win, setting by setting; excluded "
            "and masked columns add up.",
            examples=[
                {
                    "public.users": {
                        "exclude": ["password"],
                        "mask": {"email": {"hmac": "${HMAC_KEY}"}},
                    }
                }
            ],
        ),
    ] = {}
    followers: Annotated[
        dict[str, Follower],
        Meta(
            description="The stores that follow the log, by names of 1 to 40 of `a-z 0-9 _ -`.",
            examples=[
                {
                    "mirror": {"delta": {"path": "s3a://lake/shop"}},
                    "cache": {
                        "tables": ["public.users"],
                        "redis": {"url": "redis://:${REDIS_PASSWORD}@localhost:6379/0"},
                    },
                    "search": {"opensearch": {"url": "http://localhost:9200"}},
                }
            ],
        ),
    ] = {}
    control: Control = Control()
    snapshot: Snapshot = Snapshot()
    delta: Delta = Delta()
    migrations: Migrations = Migrations()
    batch: Batch = Batch()
    http: Http = Http()
    values: Values = Values()
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
    def canary_seconds(self) -> float:
        """How often a canary is sent; 0 is never."""
        given = self.source.canary_seconds
        return given if given is not None else CANARY_SECONDS if self.followers else 0.0

    @property
    def password(self) -> str | None:
        """The password in `source.password_file`, read each time, so that it may be rotated."""
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
    def selection(self) -> Selection:
        """What is captured of any table."""
        return Selection(self)
