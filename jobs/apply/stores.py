"""The sink that a follower's section configures: one function per store.

Sinks are created without access to the store, so this also serves to find a follower's kind. A
store's client is imported when it is needed: followers of other stores do not need it installed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deltalake import DeltaTable

    from cdc.config import Config
    from cdc.config.followers import Follower
    from lockstep.sinks.contract import Generations
    from lockstep.sinks.delta.lake import Commit
    from lockstep.sinks.delta.work import Work


def _redis(config: Config, name: str, follower: Follower) -> Generations:
    from lockstep.sinks.redis.sink import RedisSink, Settings  # noqa: PLC0415 - followers of others go without
    from lockstep.sinks.shapes import Shape  # noqa: PLC0415 - as above

    assert follower.redis is not None
    store = follower.redis
    return RedisSink(
        Settings(
            url=store.url,
            prefix=store.prefix or config.prefix,
            follower=name,
            cluster=store.cluster,
            shapes={
                table: Shape(**msgspec.structs.asdict(shape))
                for table, shape in store.shapes.items()
            },
            tombstone_seconds=max(1, round(store.tombstone_hours * 3600)),
        )
    )


def _delta(config: Config, name: str, follower: Follower) -> Generations:
    from lockstep.sinks.delta.settings import Settings  # noqa: PLC0415 - of the extra `spark`
    from lockstep.sinks.delta.sink import DeltaSink  # noqa: PLC0415 - of the extra `spark`

    delta = follower.delta
    assert delta is not None, "the maker of a delta follower"
    path = delta.path or config.delta.path
    assert path is not None, "one of the two is there: the configuration is checked"
    return DeltaSink(
        Settings(
            pipeline=config.pipeline,
            follower=name,
            prefix=config.prefix,
            path=path,
            storage=delta.storage,
            history=frozenset(delta.history),
            soft=delta.deletes == "soft",
            partition=delta.partition,
            cluster=delta.cluster,
            is_direct=partial(_is_direct, config),
            applier=delta.applier,
            large=_LazySparkMerge(delta.storage),
            spark_above_bytes=delta.spark_above_bytes,
            optimize_minutes=delta.optimize_minutes,
            vacuum_hours=delta.vacuum_hours,
        )
    )


class _LazySparkMerge:
    """Spark's MERGE, imported for the first table that is large enough."""

    def __init__(self, storage: Mapping[str, str]) -> None:
        self._storage = storage

    def apply(self, table: DeltaTable, work: Work, commit: Commit) -> None:
        from lockstep.jobs.apply.delta_merge import SparkMerge  # noqa: PLC0415 - pyspark takes a second to import

        SparkMerge(self._storage).apply(table, work, commit)


def _is_direct(config: Config, schema: str, table: str) -> bool:
    return config.selection.of((schema, table)).snapshot == "direct"


def _opensearch(config: Config, name: str, follower: Follower) -> Generations:
    # These need the extra `opensearch`.
    from lockstep.sinks.opensearch.sink import OpenSearchSink  # noqa: PLC0415
    from lockstep.sinks.opensearch.tables import OpenSearchOptions  # noqa: PLC0415

    store = follower.opensearch
    assert store is not None, "the maker of an OpenSearch follower"
    return OpenSearchSink(
        OpenSearchOptions(
            url=store.url,
            pipeline=config.pipeline,
            follower=name,
            prefix=store.prefix or config.prefix,
            user=store.user,
            password=store.password,
            ca_file=store.ca_file,
            aliases=store.aliases,
            mappings=store.mappings,
            settings=store.settings,
        )
    )


# By the field of `Follower` that is set: a function of the configuration, the follower's name and
# its section.
_MAKERS: Final[dict[str, Callable[[Config, str, Follower], Generations]]] = {
    "delta": _delta,
    "redis": _redis,
    "opensearch": _opensearch,
}


def kind(follower: Follower) -> str:
    """Return the kind of store: delta, redis, opensearch."""
    for name in _MAKERS:
        if getattr(follower, name) is not None:
            return name
    raise ConfigError("a follower names no store", hint=f"give it one of {', '.join(_MAKERS)}")


def sink(config: Config, name: str, follower: Follower) -> Generations:
    """Return the follower's sink."""
    return _MAKERS[kind(follower)](config, name, follower)
