"""Erase a row's events from the archive: their bytes go, their places and Merkle leaves stay.

A subject is a row: all events of its key, and of the keys that it had before or after, with their
tombstones and dead letters; and logical messages of their transactions, if asked for. Of an erased
record the archive keeps its place, seq, commit, time and operation, which say that something
happened, and the salted leaf instead of salt, key and bytes. So each cut's Merkle root is still
computed from what is there, and nobody can find out by trying what a leaf was made of.

Files with such records are written again, and one commit replaces them and adds the audit record:
a row of the pseudo topic `<prefix>.cdc.erased` with counts and no data. `forget` then deletes what
Delta's log has of the versions before, `delete_replaced` the files. What is left to do follows from
the places of erased records alone: so an erasure that was killed anywhere is completed by the next.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial, reduce
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cdc import failpoints
from cdc.errors import ConfigError
from cdc.log import names
from lockstep.jobs.archiving import layout, merkle
from lockstep.jobs.archiving.layout import Audits
from lockstep.jobs.archiving.rows import erased_topic, key_hash, of_erasure
from lockstep.jobs.archiving.writing import FILE_SUFFIX, removed, write
from lockstep.jobs.cuts.in_order import halves
from lockstep.jobs.cuts.reduce import parsed
from lockstep.sinks.delta import lake, log
from lockstep.sinks.delta.lake import ConflictError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from cdc.config import Config
    from lockstep.jobs.archiving.table import ArchiveTable, ChainedTable
    from lockstep.sinks.delta.actions import Action

# How often a commit is repeated after another process was first.
TRIES: Final = 20
# A file that can't be read and is younger may be one that another process is writing.
_GRACE_HOURS: Final = 1
_AT_ONCE: Final = 5_000
_EMPTIED: Final = ("key_hash", "key", "value", "salt")

Place = tuple[str, int, int]  # topic, partition, offset


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """The audit record: what was erased, without any of it."""

    format: int = 1
    table: str
    keys: int  # how many the row had
    events: int
    records: int  # with tombstones and parts of dead letters
    first_seq: int
    last_seq: int
    erased_at_us: int
    # How many of the records each cut has; nothing in records of older versions.
    cuts: tuple[tuple[int, int], ...] = ()


decode_erasure: Final = msgspec.json.Decoder(Erasure).decode


class Subject(NamedTuple):
    """A row in the archive."""

    topic: str
    keys: frozenset[bytes]
    seqs: frozenset[int]  # of its events
    messages: frozenset[int] = frozenset()  # seqs of logical messages of its transactions

    @property
    def every(self) -> frozenset[int]:
        """All seqs to erase."""
        return self.seqs | self.messages


def find(config: Config, archive: ArchiveTable, topic: str, keys: Collection[bytes]) -> Subject:
    """Return a row with all keys that it has had; without seqs if the archive has no event of it.

    Raises ConfigError if the row still exists, as far as the archive knows.
    """
    found: dict[int, tuple[bytes, bytes]] = {}  # by seq: key and value
    known, asked = set(keys), set[bytes]()
    while known - asked:
        new = known - asked
        asked |= new
        mine = _of_keys(archive, topic, new)
        found |= mine
        known |= _neighbours(archive, topic, mine)
    _expect_deleted(config, archive, topic, found)
    return Subject(topic, frozenset(known), frozenset(found))


def _of_keys(archive: ArchiveTable, topic: str, keys: set[bytes]) -> dict[int, tuple[bytes, bytes]]:
    hashes = ", ".join(str(key_hash(key)) for key in keys)
    where = f"topic = {_quoted(topic)} AND op IS NOT NULL AND key_hash IN ({hashes})"
    rows = lake.read(archive.table, ["seq", "key", "value"], where).to_pylist()
    return {row["seq"]: (row["key"], row["value"]) for row in rows if row["key"] in keys}


def transactions(archive: ArchiveTable, subject: Subject) -> set[int]:
    """Return the commit LSNs of its events, and of the table's events that are erased already."""
    mine = f"topic = {_quoted(subject.topic)} AND op IS NOT NULL"
    wanted = [f"{mine} AND leaf IS NOT NULL"]
    wanted += [f"{mine} AND seq IN ({some})" for some in _pieces(subject.seqs)]
    found = set[int]()
    for where in wanted:
        found |= set(lake.read(archive.table, ["commit_lsn"], where)["commit_lsn"].to_pylist())
    return found


