"""What can be configured: one frozen struct per section, each field with its meaning and limits.

The reference in docs/CONFIG.md, the file that `cdc init` writes and every message about a wrong
value are generated from this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from cdc.config.archive import Archive
from cdc.config.followers import Follower
from cdc.config.keyring import KeyringConfig
from cdc.config.oidc import Oidc
from cdc.config.secrecy import KAFKA, Address, OptionMap, Secret, Section
from cdc.config.selection import Selection
from cdc.config.snapshot import Snapshot
from cdc.config.tables import Cleanup, TableRule
from cdc.config.tracing import Tracing
from cdc.config.value_options import Values
from cdc.config.views import View
from cdc.config.webhooks import Webhook
from cdc.errors import ConfigError

LogLevel = Literal["debug", "info", "warning", "error"]
Streaming = Literal["off", "on", "parallel"]
# Where there are followers and the configuration gives no other value.
CANARY_SECONDS = 5.0


class Source(Section, frozen=True, kw_only=True):
    """The leader: a Postgres database, its slot and its publication."""

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
            description="Tables that are left out although `tables` matches them, in the same "
            "notation.",
            examples=[["public.audit_*"]],
        ),
    ] = ()
    new_tables: Annotated[
        Literal["setup", "publish"],
        Meta(
            description="When tables created later in a schema that `tables` names as "
            "`schema.*` are captured: after the next `cdc setup`, or `publish`: from their first "
            "row. The latter needs Postgres 15, a superuser, and no row filter, column list or "
            "excluded table there; Postgres refuses UPDATE and DELETE on one without a key.",
        ),
    ] = "setup"
    partitions: Annotated[
        Literal["root", "leaf"],
        Meta(
            description="Whether a partitioned table is one topic (`root`) or each of its "
            "partitions one (`leaf`). Cannot be changed within a log.",
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
            "until it commits. `off`: Postgres keeps it on its own disk. `parallel`: as `on`; "
            "Postgres 16 and later send more about parts that are rolled back.",
        ),
    ] = "off"
    spool_dir: Annotated[
        str | None,
        Meta(
            description="Where open transactions are kept, in a private directory of the "
            "pipeline's own: needs space for the largest of them; no later process reads it. "
            "Default: the system's directory for temporary files.",
            examples=["/var/lib/lockstep"],
        ),
    ] = None
    failover: Annotated[
        bool | Literal["auto"],
        Meta(
            description="Whether standbys copy the slot that `cdc setup` creates, so that it "
            "survives a promotion (Postgres 17 and later). `auto`: where Postgres can. See "
            "docs/OPERATIONS.md for what the standbys need.",
        ),
    ] = "auto"
    canary_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=3_600)] | None,
        Meta(
            description="How often the daemon puts a logical message of its own, `cdc.canary`, "
            "into the WAL: the age of the newest one that a follower has applied shows its "
            "health. 0: never. Default 5 where there are followers, else 0.",
            examples=[5],
        ),
    ] = None
    password_file: Annotated[
        str | None,
        Meta(
            description="A file that holds the password, read at every connect, so that it may be "
            "rotated. A relative path starts at the configuration file's folder.",
            examples=["/run/secrets/postgres"],
        ),
    ] = None


class Log(Section, frozen=True, kw_only=True):
    """The log: a Kafka cluster and the form of its topics."""

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
    cleanup: Annotated[
        Cleanup,
        Meta(
            description="What Kafka removes from data topics: what is older than `retention_hours` "
            "(`delete`), older events of each key (`compact`), or `both`. The daemon changes the "
            "topics when it starts with another value.",
        ),
    ] = "delete"
    compaction_lag_hours: Annotated[
        float,
        Meta(
            gt=0,
            description="How long every event of a compacted topic is kept: longer than a follower "
            "may be down. While one lags by half of it, the daemon lets nothing be compacted. "
            "Tombstones are kept for as long again.",
        ),
    ] = 24.0
    direct: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="Whether Kafka transactions that are small, or have little for each of "
            "many partitions, are written by Lockstep's own client, in fewer requests (`on`), "
            "where the brokers have transactions V2 (Kafka 4.0) and `kafka` has nothing that only "
            "librdkafka knows; or all by librdkafka (`off`). `auto`: small ones only where topics "
            "have more than one copy.",
        ),
    ] = "auto"
    kafka: Annotated[
        dict[str, str | int | float | bool],
        OptionMap(KAFKA),
        Meta(
            description="Further librdkafka settings by their own names: security, timeouts, "
            "compression. Those that exactly-once depends on are refused.",
            examples=[{"security.protocol": "sasl_ssl", "sasl.password": "${KAFKA_PASSWORD}"}],
        ),
    ] = {}


class Control(Section, frozen=True, kw_only=True):
    """Who may command the daemon through the database."""

    secret: Annotated[
        Secret | None,
        Meta(
            description="What proves to the daemon that a command, such as `cdc snapshot`, comes "
            "from somebody with this configuration: 32 characters or more, the same wherever "
            "`cdc` is run for this pipeline. `cdc init` writes one. Without it the daemon executes "
            "no command that comes with the stream.",
            examples=["${LOCKSTEP_SECRET}"],
        ),
    ] = None


class Delta(Section, frozen=True, kw_only=True):
    """Delta Lake: one mirror of each table below a path."""

    path: Annotated[
        Address | None,
        Meta(
            description="Where the mirrors are stored, as Spark names it: a table's is "
            "`<path>/<schema>.<table>`, named like its topic. `tables.<table>.snapshot: direct` "
            "needs it.",
            examples=["s3a://lake/shop"],
        ),
    ] = None


class Migrations(Section, frozen=True, kw_only=True):
    """What may be created in the source database, in the schema `lockstep`; none is needed."""

    signal_table: Annotated[
        bool,
        Meta(
            description="A table `lockstep.signal` whose new rows are commands to the daemon, like "
            "those of `cdc snapshot`.",
        ),
    ] = False
    heartbeat_table: Annotated[
        bool,
        Meta(
            description="A table `lockstep.heartbeat` that the daemon writes to while it streams. "
            "An idle slot advances without it, too.",
        ),
    ] = False
    heartbeat_seconds: Annotated[
        int,
        Meta(ge=5, le=3_600, description="How often it does; checked every five seconds."),
    ] = 10
    ddl_audit: Annotated[
        bool,
        Meta(
            description="Event triggers that carry each DDL statement in the WAL, so that it "
            "is in the schema topic, at its position. Creating them needs a superuser.",
        ),
    ] = False


class BatchLimits(Section, frozen=True, kw_only=True):
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
    linger_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=30_000,
            description="How long changes wait for others to share a Kafka transaction, at most"
            " `max_wait_ms`. With 0 it ends when nothing more has arrived: least latency, and a"
            " Kafka transaction for almost every small commit.",
        ),
    ] = 0


class Http(Section, frozen=True, kw_only=True):
    """Where health and metrics are served."""

    listen: Annotated[
        Address,
        Meta(
            description="`host:port` of `/livez`, `/readyz`, `/healthz` and `/metrics`; port 0 "
            "takes a free one (the daemon logs it); empty serves none. There is no login: keep it "
            "private.",
        ),
    ] = "127.0.0.1:8080"


class Console(Section, frozen=True, kw_only=True):
    """The console that `cdc run` serves: a page that shows the pipeline, read-only."""

    token_file: Annotated[
        str | None,
        Meta(
            description="A file with the token that every viewer is asked for, 32 characters or "
            "more. A relative path starts at the configuration file's folder.",
            examples=["/run/secrets/console"],
        ),
    ] = None
    oidc: Oidc = Oidc()
    listen: Annotated[
        Address,
        Meta(
            description="Where the console listens, `host:port`. Where this is empty, `cdc run` "
            "serves none, and `cdc console` takes 127.0.0.1:8600. It runs in a process of its own, "
            "which the daemon starts again when it ends. An address that other machines reach "
            "needs a token, or an issuer of tokens (`oidc`).",
            examples=["127.0.0.1:8600"],
        ),
    ] = ""
    hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Further names by which it is called, such as a proxy's.",
            examples=[["cdc.example.com"]],
        ),
    ] = ()
    index: Annotated[
        tuple[str, ...],
        Meta(
            description="Tables whose keys are indexed as soon as the console runs, in the "
            "notation of `source.tables`; others are from the first search of a key on. Each event "
            "is read once for it, and takes 4 bytes on disk. Of no use with an archive, which is "
            "asked instead.",
            examples=[["public.orders"]],
        ),
    ] = ()
    index_dir: Annotated[
        str | None,
        Meta(
            description="Where the indexes of keys are kept, in a private directory of the "
            "pipeline's own. A relative path starts at the configuration file's folder. Default: "
            "`key-index` in the cache's directory, `~/.cache/lockstep`.",
            examples=["/var/lib/lockstep/key-index"],
        ),
    ] = None


class Config(Section, frozen=True, kw_only=True):
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
    views: Annotated[
        dict[str, View],
        Meta(
            description="Maintained views, by names of 1 to 40 of `a-z 0-9 _`: followers with "
            "`views` hold them (docs/VIEWS.md).",
            examples=[
                {
                    "order_totals": {
                        "sql": "SELECT order_id, sum(price) AS total FROM lines GROUP BY order_id",
                        "key": ["order_id"],
                    }
                }
            ],
        ),
    ] = {}
    view_files: Annotated[
        str | None,
        Meta(
            description="Folder with more views, in one file `NAME.sql` each: the query, after "
            "comment lines with its other fields (`-- key: order_id`); or in `NAME.py`, a "
            "function in Python (docs/CODE.md). Relative to this file.",
            examples=["views"],
        ),
    ] = None
    webhooks: Annotated[
        dict[str, Webhook],
        Meta(
            description="Receivers of tables' changes over HTTP, by names of 1 to 40 of "
            "`a-z 0-9 _ -`: `cdc webhook run` sends them (docs/WEBHOOKS.md).",
            examples=[
                {
                    "billing": {
                        "url": "https://example.com/changes",
                        "secrets": ["${HOOK_SECRET}"],
                        "tables": ["public.orders"],
                    }
                }
            ],
        ),
    ] = {}
    control: Control = Control()
    snapshot: Snapshot = Snapshot()
    delta: Delta = Delta()
    archive: Archive = Archive()
    keyring: KeyringConfig = KeyringConfig()
    migrations: Migrations = Migrations()
    batch: BatchLimits = BatchLimits()
    http: Http = Http()
    tracing: Tracing = Tracing()
    console: Console = Console()
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
    def hides(self) -> bool:
        """Whether some column may be hidden."""
        return any(rule.hides for rule in self.tables.values())

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
        return Selection(self.source.tables, self.source.exclude, self.tables)
