"""Erase a row from followers' lakes, and describe what other stores keep of it.

Followers have deleted the row when they applied its delete. What is left is in what a lake keeps of
deleted rows: histories, soft deletes, deletion vectors, older versions, generations. Views over the
table have no events, so all mirrors of their lakes are written again.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow.compute as pc

from cdc import failpoints
from cdc.config.stores import follows
from cdc.errors import ConfigError
from cdc.log import follower_reports, names
from lockstep.jobs.apply import stores
from lockstep.jobs.generations.rebuilding import drop_old
from lockstep.sinks.delta.erasing import Erased
from lockstep.sinks.delta.sink import DeltaSink

if TYPE_CHECKING:
    from collections.abc import Collection

    import pyarrow as pa

    from cdc.config import Config
    from cdc.config.followers import Follower
    from lockstep.sinks.contract import Version

# What stores keep of a row that their follower has deleted, and what ends that.
_KEPT: Final = {
    "delta": "old versions of its mirrors have the row until `vacuum_hours` after its delete was"
    " applied, and until the file that held it is written again; --mirrors does both now",
    "redis": "its keys are deleted; the server's own append-only file has them until it is"
    " rewritten (BGREWRITEAOF)",
    "opensearch": "its documents are deleted; segments have them until they are merged"
    " (POST INDEX/_forcemerge?only_expunge_deletes=true)",
    "sql": "its rows are deleted; the server's pages and log have them until its own VACUUM",
    "topic": "its row has a tombstone; compaction removes the row's older records, an hour later at"
    " the earliest, when their segment is closed",
    "plugin": "what its store keeps of deleted rows is described by its package",
}
_VERSIONS: Final = "its mirrors have the row's versions, which `history` and soft deletes keep;"
_ERASES: Final = " --mirrors erases them"


class FollowersOf:
    """The followers that have a table, or what is made from it."""

    def __init__(self, config: Config, topic: str) -> None:
        self._config, self._topic = config, topic
        schema, table = names.table_of(config.prefix, topic)
        self._names = [
            name
            for name, each in config.followers.items()
            if follows(config.followers[each.mirror] if each.mirror else each, schema, table)
        ]

    def erase(
        self, seqs: pa.Int64Array, keys: Collection[bytes], version: Version | None
    ) -> dict[str, list[str]]:
        """Erase rows from lakes; return the mirrors written again, by follower.

        `seqs` are of the erased events, `keys` in the log's form, `version` the table's newest.
        Raises ConfigError if a follower has not applied their delete, or a follower of its mirrors
        would lose the frontier that it is at.
        """
        known = [key for key in keys if version and _is_of(key, version)]
        done = {}
        for name in self._names:
            follower = self._config.followers[name]
            if follower.delta is None:
                continue
            erased = None if follower.views else Erased(self._topic, seqs, version, known)
            with closing(stores.sink(self._config, name, follower)) as sink:
                assert isinstance(sink, DeltaSink), "it is one of Delta"
                self._expect_read(name, sink)
                drop_old(sink)
                last = pc.max(seqs).as_py() or 0
                done[name] = sink.erase(erased, last, failpoints.reach)
        return done

    def _expect_read(self, name: str, sink: DeltaSink) -> None:
        """Raise ConfigError if a follower of the mirrors is at a frontier that they would lose."""
        newest = sink.generations().get(sink.current() or 0)
        reports = follower_reports.read(self._config)
        for other, each in self._config.followers.items():
            if each.mirror != name or other not in reports or newest is None:
                continue
            if reports[other].seq < newest.seq:
                raise ConfigError(
                    f"{other} is at seq {reports[other].seq}, and would lose that frontier of"
                    f" {name}, which is at {newest.seq}",
                    hint=f"stop the follower {name}, let {other} catch up, and erase again",
                )

    def kept(self, erased: Collection[str]) -> dict[str, str]:
        """Return what each follower's store keeps of the row; none of those in `erased`."""
        found = {}
        for name in self._names:
            follower = self._config.followers[name]
            if name not in erased:
                keeps = _keeps_versions(follower)
                found[name] = _VERSIONS + _ERASES if keeps else _KEPT[_store(follower)]
        return found


def _is_of(key: bytes, version: Version) -> bool:
    return set(msgspec.json.decode(key)) == set(version.key)


def _keeps_versions(follower: Follower) -> bool:
    delta = follower.delta
    return delta is not None and (bool(delta.history) or delta.deletes == "soft")


def _store(follower: Follower) -> str:
    return next(name for name in _KEPT if getattr(follower, name, None) is not None)