def _neighbours(
    archive: ArchiveTable, topic: str, events: dict[int, tuple[bytes, bytes]]
) -> set[bytes]:
    """Return the keys that rows had before or after: such an update is a delete and a create."""
    kinds = {seq: parsed(value) for seq, (_, value) in events.items()}
    wanted = {seq - 1 for seq, each in kinds.items() if each.op == "c"}
    wanted |= {seq + 1 for seq, each in kinds.items() if each.op == "d"}
    found = set[bytes]()
    for some in _pieces(wanted):
        where = f"topic = {_quoted(topic)} AND op IN ('c', 'd') AND seq IN ({some})"
        for row in lake.read(archive.table, ["seq", "key", "value"], where).to_pylist():
            if row["value"] is None:
                continue
            other, seq = parsed(row["value"]), row["seq"]
            before, after = kinds.get(seq - 1), kinds.get(seq + 1)
            if (after is not None and other.op == "d" and halves(other, after)) or (
                before is not None and other.op == "c" and halves(before, other)
            ):
                found.add(row["key"])
    return found


def _expect_deleted(
    config: Config, archive: ArchiveTable, topic: str, events: dict[int, tuple[bytes, bytes]]
) -> None:
    """Raise ConfigError if the newest event of one of the keys is not its end."""
    newest: dict[bytes, int] = {}
    for seq, (key, _) in events.items():
        newest[key] = max(seq, newest.get(key, 0))
    where = f"topic = {_quoted(topic)} AND op = 't'"
    truncated = pc.max(lake.read(archive.table, ["seq"], where)["seq"]).as_py() or 0
    for seq in newest.values():
        if seq > truncated and parsed(events[seq][1]).op != "d":
            raise still_there(config, topic)


def still_there(config: Config, topic: str) -> ConfigError:
    """Return the error for a row that was not deleted."""
    table = names.table_name(config.prefix, topic)
    return ConfigError(
        f"the row of {table} exists, or its deletion is not archived yet",
        hint="delete it in the source, wait until `cdc archive status` shows no lag, and run this"
        " again",
    )


# -- the commit ------------------------------------------------------------------------------------


def erase(
    config: Config, archive: ArchiveTable, subject: Subject, find_again: Callable[[], Subject]
) -> Erasure | None:
    """Erase a subject of the loaded archive by one commit; None if that has nothing of it.

    `find_again` finds it after a commit of another process, which may have events of it: raises as
    that does.
    """
    for _ in range(TRIES):
        try:
            return _erase(config, archive, subject) if subject.every else None
        except (ConflictError, FileNotFoundError):  # another erasure has deleted a listed file
            archive.find()
            subject = find_again()
    raise lake.busy(archive.path)


def _erase(config: Config, archive: ArchiveTable, subject: Subject) -> Erasure | None:
    prefix = config.prefix
    actions: list[Action] = []
    events = records = 0
    cuts = Counter[int]()
    for add in archive.added().values():
        if not _may_hold(add, subject, prefix):
            continue
        rows = read(archive, add["path"])
        mask = mask_of(rows, subject, prefix)
        if not pc.any(mask).as_py():
            continue
        mine = rows.filter(mask)
        records += len(mine)
        cuts.update(mine["cut"].to_pylist())
        events += pc.sum(pc.is_valid(mine["op"])).as_py()
        written = write(archive.files, pa.concat_tables([rows.filter(pc.invert(mask)), bare(mine)]))
        actions += [removed(add, changes_rows=True), written]
        failpoints.reach("erase_file")
    if not records:
        return None
    position = archive.position()
    assert position.newest is not None, "it holds records"
    erasure = Erasure(
        table=names.table_name(config.prefix, subject.topic),
        keys=len(subject.keys),
        events=events,
        records=records,
        first_seq=min(subject.every),
        last_seq=max(subject.every),
        erased_at_us=time.time_ns() // 1_000,
        cuts=tuple(sorted(cuts.items())),
    )
    value = msgspec.json.encode(erasure)
    audits = reduce(Audits.after, _audit_records(config, archive), Audits())
    audit = of_erasure(config.prefix, position.newest.number, audits.number, value)
    actions.append(write(archive.files, pa.Table.from_batches([audit])))
    archive.commit(actions, position._replace(audits=audits.after(value)), "ERASE")
    failpoints.reach("erase_committed")
    return erasure


def read(table: ChainedTable, path: str, columns: list[str] | None = None) -> pa.Table:
    """Return a file's rows."""
    data = pa.BufferReader(table.files.read(path))
    found = pq.read_table(data, columns=columns, page_checksum_verification=True)
    return found if columns else found.cast(layout.SCHEMA)


def _may_hold(add: dict[str, object], subject: Subject, prefix: str) -> bool:
    stats = json.loads(str(add["stats"]))
    least, most = stats["minValues"], stats["maxValues"]

    def within(name: str, values: Iterable[int | str]) -> bool:
        low, high = least.get(name), most.get(name)
        return low is None or high is None or any(low <= each <= high for each in values)

    in_topic = within("topic", [subject.topic]) and within(
        "key_hash", [key_hash(key) for key in subject.keys]
    )
    others = [names.dead_topic(prefix), names.messages_topic(prefix)]
    return in_topic or (within("topic", others) and within("seq", subject.every))


