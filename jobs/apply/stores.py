"""The sink that a follower's section configures: a kind of store from the registry.

Kinds are entry points of the group `lockstep.sinks`, each a `sinks.contract.SinkKind`; ours are
declared as those of other packages are. They are also listed here, because code that is shipped to
a cluster as a zip file has no entry points, and because no package may replace them.

Sinks are created without access to the store, so this also serves to find a follower's kind. A
store's client is imported when it is needed: followers of other stores do not need it installed.
"""

from __future__ import annotations

import re
from functools import partial
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from cdc.config.followers import (
    DeltaFollower,
    OpenSearchFollower,
    RedisFollower,
    RedisShape,
    SqlFollower,
    TopicFollower,
)
from cdc.config.places import topic_prefix
from cdc.errors import ConfigError
from lockstep.sinks.contract import FollowerOf, SinkKind
from lockstep.sinks.shapes import RowShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deltalake import DeltaTable

    from cdc.config import Config
    from cdc.config.followers import Follower
    from lockstep.jobs.apply.delta_merge import SparkMerge
    from lockstep.sinks.contract import Sink
    from lockstep.sinks.delta.lake import CommitInfo
    from lockstep.sinks.delta.work import Work

GROUP: Final = "lockstep.sinks"
_VALUE: Final = re.compile(r"'.*'", re.DOTALL)
# Seconds for which a Delta follower holds back a frontier without changes of its own. Documents
# follow those frontiers, so this is also how much later they report one.
_IDLE_SECONDS: Final = 2.0


def _redis(store: RedisFollower, of: FollowerOf) -> Sink:
    from lockstep.sinks.redis.sink import RedisSettings, RedisSink  # noqa: PLC0415 - followers of others go without

    return RedisSink(
        RedisSettings(
            url=store.url,
            prefix=store.prefix or of.prefix,
            follower=of.name,
            cluster=store.cluster,
            shapes={table: _shape(shape) for table, shape in store.shapes.items()},
            tombstone_seconds=max(1, round(store.tombstone_hours * 3600)),
        )
    )


def _shape(configured: RedisShape) -> RowShape:
    return RowShape(**msgspec.structs.asdict(configured))


def shape(follower: Follower, table: str) -> RowShape | None:
    """Return the shape in which a follower keeps a table; None if it keeps rows as they are."""
    found = follower.redis and follower.redis.shapes.get(table)
    return _shape(found) if found else None


def _delta(delta: DeltaFollower, of: FollowerOf) -> Sink:
    from lockstep.sinks.delta.settings import DeltaSettings  # noqa: PLC0415 - of the extra `spark`
    from lockstep.sinks.delta.sink import DeltaSink  # noqa: PLC0415 - of the extra `spark`

    path = delta.path or of.config.delta.path
    assert path is not None, "one of the two is there: the configuration is checked"
    return DeltaSink(
        DeltaSettings(
            pipeline=of.pipeline,
            follower=of.name,
            prefix=of.prefix,
            path=path,
            storage=delta.storage,
            history=frozenset(delta.history),
            soft=delta.deletes == "soft",
            partition=delta.partition,
            cluster=delta.cluster,
            is_direct=partial(_is_direct, of.config),
            applier=delta.applier,
            large=_LazySparkMerge(delta.storage),
            spark_above_bytes=delta.spark_above_bytes,
            optimize_minutes=delta.optimize_minutes,
            vacuum_hours=delta.vacuum_hours,
            idle_seconds=_IDLE_SECONDS,
        )
    )


