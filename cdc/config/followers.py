"""The section `followers`: which stores follow the log, by name, and in which form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from cdc.config.secrecy import INDEX, KAFKA, STORAGE, Address, OptionMap, Secret, Section
from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Names = tuple[str, ...]


class DeltaFollower(Section, frozen=True, kw_only=True):
    """Mirrors in Delta Lake: one table each."""

    path: Annotated[
        Address | None,
        Meta(
            description="Where the mirrors are stored. Default `delta.path`.",
            examples=["s3a://lake/x"],
        ),
    ] = None
    storage: Annotated[
        dict[str, str],
        OptionMap(STORAGE),
        Meta(
            description="Options of the object store, as delta-rs names them; credentials are also "
            "taken from the environment.",
            examples=[{"AWS_REGION": "eu-central-1"}],
        ),
    ] = {}
    history: Annotated[
        Names,
        Meta(
            description="Tables that keep every version of a row, with the time and LSN from which "
            "and until which it was valid, instead of the newest only.",
            examples=[["public.prices"]],
        ),
    ] = ()
    deletes: Annotated[
        Literal["hard", "soft"],
        Meta(description="`soft` keeps a deleted row, marked, with its last values."),
    ] = "hard"
    applier: Annotated[
        Literal["auto", "delta-rs", "vectors", "spark"],
        Meta(
            description="How batches are applied: merged by delta-rs, by deletion vectors with the "
            "keys in memory, or merged by Spark. `auto`: a table is rewritten up to 1 MB, merged "
            "by Spark above `spark_above_bytes`, and gets deletion vectors between."
        ),
    ] = "auto"
    spark_above_bytes: Annotated[
        int, Meta(ge=0, description="Tables larger than this are merged by Spark.")
    ] = 1_000_000_000
    cluster: Annotated[
        dict[str, Names],
        Meta(
            description="By table, the columns by which its files are clustered.",
            examples=[{"public.orders": ["customer_id"]}],
        ),
    ] = {}
    partition: Annotated[
        dict[str, Names], Meta(description="By table, the columns by which it is partitioned.")
    ] = {}
    optimize_minutes: Annotated[
        float, Meta(ge=0, description="How often small files are made into large ones; 0: never.")
    ] = 60.0
    vacuum_hours: Annotated[
        float,
        Meta(
            ge=0,
            description="How old a file that no version needs may get; 0: none is deleted. Reading "
            "as of an earlier time reaches back as far.",
        ),
    ] = 168.0


class RedisShape(Section, frozen=True, kw_only=True):
    """How a table's rows are stored in Redis. `{column}` in a template is that column's value."""

    key: Annotated[
        str | None,
        Meta(
            description="The key's template; `{{` and `}}` are braces. It starts with text, so "
            "that no value of a row can be another table's key. Default "
            "`<prefix>:<schema>.<table>:<key>`.",
            examples=["user:{id}"],
        ),
    ] = None
    form: Annotated[
        Literal["row", "fields", "text", "hash", "set", "zset"],
        Meta(
            description="`row`: the row as JSON; `fields`: some columns as JSON; `text`: `value` "
            "filled in; `hash`: a Redis hash of columns; `set` and `zset`: the row is a `member` "
            "of the collection that `key` names, in a sorted set with `score`."
        ),
    ] = "row"
    fields: Annotated[Names, Meta(description="Columns of `fields` and `hash`; default all.")] = ()
    value: Annotated[
        str | None, Meta(description="Template of `text`.", examples=["{first} {last}"])
    ] = None
    member: Annotated[str | None, Meta(description="Template of a member of a set or zset.")] = None
    score: Annotated[
        str | None, Meta(description="The column that is the score of a member of a zset.")
    ] = None
    ttl_seconds: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="The key expires after this time without a change; not in `set` or `zset`."
        ),
    ] = None


class RedisFollower(Section, frozen=True, kw_only=True):
    """A cache in Redis: plain values that any client can GET."""

    url: Annotated[
        Address,
        Meta(
            min_length=1,
            description="`redis://`, `rediss://` or `unix://`; with `cluster: true` for a cluster.",
            examples=["redis://localhost:6379/0"],
        ),
    ]
    prefix: Annotated[
        str | None, Meta(description="In front of every key. Default the pipeline's prefix.")
    ] = None
    cluster: Annotated[bool, Meta(description="The URL names a node of a Redis cluster.")] = False
    shapes: Annotated[
        dict[str, RedisShape],
        Meta(
            description="By table; of a table without one, complete rows are stored as JSON.",
            examples=[{"public.users": {"key": "user:{id}", "form": "hash"}}],
        ),
    ] = {}
    tombstone_hours: Annotated[
        float, Meta(gt=0, description="How long a deleted row's version is kept.")
    ] = 24.0


class OpenSearchFollower(Section, frozen=True, kw_only=True):
    """An index in OpenSearch for each table, with an alias."""

    url: Annotated[Address, Meta(min_length=1, examples=["http://localhost:9200"])]
    prefix: Annotated[
        str | None,
        Meta(description="In front of every alias, `<prefix>-<schema>.<table>`. Default as Redis."),
    ] = None
    user: str | None = None
    password: Secret | None = None
    ca_file: Annotated[str | None, Meta(description="PEM; default the system's authorities.")] = (
        None
    )
    aliases: Annotated[
        dict[str, str],
        Meta(description="By table, its alias.", examples=[{"public.products": "products"}]),
    ] = {}
    mappings: Annotated[
        dict[str, dict[str, object]],
        OptionMap(INDEX),
        Meta(
            description="By table, properties that replace those derived from the columns' types.",
            examples=[{"public.products": {"title": {"type": "text", "analyzer": "english"}}}],
        ),
    ] = {}
    settings: Annotated[
        dict[str, object],
        OptionMap(INDEX, "index."),
        Meta(description="Settings of new indices.", examples=[{"number_of_shards": 3}]),
    ] = {}


class SqlFollower(Section, frozen=True, kw_only=True):
    """Typed tables in Postgres or SQLite, and the frontier in a table alongside them."""

    url: Annotated[
        Address,
        Meta(
            min_length=1,
            description="As SQLAlchemy writes it: `postgresql://` or `sqlite:///`.",
            examples=["postgresql://copy:${SQL_PASSWORD}@localhost/copy", "sqlite:////srv/copy.db"],
        ),
    ]
    schema: Annotated[
        str | None,
        Meta(
            description="The schema of all tables, in Postgres. Default each table's own, and"
            " `public` for `lockstep_frontiers`."
        ),
    ] = None


class TopicFollower(Section, frozen=True, kw_only=True):
    """Compacted Kafka topics: one for each table, and one with the frontier."""

    bootstrap_servers: Annotated[
        Address | None,
        Meta(
            description="Kafka brokers, as `log.bootstrap_servers`. Default: those of the log, with"
            " the settings of `log.kafka`.",
            examples=["kafka.example:9092"],
        ),
    ] = None
    prefix: Annotated[
        str | None,
        Meta(
            description="The first part of every topic's name, `<prefix>.<schema>.<table>`, which"
            " belongs to this follower alone. Default `<log.prefix>-<follower>`.",
            examples=["shop-copy"],
        ),
    ] = None
    partitions: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)] | None,
        Meta(description="Partitions of each new topic of rows. Default those of the log."),
    ] = None
    replication_factor: Annotated[
        Annotated[int, Meta(ge=1, le=100)] | None,
        Meta(description="Copies of each new topic. Default those of the log."),
    ] = None
    kafka: Annotated[
        dict[str, str | int | float | bool],
        OptionMap(KAFKA),
        Meta(
            description="Further librdkafka settings, as `log.kafka`.",
            examples=[{"security.protocol": "sasl_ssl", "sasl.password": "${KAFKA_PASSWORD}"}],
        ),
    ] = {}


class PluginFollower(Section, frozen=True, kw_only=True):
    """A store by a sink that is not part of Lockstep."""

    kind: Annotated[
        str,
        Meta(
            min_length=1,
            description="The name of its entry point in the group `lockstep.sinks`.",
            examples=["files"],
        ),
    ]
    options: Annotated[
        dict[str, object],
        OptionMap(frozenset()),
        Meta(
            description="What that sink takes; checked by its own model when the follower starts.",
            examples=[{"path": "/srv/files"}],
        ),
    ] = {}


class Document(Section, frozen=True, kw_only=True):
    """A row with the rows that belong to it, at any depth."""

    table: Annotated[str, Meta(description="The table, `schema.table`.")]
    by: Annotated[
        dict[str, str],
        Meta(
            description="This table's column to the parent's column, the foreign key's pairs; none "
            "in the root.",
            examples=[{"order_id": "id"}],
        ),
    ] = {}
    one: Annotated[bool, Meta(description="At most one row, an object; else a list.")] = False
    columns: Annotated[Names, Meta(description="Columns that it contains; default all.")] = ()
    order: Annotated[Names, Meta(description="Columns a list is sorted by; default the key.")] = ()
    children: Annotated[dict[str, Document], Meta(description="By the field's name.")] = {}


class Follower(Section, frozen=True, kw_only=True):
    """A store that follows the log.

    One of `delta`, `redis`, `opensearch`, `sql`, `topic` and `plugin`.
    """

    tables: Annotated[
        Names,
        Meta(
            description="Which of the captured tables, as `source.tables` is written.",
            examples=[["public.users", "public.orders"]],
        ),
    ] = ("*.*",)
    delta: DeltaFollower | None = None
    redis: RedisFollower | None = None
    opensearch: OpenSearchFollower | None = None
    sql: SqlFollower | None = None
    topic: TopicFollower | None = None
    plugin: PluginFollower | None = None
    documents: Annotated[
        dict[str, Document],
        Meta(
            description="Instead of single rows: rows with those that belong to them, by the "
            "document's name, in Redis or OpenSearch.",
        ),
    ] = {}
    views: Annotated[
        Names,
        Meta(
            description="Instead of tables: these of the section `views` (docs/VIEWS.md).",
            examples=[["order_totals"]],
        ),
    ] = ()
    mirror: Annotated[
        str | None,
        Meta(description="The Delta follower whose mirrors `documents` or `views` are made from."),
    ] = None
    every_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="The least time between two batches. 0: the next starts when the last one "
            "has ended.",
        ),
    ] = 0.0
    max_events: Annotated[
        int,
        Meta(
            ge=1, description="The most events in a batch, unless one source transaction has more."
        ),
    ] = 300_000
    max_bytes: Annotated[
        int, Meta(ge=1, description="The most bytes of the log in a batch; an estimate.")
    ] = 256 << 20
    max_events_per_second: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="The most events a second, on average.")
    ] = None

    @property
    def is_derived(self) -> bool:
        """Whether it is made from another follower's mirrors."""
        return bool(self.documents or self.views)


def chosen_names(followers: Mapping[str, Follower], wanted: Iterable[str] | None) -> list[str]:
    """Return the wanted names, each once, all for None; ConfigError where one is unknown."""
    names = list(dict.fromkeys(followers if wanted is None else wanted))
    unknown = [name for name in names if name not in followers]
    if unknown or not names:
        raise ConfigError(
            f"there is no follower {', '.join(unknown)}".rstrip(),
            hint=f"the section followers has {', '.join(followers)}"
            if followers
            else "add it to the section followers, see docs/CONFIG.md",
        )
    return names
