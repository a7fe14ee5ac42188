"""Erase a row from the archive, its bases and the topics, once it is deleted in the source.

In this order: the archive, by one commit with the audit record; bases; what Delta's logs have of
versions before; replaced files; the topics, if asked for. Each step follows from what the archive
shows as erased, so a repeated erasure completes one that was killed, and changes nothing otherwise.
Followers have deleted the row when they applied its delete. Delta mirrors are rebuilt if asked for,
and their older versions deleted; what other stores keep of deleted rows is described, not erased.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc import failpoints
from cdc.config.stores import follows
from cdc.errors import ConfigError
from cdc.log import follower_reports, names, topics
from cdc.log.ranges import RangeReader
from cdc.operate.commands import acknowledge
from lockstep.jobs.apply import stores
from lockstep.jobs.archiving import erasing, versions
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.compacting import erasing as bases_erasing
from lockstep.jobs.cuts.reduce import parsed
from lockstep.jobs.generations.rebuilding import Rebuild
from lockstep.jobs.rebuild import rebuild_of
from lockstep.sinks.delta.sink import DeltaSink

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.config.followers import Follower
    from cdc.log.partitions import Partition
    from lockstep.jobs.archiving.erasing import Erasure, Place, Subject
    from lockstep.jobs.archiving.table import Archive

# What stores keep of a row that their follower has deleted, and what ends that.
_KEPT: Final = {
    "delta": "old versions of its mirror have the row until `vacuum_hours` after its delete was"
    " applied, and until the file that held it is written again; --mirrors does both now",
    "redis": "its keys are deleted; the server's own append-only file has them until it is"
    " rewritten (BGREWRITEAOF)",
    "opensearch": "its documents are deleted; segments have them until they are merged"
    " (POST INDEX/_forcemerge?only_expunge_deletes=true)",
    "sql": "its rows are deleted; the server's pages and log have them until its own VACUUM",
    "plugin": "what its store keeps of deleted rows is described by its package",
}

_HISTORY: Final = "its history has the row's versions, and is not erased"


class Outcome(NamedTuple):
    """What is erased, and what is left."""

    erasure: Erasure | None  # None: the archive had nothing of it
    topics: dict[Partition, tuple[int, int]]  # which still have records: from, up to their offset
    epoch: int | None  # the new one, if records of topics were deleted
    stores: dict[str, str]  # by follower: what its store keeps of deleted rows
    unread: list[str]  # files that no version names, and that can't be read


class Erasing:
    """One row to erase."""

    def __init__(
        self,
        config: Config,
        table: str,
        key: str,
        *,
        with_topics: bool = False,
        with_mirrors: bool = False,
    ) -> None:
        """Find the row; raise ConfigError if it exists, or can't be erased for another reason."""
        self._config, self._with_topics, self._with_mirrors = config, with_topics, with_mirrors
        self._archive = opened(config)
        if not self._archive.find():
            raise ConfigError(
                f"there is no archive at {self._archive.path}",
                hint="without one the row ends with the topics' retention",
            )
        if with_topics:
            acknowledge.refuse_while_streaming(config)
        schemas = versions.InArchive(config, self._archive).schemas()
        keys = versions.log_keys(table, key, schemas)
        topic = versions.topic_of(config, table)
        self._subject = erasing.find(config, self._archive, topic, keys)
        self._expect_archived(self._subject)

    def _expect_archived(self, subject: Subject) -> None:
        """Raise ConfigError if topics have events of the row that are not archived yet."""
        applied = self._archive.position().applied
        with closing(versions.InTopics(self._config, applied)) as search:
            later = search.events(subject.topic, set(subject.keys))
            if any(parsed(each).op != "t" for each in later):
                raise erasing.still_there(self._config, subject.topic)

    def run(self) -> Outcome:
        """Erase it; complete what earlier erasures have left."""
        config, archive = self._config, self._archive
        erasure = erasing.erase(config, archive, self._subject) if self._subject.seqs else None
        archive.find()
        places = erasing.places(archive)
        if not places:
            raise ConfigError(
                "the archive has no event of the row", hint="`cdc history TABLE KEY` shows them"
            )
        unread = bases_erasing.erase(config, places)
        erasing.forget(archive)
        unread += erasing.delete_replaced(archive, places)
        left = self._left(places)
        epoch = None
        if self._with_topics:
            if left:
                self._delete_records(archive, left)
                left = self._left(places)
            epoch = self._acknowledged({topic for topic, *_ in places})
        rebuilt = self._rebuild_mirrors() if self._with_mirrors else set[str]()
        kept = {
            name: _HISTORY if _has_history(config, name) else _KEPT[_store(each)]
            for name, each in config.followers.items()
            if name not in rebuilt
        }
        return Outcome(erasure, left, epoch, kept, unread)

    def _rebuild_mirrors(self) -> set[str]:
        """Rebuild lakes with the table, and delete its older versions; return of which followers.

        All of their tables: a lake of which one table was rebuilt is at no frontier until the
        next batch.
        """
        config, done = self._config, set[str]()
        schema, table = names.table_of(config.prefix, self._subject.topic)
        for name, each in config.followers.items():
            if each.delta is None or each.documents or each.views or _has_history(config, name):
                continue
            if not follows(each, schema, table):
                continue
            rebuild = rebuild_of(config, name)
            assert isinstance(rebuild, Rebuild), "a lake has generations"
            rebuild.run()
            rebuild.drop_old()
            with closing(stores.sink(config, name, each)) as sink:
                assert isinstance(sink, DeltaSink), "it is one of Delta"
                sink.forget_versions(self._subject.topic)
            done.add(name)
        return done

    def _left(self, places: set[Place]) -> dict[Partition, tuple[int, int]]:
        """Return which partitions still have erased records: the first and the last offset."""
        newest: dict[Partition, int] = {}
        for topic, number, offset in places:
            newest[topic, number] = max(offset, newest.get((topic, number), 0))
        found = {}
        with closing(RangeReader(self._config)) as reader:
            for place, last in sorted(newest.items()):
                there = reader.confirmed_if_exists(place)
                if there is not None and there.start <= last:
                    found[place] = there.start, last
        return found

    def _delete_records(self, archive: Archive, left: dict[Partition, tuple[int, int]]) -> None:
        """Delete the topics' records up to the erased ones, once no follower needs them."""
        last = max(each.last_seq for each in erasing.erasures(self._config, archive))
        reports = follower_reports.read(self._config)
        for name in self._config.followers:
            if name not in reports or reports[name].seq < last:
                raise ConfigError(
                    f"{name} has not applied seq {last} yet: it would lose events of the topics",
                    hint="let it catch up, and erase again; archive and bases are done",
                )
        ends = {place: offset + 1 for place, (_, offset) in left.items()}
        topics.delete_records(topics.admin(self._config), ends)
        failpoints.reach("erase_emptied")

    def _acknowledged(self, emptied: set[str]) -> int | None:
        """Start a new epoch if retention had promised what was deleted; return its number."""
        changed = acknowledge.survey(self._config)
        others = [
            what
            for what in changed.what
            if not what.startswith(tuple(f"topic {each}, " for each in emptied))
        ]
        if others:
            raise ConfigError(
                f"the row is erased, but the topics have changed otherwise, too: {others[0]}",
                hint="`cdc topics acknowledge` shows all of it and starts a new epoch",
            )
        return acknowledge.acknowledge(self._config, changed) if changed.what else None


def _has_history(config: Config, name: str) -> bool:
    follower = config.followers[name]
    return follower.delta is not None and bool(follower.delta.history)


def _store(follower: Follower) -> str:
    return next(name for name in _KEPT if getattr(follower, name, None) is not None)
