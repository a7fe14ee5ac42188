"""Erase a row from the archive, its bases and the topics, once it is deleted in the source.

In this order: the archive, by one commit with the audit record; bases; what Delta's logs have of
versions before; replaced files; the topics, if asked for. Each step follows from what the archive
shows as erased, so a repeated erasure completes one that was killed, and changes nothing otherwise.
Followers have deleted the row when they applied its delete. Delta mirrors are written again if
asked for, and their older versions deleted; what other stores keep is described, not erased.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from cdc import failpoints
from cdc.errors import ConfigError
from cdc.log import follower_reports, group_records, group_states, topics
from cdc.log.ranges import RangeReader
from cdc.log.row_keys import log_keys
from cdc.operate.commands import acknowledge
from lockstep.jobs.archiving import erasing, versions
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.compacting import erasing as bases_erasing
from lockstep.jobs.compacting import reporting
from lockstep.jobs.cuts.reduce import parsed
from lockstep.jobs.cuts.schemas import version
from lockstep.jobs.generations.erasing import FollowersOf

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from cdc.config import Config
    from cdc.log.partitions import Partition
    from lockstep.jobs.archiving.erasing import Erasure, Place, Subject
    from lockstep.jobs.archiving.table import ArchiveTable


class Outcome(NamedTuple):
    """What is erased, and what is left."""

    erasure: Erasure | None  # None: the archive had nothing of it
    topics: dict[Partition, tuple[int, int]]  # which still have records: from, up to their offset
    epoch: int | None  # the new one, if records of topics were deleted
    mirrors: dict[str, list[str]]  # by follower: the mirrors that were written again
    stores: dict[str, str]  # by follower: what its store keeps of the row
    messages: dict[str, int]  # by prefix: logical messages of its transactions, which are kept
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
        messages: Collection[str] = (),
    ) -> None:
        """Find the row; raise ConfigError if it exists, or can't be erased for another reason.

        `messages` are prefixes of logical messages to erase with it.
        """
        self._config, self._with_topics, self._with_mirrors = config, with_topics, with_mirrors
        self._archive = opened(config)
        if not self._archive.find():
            raise ConfigError(
                f"there is no archive at {self._archive.path}",
                hint="without one the row ends with the topics' retention",
            )
        if with_topics:
            acknowledge.refuse_while_streaming(config)
        search = versions.InArchive(config, self._archive)
        self._keys: Collection[bytes] = log_keys(table, key, search.schemas())
        self._topic, self._messages = versions.topic_of(config, table), messages
        self._subject = self._find()
        self._expect_archived(self._subject)

    def _find(self) -> Subject:
        """Return the row in the loaded archive, with the messages; ConfigError if it exists."""
        found = erasing.find(self._config, self._archive, self._topic, self._keys)
        search = versions.InArchive(self._config, self._archive)
        signed = search.messages(erasing.transactions(self._archive, found))
        asked = frozenset(seq for seq, prefix in signed.items() if prefix in self._messages)
        self._keys = found.keys
        self._kept = Counter(prefix for seq, prefix in signed.items() if seq not in asked)
        return found._replace(messages=asked)

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
        erasure = erasing.erase(config, archive, self._subject, self._find)
        archive.find()
        places = erasing.places(archive)
        if not places:
            raise ConfigError(
                "the archive has no event of the row", hint="`cdc history TABLE KEY` shows them"
            )
        unread = bases_erasing.erase(config, places)
        reporting.report(config)
        erasing.forget(archive)
        unread += erasing.delete_replaced(archive, places)
        left = self._left(places)
        epoch = None
        if self._with_topics:
            with self._deletable({topic for topic, *_ in places}):
                if left:
                    self._delete_records(archive, left)
                    left = self._left(places)
            epoch = self._acknowledged({topic for topic, *_ in places})
        followers = FollowersOf(config, self._topic)
        mirrors = self._erase_mirrors(followers) if self._with_mirrors else {}
        stores, kept = followers.kept(mirrors), dict(self._kept)
        return Outcome(erasure, left, epoch, mirrors, stores, kept, unread)

    def _erase_mirrors(self, followers: FollowersOf) -> dict[str, list[str]]:
        """Erase the row, and what earlier erasures have left, from lakes with the table."""
        topic = self._topic
        seqs = erasing.erased_seqs(self._archive, topic)
        records = versions.InArchive(self._config, self._archive).schemas()
        mine = [version(each) for each in records if each.topic == topic]
        newest = max(mine, key=lambda each: each.schema_id, default=None)
        return followers.erase(seqs, self._keys, newest)

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

    @contextmanager
    def _deletable(self, emptied: set[str]) -> Iterator[None]:
        """Let Kafka delete records of topics that it only compacts; then restore their policy.

        Also that of topics of which a killed erasure has changed it.
        """
        own = f"{self._config.prefix}.cdc."
        mine = [topic for topic in emptied if not topic.startswith(own)]
        client = topics.admin(self._config)
        mine = sorted(topics.describe(client, mine))
        compacted = [each for each in mine if topics.cleanup_of(self._config, each) == "compact"]
        topics.allow_deletions(client, compacted)
        try:
            yield
        finally:
            topics.restore_policies(client, self._config, compacted)

    def _delete_records(
        self, archive: ArchiveTable, left: dict[Partition, tuple[int, int]]
    ) -> None:
        """Delete the topics' records up to the erased ones, once nothing needs them."""
        client = topics.admin(self._config)
        ends = {place: offset + 1 for place, (_, offset) in left.items()}
        self._expect_applied(archive)
        self._expect_acknowledged(client, ends)
        topics.delete_records(client, ends)
        failpoints.reach("erase_emptied")

    def _expect_applied(self, archive: ArchiveTable) -> None:
        last = max(each.last_seq for each in erasing.erasures(self._config, archive))
        reports = follower_reports.read(self._config)
        for name in self._config.followers:
            if name not in reports or reports[name].seq < last:
                raise ConfigError(
                    f"{name} has not applied seq {last} yet: it would lose events of the topics",
                    hint="let it catch up, and erase again; archive and bases are done",
                )

    def _expect_acknowledged(self, client: topics.Admin, ends: dict[Partition, int]) -> None:
        """Raise ConfigError if a group lacks some. How far a queue is can't be asked of Kafka."""
        for record in group_records.read(self._config).values():
            committed = group_states.state(client, self._config, record).committed
            lacks = [
                (at, committed[at]) for at, end in ends.items() if committed.get(at, end) < end
            ]
            if lacks:
                (topic, number), offset = lacks[0]
                raise ConfigError(
                    f"the group {record.group} has not acknowledged {topic} [{number}] from offset"
                    f" {offset} on: it would lose events of the topics",
                    hint="let it catch up, and erase again; archive and bases are done. If nobody"
                    f" needs it: `cdc group remove {record.group}`",
                )

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
