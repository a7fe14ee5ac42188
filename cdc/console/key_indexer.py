"""Build the indexes of topics in which keys are searched, in one thread, at a low cost.

A topic is indexed from its first search on, or from the start where `console.index` names its
table, and followed for a week after the last search. So what nobody asks about costs nothing. The
newest events come first: an index is of use before it is complete.

The thread reads a part of each partition and then rests, so that it takes a share of a processor's
time. A part is added only if, after it was read, Kafka still has the record that was indexed last,
unchanged: where the end was cut off by an unclean election, the partition is indexed again from
nothing, and so is a topic that has another id, as it was created again. Searches check the same.

The files are in `console.index_dir`; where that can't be written, or another console uses it, they
are in a folder that is deleted at the end.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from contextlib import closing, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from cdc.config.patterns import parse_table_pattern
from cdc.console.key_index import Entries, PartitionIndex, anchor_of
from cdc.errors import CDCError
from cdc.events import row_key
from cdc.log import inspection, names, topics
from cdc.log.consumer import LogConsumer
from cdc.log.partitions import OffsetRange
from cdc.runtime.artifacts import default_cache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cdc.config import Config
    from cdc.console.key_index import Anchor
    from cdc.log.partitions import Partition

log = logging.getLogger("cdc.console.key_indexer")

# A file of another number is built again.
_FORMAT: Final = 1
# The share of the time in which the thread reads: more while somebody may wait for the index.
SHARE: Final = 0.2
AWAITED_SHARE: Final = 0.5
_AWAITED_SECONDS: Final = 120.0
# How often an indexed topic's end is looked at: what came after that is read by a search.
FOLLOW_SECONDS: Final = 2.0
_UNASKED_SECONDS: Final = 30.0
FAILED_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 60.0  # how soon the topic of a newly captured table is noticed
_KEPT_SECONDS: Final = 7 * 86_400.0
# Of one console: those that the configuration names, and the ones that were searched last.
MOST_TOPICS: Final = 64
# Of one topic, the newest, 4 bytes each; and at least so many of each partition.
_MOST_OFFSETS: Final = 200_000_000
_LEAST_OFFSETS: Final = 1_000_000
# A niceness at which others get what they need of a busy processor.
_NICENESS: Final = 10
_CLOSE_SECONDS: Final = 3.0
# A file in each topic's folder whose time is that of the last search.
_ASKED: Final = "asked"


class Record(Protocol):
    """What is read of a record of the log."""

    def offset(self) -> int | None: ...
    def key(self) -> bytes | None: ...
    def value(self) -> bytes | None: ...
    def timestamp(self) -> tuple[int, int]: ...


class TopicIndex:
    """The indexes of a topic's partitions, as long as it is the topic of this id."""

    def __init__(
        self, folder: Path, topic: str, present: topics.Described, identity: dict[str, str]
    ) -> None:
        """Continue what the folder has of this topic. Raises OSError."""
        self.topic_id = present.topic_id
        self.partitions: dict[Partition, PartitionIndex] = {}
        self._most = max(_MOST_OFFSETS // max(1, present.partitions), _LEAST_OFFSETS)
        folder.mkdir(mode=0o700, exist_ok=True)
        for number in range(present.partitions):
            name = {"format": _FORMAT, **identity, "topic": topic, "id": self.topic_id}
            self.partitions[topic, number] = PartitionIndex(
                folder / f"{number}.index", json.dumps(name | {"partition": number}).encode()
            )

    def verified(
        self, consumer: LogConsumer, held: Mapping[Partition, OffsetRange]
    ) -> dict[Partition, PartitionIndex]:
        """Return the indexes of those partitions whose log is still the one that was indexed."""
        chosen = {each: self.partitions[each] for each in held if each in self.partitions}
        anchors = {each: anchor for each, index in chosen.items() if (anchor := index.anchor())}
        there = _still_there(consumer, held, anchors)
        return {each: chosen[each] for each in chosen if each not in anchors or each in there}

    def advance(self, consumer: LogConsumer) -> bool:
        """Index a part of each partition that lacks one; return whether one did.

        Raises OSError if nothing can be kept.
        """
        held = {
            each: OffsetRange(max(there.start, there.end - self._most), there.end)
            for each, there in consumer.look_up(self.partitions).items()
        }
        wanted: dict[Partition, OffsetRange] = {}
        for each, index in self.partitions.items():
            index.forget_before(held[each].start)
            if (missing := index.missing(held[each])) is not None:
                wanted[each] = missing
        if not wanted:
            return False
        before = {each: anchor for each in wanted if (anchor := self.partitions[each].anchor())}
        found = {each: Entries() for each in wanted}
        for each, messages in consumer.pieces(wanted):
            _take(found[each], messages)
        there = _still_there(consumer, held, before)
        for each, read in wanted.items():
            if each in before and each not in there:
                log.warning(
                    "the log is another than was indexed, indexing it again",
                    extra={"fields": {"topic": each[0], "partition": each[1]}},
                )
                self.partitions[each].clear()
            else:
                self.partitions[each].add(read, found[each])
        return True


class KeyIndexer:
    """Builds until `close`; `asked` chooses topics."""

    def __init__(self, config: Config) -> None:
        """`start` makes it build."""
        self.error = ""  # why nothing can be indexed now
        self._config = config
        self._patterns = [parse_table_pattern(each) for each in config.console.index]
        self._configured: list[str] = []
        self._look_at = 0.0
        self.folder: Path | None = None
        self._locked = -1
        self.is_temporary = False
        self.indexes: dict[str, TopicIndex] = {}
        self._asked_at: dict[str, float] = {}  # by topic, as time.time()
        self._noted: dict[str, float] = {}  # what of it is in files
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cdc-console-index", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop; return when the thread has ended, or after some seconds."""
        self._over.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)
        if self.is_temporary and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._locked >= 0:
            os.close(self._locked)
            self._locked = -1

    def asked(self, topic: str) -> TopicIndex | None:
        """Return the index of a topic in which a key is searched; None if there is none yet.

        Raises UnavailableError if the brokers do not answer.
        """
        with self._lock:
            self._asked_at[topic] = time.time()
            found = self.indexes.get(topic)
        if found is None:
            self._wake.set()
            return None
        return found if self._is(topic, found.topic_id) else None

    # --- what is indexed ---

    def _chosen(self) -> list[str]:
        """Return the topics to index; delete the indexes of others."""
        if self._patterns and time.monotonic() >= self._look_at:
            self._configured = self._matching()
            self._look_at = time.monotonic() + _LOOK_SECONDS
        with self._lock:
            asked = dict(self._asked_at)
        latest = sorted(asked, key=lambda topic: asked[topic], reverse=True)
        recent = [each for each in latest if time.time() - asked[each] < _KEPT_SECONDS]
        chosen = list(dict.fromkeys([*self._configured, *recent]))[:MOST_TOPICS]
        for topic in (asked.keys() | self.indexes.keys()) - set(chosen):
            with self._lock:
                self.indexes.pop(topic, None)
                if self._asked_at.get(topic) == asked.get(topic):
                    self._asked_at.pop(topic, None)
            shutil.rmtree(self._in_folder(topic), ignore_errors=True)
        return chosen

    def _matching(self) -> list[str]:
        """Return the topics of tables that `console.index` names."""
        own = f"{self._config.prefix}.cdc."
        present = topics.existing(self._admin, self._config.prefix)
        tables = {
            each: names.table_of(self._config.prefix, each)
            for each in present
            if not each.startswith(own)
        }
        found = sorted(
            topic
            for topic, table in tables.items()
            if any(pattern.matches(*table) for pattern in self._patterns)
        )
        if len(found) > MOST_TOPICS:
            log.warning(
                "console.index names more tables than are indexed",
                extra={"fields": {"tables": len(found), "indexed": MOST_TOPICS}},
            )
        return found

    def _is(self, topic: str, topic_id: str) -> bool:
        present = topics.describe(self._admin, [topic]).get(topic)
        return present is not None and present.topic_id == topic_id

    @cached_property
    def _admin(self) -> topics.Admin:
        return topics.admin(self._config)

    @cached_property
    def identity(self) -> dict[str, str]:
        cluster = inspection.cluster(self._admin).cluster_id
        return {"pipeline": self._config.pipeline, "cluster": cluster}

    # --- the thread ---

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # Linux has it for a thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while not self._over.is_set():
            try:
                if self.folder is None and self._is_wanted():
                    self._open_folder()
                if self.folder is not None and self._chosen():
                    self._build()
                else:
                    self._wake.wait()
                    self._wake.clear()
            except (CDCError, OSError) as error:
                # A search reads the log instead, and says how much of it is indexed.
                self.error = error.what if isinstance(error, CDCError) else str(error)
                log.warning("cannot index the log", extra={"fields": {"error": self.error}})
                self._over.wait(FAILED_SECONDS)
            except Exception as error:
                self.error = f"a bug: {type(error).__name__}"
                log.exception("cannot index the log")
                self._over.wait(FAILED_SECONDS)

    def _build(self) -> None:
        """Index the chosen topics as long as there are some."""
        with closing(LogConsumer(self._config, skip_deleted=True, fetches_little=True)) as consumer:
            while (chosen := self._chosen()) and not self._over.is_set():
                was_busy = False
                for topic in chosen:
                    began = time.monotonic()
                    if self._advance(consumer, topic):
                        was_busy = True
                        self._over.wait((time.monotonic() - began) * (1 / self._share() - 1))
                    if self._over.is_set():
                        return
                self.error = ""
                if not was_busy:
                    self._wake.wait(FOLLOW_SECONDS if self._is_awaited() else _UNASKED_SECONDS)
                    self._wake.clear()

    def _share(self) -> float:
        return AWAITED_SHARE if self._is_awaited() else SHARE

    def _is_awaited(self) -> bool:
        with self._lock:
            asked_at = max(self._asked_at.values(), default=0.0)
        return time.time() - asked_at < _AWAITED_SECONDS

    def _advance(self, consumer: LogConsumer, topic: str) -> bool:
        """Index a part of a topic; return whether there was one."""
        present = topics.describe(self._admin, [topic]).get(topic)
        if present is None:
            with self._lock:
                self.indexes.pop(topic, None)
            return False
        index = self.indexes.get(topic)
        try:
            if index is None or index.topic_id != present.topic_id:
                folder = self._in_folder(topic)
                index = TopicIndex(folder, topic, present, self.identity)
                with self._lock:
                    self.indexes[topic] = index
            self._note(topic)
            return index.advance(consumer)
        except OSError:
            # Another try opens the files again.
            with self._lock:
                self.indexes.pop(topic, None)
            raise

    # --- the folder ---

    @property
    def _kept_in(self) -> Path:
        given = self._config.console.index_dir
        return (Path(given) if given else default_cache() / "key-index") / self._config.pipeline

    def _is_wanted(self) -> bool:
        """Whether a topic may have to be indexed: one that is named, or was searched."""
        with self._lock:
            return bool(self._patterns or self._asked_at) or self._kept_in.is_dir()

    def _open_folder(self) -> None:
        """Take the folder, and find in it which topics were searched."""
        folder, held = self._kept_in, -1
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            held = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if held >= 0:
                os.close(held)
            why = "another console uses it" if isinstance(error, BlockingIOError) else str(error)
            log.warning(
                "the indexes of keys are not kept",
                extra={"fields": {"why": why, "in": str(folder)}},
            )
            self.is_temporary = True
            self.folder = Path(tempfile.mkdtemp(prefix="lockstep-key-index-"))
            return
        self._locked, self.folder = held, folder
        for each in folder.iterdir():
            if each.is_dir():
                with suppress(FileNotFoundError):
                    asked_at = (each / _ASKED).stat().st_mtime
                    with self._lock:
                        self._asked_at.setdefault(each.name, asked_at)

    def _in_folder(self, topic: str) -> Path:
        assert self.folder is not None
        return self.folder / topic

    def _note(self, topic: str) -> None:
        """Write down when a topic was searched, for a later console."""
        with self._lock:
            asked_at = self._asked_at.get(topic)
        if asked_at is not None and self._noted.get(topic) != asked_at:
            file = self._in_folder(topic) / _ASKED
            file.touch(mode=0o600)
            os.utime(file, (asked_at, asked_at))
            self._noted[topic] = asked_at


def _still_there(
    consumer: LogConsumer,
    held: Mapping[Partition, OffsetRange],
    anchors: Mapping[Partition, Anchor],
) -> set[Partition]:
    """Return the partitions in which the log has these records, unchanged."""
    wanted = {
        each: OffsetRange(anchor.offset, anchor.offset + 1)
        for each, anchor in anchors.items()
        if held[each].start <= anchor.offset < held[each].end
    }
    if not wanted:
        return set()
    return {
        each
        for each, messages in consumer.pieces(wanted)
        for message in messages
        if _anchor(message) == anchors[each]
    }


def _take(entries: Entries, messages: Sequence[Record]) -> None:
    """Take records of one partition, in its order."""
    for message in messages:
        if message.value() is not None:  # a tombstone follows its delete
            entries.add(message.offset() or 0, row_key(message.key()))
    entries.anchor = _anchor(messages[-1])


def _anchor(message: Record) -> Anchor:
    return anchor_of(message.offset() or 0, message.key(), message.value(), message.timestamp()[1])
