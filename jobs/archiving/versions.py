"""Every version of one row: from the archive, and from the topics what is not archived yet.

The events of a key, and the truncates of its table, in the order of seq. Columns that Postgres did
not send are filled from the version before. Who made a change is in a logical message of the same
transaction, with the prefix `audit`.
"""

from __future__ import annotations

from base64 import b64decode
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cdc.errors import GapError
from cdc.events import LSN, row_key
from cdc.log import compaction, names, reader, records
from cdc.log.dead_letters import DeadLetterAssembler, Pointer
from cdc.log.partitions import OffsetRange, Partition
from cdc.log.ranges import RangeReader
from cdc.log.row_keys import log_keys, one_table
from cdc.log.row_versions import RowEvent, VersionSource, version_fields
from cdc.log.table_cuts import expect_counted
from cdc.operate.followers import NEW_ARCHIVE
from lockstep.jobs.archiving.rows import key_hash
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.archiving.seam import lost_after
from lockstep.jobs.cuts.reduce import lsn_of
from lockstep.sinks.contract import Applied
from lockstep.sinks.delta import lake

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cdc.config import Config
    from cdc.log.records import SchemaRecord
    from lockstep.jobs.archiving.table import ArchiveTable

AUTHOR: Final = "audit"  # the prefix of the logical messages that name an author


class _Source(VersionSource, kw_only=True):
    epoch: int
    dead: Pointer | None = None


class _Message(msgspec.Struct):
    prefix: str
    content: str


class _Event(RowEvent, kw_only=True):
    source: _Source
    message: _Message | None = None


_event: Final = msgspec.json.Decoder(_Event).decode


class ArchivedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a row, or its end."""

    at: str  # of the commit, ISO 8601
    lsn: str
    transaction: int | None
    seq: int
    op: str
    before: dict[str, Any] | None  # None: no row, or none that the log knows
    after: dict[str, Any] | None
    unknown: tuple[str, ...]  # columns of `after` whose values no version has
    author: Any  # what the application gave, None if nothing
    held_by: str  # archive or topic


def history(config: Config, table: str, key: str) -> list[ArchivedVersion]:
    """Return every version of the row, oldest first.

    Raises CompactedError if Kafka has compacted what is not archived, GapError if it has deleted
    some of it.
    """
    archive = opened(config) if config.archive.path else None
    if archive is not None and not archive.find():
        archive = None
    searches: list[InArchive | InTopics] = [InArchive(config, archive)] if archive else []
    position = archive.position().applied if archive else Applied.beginning(config.pipeline, 1)
    searches.append(InTopics(config, position))
    with closing(searches[-1]):  # type: ignore[type-var]
        keys = log_keys(table, key, [each for search in searches for each in search.schemas()])
        topic = topic_of(config, table)
        return list(_versions(searches, topic, keys))


def topic_of(config: Config, table: str) -> str:
    schema, name = one_table(table)
    return names.data_topic(config.prefix, schema, name)


def _versions(
    searches: list[InArchive | InTopics], topic: str, keys: set[bytes]
) -> Iterator[ArchivedVersion]:
    known: dict[str, Any] | None = None
    seen = 0
    for search in searches:
        found = list(search.events(topic, keys))  # before dead letters are read
        events = [_event(search.complete(value)) for value in found]
        events = [each for each in events if each.source.seq > seen]
        authors = search.authors({lsn_of(each.source.commit_lsn) for each in events})
        for event in sorted(events, key=lambda each: each.source.seq):
            seen = event.source.seq
            if event.op == "t" and known is None:
                continue  # before the row was there
            version = ArchivedVersion(
                **version_fields(event, known),
                author=authors.get(lsn_of(event.source.commit_lsn)),
                held_by=search.name,
            )
            yield version
            known = version.after


class InArchive:
    """Searches the archive."""

    name = "archive"

    def __init__(self, config: Config, archive: ArchiveTable) -> None:
        self._prefix, self._table = config.prefix, archive.table

    def schemas(self) -> Iterator[SchemaRecord]:
        topic = names.schema_topic(self._prefix)
        rows = lake.read(self._table, ["key", "value"], f"topic = {_quoted(topic)}").to_pylist()
        for row in rows:
            if records.is_schema_key(row["key"] or b"") and row["value"]:
                yield records.decode(records.SchemaRecord, row["value"], topic)

    def events(self, topic: str, keys: set[bytes]) -> Iterator[bytes]:
        hashes = ", ".join(str(key_hash(key)) for key in keys)
        where = f"topic = {_quoted(topic)} AND (key_hash IN ({hashes}) OR op = 't')"
        for row in lake.read(self._table, ["key", "value", "op"], where).to_pylist():
            if row["op"] is not None and (row["key"] in keys or row["op"] == "t"):
                yield row["value"]

    def complete(self, value: bytes) -> bytes:
        """Return an event; that of the dead letter that it points to."""
        pointer = _event(value).source.dead
        if pointer is None:
            return value
        topic, seq = names.dead_topic(self._prefix), _event(value).source.seq
        where = f"topic = {_quoted(topic)} AND seq = {seq}"
        rows = lake.read(self._table, ["offset", "key", "value"], where).to_pylist()
        return _letter(pointer, ((row["offset"], row["key"], row["value"]) for row in rows))

    def authors(self, lsns: set[int]) -> dict[int, Any]:
        return _authors(self._messages(lsns))

    def messages(self, lsns: set[int]) -> dict[int, str]:
        """Return the seqs and prefixes of the logical messages of transactions, by commit LSN."""
        events = (_event(self.complete(value)) for value in self._messages(lsns))
        return {each.source.seq: each.message.prefix for each in events if each.message}

    def _messages(self, lsns: set[int]) -> list[bytes]:
        """Return the logical messages of transactions that are not erased."""
        if not lsns:
            return []
        topic = names.messages_topic(self._prefix)
        listed = ", ".join(map(str, sorted(lsns)))
        where = f"topic = {_quoted(topic)} AND leaf IS NULL AND commit_lsn IN ({listed})"
        found: list[bytes] = lake.read(self._table, ["value"], where)["value"].to_pylist()
        return found


class InTopics:
    """Searches the topics, from where the archive ends."""

    name = "topic"

    def __init__(self, config: Config, applied: Applied) -> None:
        self._config, self._applied = config, applied
        self._reader = RangeReader(config)

    def close(self) -> None:
        self._reader.close()

    def schemas(self) -> list[SchemaRecord]:
        return reader.read_schemas(self._config)

    def events(self, topic: str, keys: set[bytes]) -> Iterator[bytes]:
        if compaction.is_compacted(self._config, topic):
            expect_counted(self._config, topic, self._applied.seq)
        for key, value in self._records(topic):
            if value is not None and (key in keys or (key is None and _event(value).op == "t")):
                yield value

    def complete(self, value: bytes) -> bytes:
        """Return an event; that of the dead letter that it points to."""
        pointer = _event(value).source.dead
        if pointer is None:
            return value
        found = enumerate(self._records(names.dead_topic(self._config.prefix)))
        mine = ((at, *record) for at, record in found)
        return _letter(pointer, mine)

    def authors(self, lsns: set[int]) -> dict[int, Any]:
        if not lsns:
            return {}
        topic = names.messages_topic(self._config.prefix)
        found = _authors(value for _, value in self._records(topic) if value is not None)
        return {lsn: author for lsn, author in found.items() if lsn in lsns}

    def _records(self, topic: str) -> Iterator[tuple[bytes | None, bytes | None]]:
        resume = reader.read_resume(self._config)
        count = resume[0].partitions.get(topic, 1) if resume else 1
        places, ends = [(topic, number) for number in range(count)], self._applied.end_of
        left, late = dict[Partition, OffsetRange](), dict[Partition, int]()
        for place in places:
            there, archived = self._reader.confirmed_if_exists(place), ends.get(place, 0)
            if there is not None:  # the archive has the events of a deleted topic
                left[place] = OffsetRange(max(there.start, archived), there.end)
                if there.start > archived:
                    late[place] = there.start
        self._expect_joined(topic, late)
        for _, messages in self._reader.pieces(left):
            for message in messages:
                yield row_key(message.key()), message.value()

    def _expect_joined(self, topic: str, late: dict[Partition, int]) -> None:
        """Raise GapError if the log has deleted events that the archive lacks."""
        # Without an archive there is what the log has. A missing dead letter is an error elsewhere.
        if not self._applied.place or topic == names.dead_topic(self._config.prefix):
            return
        if (lost := lost_after(self._config, self._applied, late)) is not None:
            raise GapError(
                f"the archive ends at {self._applied.lsn}, and {lost[0]} [{lost[1]}] has deleted"
                " events after it: what happened to the row in between is not known",
                hint=NEW_ARCHIVE,
            )


def _letter(pointer: Pointer, found: Iterable[tuple[int, bytes | None, bytes | None]]) -> bytes:
    letters = DeadLetterAssembler()
    for _, key, value in sorted(found, key=lambda each: each[0]):
        letters.add(key, value)
    return letters.event(pointer)


def _authors(values: Iterable[bytes]) -> dict[int, Any]:
    """Return what messages give as author, by the commit LSN of their transactions."""
    found = {}
    for value in values:
        event = _event(value)
        if event.message is not None and event.message.prefix == AUTHOR:
            content = b64decode(event.message.content)
            try:
                author = msgspec.json.decode(content)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                author = content.decode("utf-8", "replace")
            found[int(LSN.parse(event.source.commit_lsn))] = author
    return found


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