def mask_of(rows: pa.Table, subject: Subject, prefix: str) -> pa.ChunkedArray:
    """Return which rows are the subject's: by key; dead letters and messages by seq."""
    by_key = pc.and_(
        pc.equal(rows["topic"], subject.topic),
        pc.is_in(rows["key"], value_set=pa.array(sorted(subject.keys), pa.binary())),
    )
    dead, messages = names.dead_topic(prefix), names.messages_topic(prefix)
    of_event = _by_seq(rows, dead, subject.every)
    return pc.or_(by_key, pc.or_(of_event, _by_seq(rows, messages, subject.messages)))


def _by_seq(rows: pa.Table, topic: str, seqs: Collection[int]) -> pa.ChunkedArray:
    there = pc.and_(pc.equal(rows["topic"], topic), pc.is_null(rows["leaf"]))
    return pc.and_(there, pc.is_in(rows["seq"], value_set=pa.array(sorted(seqs), pa.int64())))


def bare(rows: pa.Table) -> pa.Table:
    """Return records without their bytes, each with its leaf."""
    columns = (rows[name].to_pylist() for name in ("salt", "offset", "key", "value"))
    leaves = [merkle.leaf(*each) for each in zip(*columns, strict=True)]
    found = {name: rows[name] for name in rows.schema.names}
    found |= {name: pa.nulls(len(rows), rows.schema.field(name).type) for name in _EMPTIED}
    return pa.table(found | {"leaf": pa.array(leaves, pa.binary())}, schema=rows.schema)


def erasures(config: Config, archive: ArchiveTable) -> list[Erasure]:
    """Return the audit records of an opened archive, in their order."""
    return [decode_erasure(each) for each in _audit_records(config, archive)]


def _audit_records(config: Config, archive: ArchiveTable) -> list[bytes]:
    where = f"topic = {_quoted(erased_topic(config.prefix))}"
    rows = lake.read(archive.table, ["offset", "value"], where).sort_by("offset")
    found: list[bytes] = rows["value"].to_pylist()
    return found


# -- what is left of it ----------------------------------------------------------------------------


def places(archive: ArchiveTable) -> set[Place]:
    """Return the places of all erased records."""
    rows = lake.read(archive.table, ["topic", "partition", "offset"], "leaf IS NOT NULL")
    return set(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def erased_seqs(archive: ArchiveTable, topic: str) -> pa.Int64Array:
    """Return the seqs of a table's erased events."""
    where = f"topic = {_quoted(topic)} AND leaf IS NOT NULL AND op IS NOT NULL"
    return lake.read(archive.table, ["seq"], where)["seq"].combine_chunks()


def delete_replaced(table: ChainedTable, erased: set[Place]) -> list[str]:
    """Delete files that no version names and that have an erased record's bytes.

    A file that another process is writing has none: its events are archived after the erased ones.
    Returns files that can't be read, which another process may be writing.
    """
    table.find()
    needed, files, unread = table.added().keys(), log.files(table.table), []
    oldest = datetime.now(UTC) - timedelta(hours=_GRACE_HOURS)
    for name in table.files.names(""):
        if "/" in name or not name.endswith(FILE_SUFFIX) or name in needed:
            continue
        try:
            if not _has_bytes(table, name, erased):
                continue
        except FileNotFoundError:
            continue
        except (pa.ArrowInvalid, OSError):
            if files.get_file_info(name).mtime >= oldest:
                unread.append(name)
                continue
        with suppress(FileNotFoundError):  # another erasure was first
            files.delete_file(name)
        failpoints.reach("erase_deleted")
    return unread


def _has_bytes(table: ChainedTable, name: str, erased: set[Place]) -> bool:
    data = pq.ParquetFile(pa.BufferReader(table.files.read(name)))
    columns = ["topic", "partition", "offset"]
    has_leaf = "leaf" in data.schema_arrow.names
    rows = data.read(columns + ["leaf"] * has_leaf)
    if has_leaf:
        rows = rows.filter(pc.is_null(rows["leaf"]))
    each = zip(*(rows[column].to_pylist() for column in columns), strict=True)
    return any(place in erased for place in each)


def forget(archive: ArchiveTable) -> None:
    """Delete what Delta's log has of the versions before: bounds of keys' hashes, and versions."""
    for _ in range(TRIES):
        try:
            archive.find()
            archive.forget_versions(partial(archive.commit, [], archive.position(), "ERASE"))
        except ConflictError:
            continue
        return
    raise lake.busy(archive.path)


def _pieces(numbers: Collection[int]) -> Iterable[str]:
    listed = sorted(numbers)
    for at in range(0, len(listed), _AT_ONCE):
        yield ", ".join(map(str, listed[at : at + _AT_ONCE]))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