class _LazySparkMerge:
    """Spark's MERGE, imported for the first table that needs it."""

    def __init__(self, storage: Mapping[str, str]) -> None:
        self._storage = storage

    def apply(self, table: DeltaTable, work: Work, commit: CommitInfo) -> None:
        self._merge().apply(table, work, commit)

    def alter(
        self,
        table: DeltaTable,
        facts: Mapping[str, object],
        *,
        columns: Sequence[Mapping[str, object]] = (),
        properties: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._merge().alter(table, facts, columns=columns, properties=properties)

    def maintain(self, table: DeltaTable, cluster: Sequence[str], hours: int | None) -> None:
        self._merge().maintain(table, cluster, hours)

    def _merge(self) -> SparkMerge:
        from lockstep.jobs.apply.delta_merge import SparkMerge  # noqa: PLC0415 - pyspark takes a second to import

        return SparkMerge(self._storage)


def _is_direct(config: Config, schema: str, table: str) -> bool:
    return config.selection.of((schema, table)).snapshot == "direct"


def _opensearch(store: OpenSearchFollower, of: FollowerOf) -> Sink:
    # These need the extra `opensearch`.
    from lockstep.sinks.opensearch.sink import OpenSearchSink  # noqa: PLC0415
    from lockstep.sinks.opensearch.tables import OpenSearchOptions  # noqa: PLC0415

    return OpenSearchSink(
        OpenSearchOptions(
            url=store.url,
            pipeline=of.pipeline,
            follower=of.name,
            prefix=store.prefix or of.prefix,
            user=store.user,
            password=store.password,
            ca_file=store.ca_file,
            aliases=store.aliases,
            mappings=store.mappings,
            settings=store.settings,
        )
    )


def _sql(store: SqlFollower, of: FollowerOf) -> Sink:
    from lockstep.sinks.sql.sink import SqlSettings, SqlSink  # noqa: PLC0415 - of the extra `sql`

    return SqlSink(SqlSettings(store.url, of.name, store.schema))


def _topic(store: TopicFollower, of: FollowerOf) -> Sink:
    from lockstep.sinks.topic.cluster import TopicSettings  # noqa: PLC0415 - as the others
    from lockstep.sinks.topic.sink import TopicSink  # noqa: PLC0415 - as above

    log = of.config.log
    topics = msgspec.structs.replace(
        log,
        bootstrap_servers=store.bootstrap_servers or log.bootstrap_servers,
        prefix=topic_prefix(of.config, of.name, of.config.followers[of.name]),
        partitions=store.partitions or log.partitions,
        replication_factor=store.replication_factor or log.replication_factor,
        kafka=({} if store.bootstrap_servers else log.kafka) | store.kafka,
    )
    config = msgspec.structs.replace(of.config, log=topics)
    return TopicSink(TopicSettings(config, of.pipeline, of.name))


DELTA: Final = SinkKind(DeltaFollower, _delta)
REDIS: Final = SinkKind(RedisFollower, _redis)
OPENSEARCH: Final = SinkKind(OpenSearchFollower, _opensearch)
SQL: Final = SinkKind(SqlFollower, _sql)
TOPIC: Final = SinkKind(TopicFollower, _topic)
# By the field of `Follower` that is set.
OURS: Final = {
    "delta": DELTA,
    "redis": REDIS,
    "opensearch": OPENSEARCH,
    "sql": SQL,
    "topic": TOPIC,
}


def kind(follower: Follower) -> str:
    """Return the kind of store: one of `OURS`, or that of another package."""
    if follower.plugin is not None:
        return follower.plugin.kind
    return next(name for name in OURS if getattr(follower, name) is not None)


def sink(config: Config, name: str, follower: Follower) -> Sink:
    """Return the follower's sink."""
    of, wanted = FollowerOf(name, config.pipeline, config.prefix, config), kind(follower)
    if follower.plugin is None:
        return OURS[wanted].make(getattr(follower, wanted), of)
    at = f"followers.{name}.plugin"
    found = _loaded(f"{at}.kind", wanted)
    settings = _converted(f"{at}.options", follower.plugin.options, found.settings)
    return found.make(settings, of)


def _loaded(at: str, wanted: str) -> SinkKind:
    """Return the kind that another package registers."""
    known = entry_points(group=GROUP)
    found = [each for each in known if each.name == wanted]
    if wanted in OURS:
        raise ConfigError(f"{at}: {wanted} is no plugin", hint=f"write `{wanted}: {{…}}` instead")
    if len(found) != 1:
        many = "no package has" if not found else f"{len(found)} packages have"
        raise ConfigError(
            f"{at}: {many} the sink {wanted};"
            f" installed are {', '.join(sorted({*known.names, *OURS}))}",
            hint="install the package that has it where `cdc follow` runs, and no other with it",
        )
    try:
        loaded = found[0].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{at}: {found[0].value} can't be imported: {error}", hint="install what it needs"
        ) from error
    if not isinstance(loaded, SinkKind):
        raise ConfigError(
            f"{at}: {found[0].value} is no lockstep.contract.SinkKind",
            hint="report it to the author of its package",
        )
    return loaded


def _converted(at: str, options: Mapping[str, object], settings: type) -> object:
    """Return a follower's options as the settings of its sink."""
    known = [field.encode_name for field in msgspec.inspect.type_info(settings).fields]  # type: ignore[attr-defined]
    for option in options:
        if option not in known:
            raise ConfigError(f"{at}.{option}: unknown name", hint=f"one of {', '.join(known)}")
    try:
        return msgspec.convert(options, settings)
    except msgspec.ValidationError as error:
        # It quotes names in backticks, and values like this.
        what = _VALUE.sub("…", str(error))
        raise ConfigError(f"{at}: {what}", hint="correct it as the sink's docs say") from None
