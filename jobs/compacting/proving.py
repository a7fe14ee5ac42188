"""Prove that bases are unaltered, and that the newest one is the fold of the archive.

The commits of their table and each file are compared with their digests, each table's rows with the
counts and the digest that the base record has of it, and its frontier's chain with the archive's.
Then the newest base is made again from the archive alone, without the bases before it, and must be
the fold of its own runs: so an error of any compaction since the first is found, too.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from cdc.log import names
from lockstep.jobs.archiving import delta_log
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.archiving.writing import SHA256
from lockstep.jobs.compacting import frontiers, layout, past
from lockstep.jobs.compacting.bases import Bases, bases_of
from lockstep.jobs.compacting.changes import PastChanges
from lockstep.jobs.compacting.frontiers import ArchivedFrontier
from lockstep.jobs.compacting.runs import BaseFile
from lockstep.sinks.delta import log

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cdc.config import Config
    from cdc.events import LSN
    from cdc.log.follower_reports import FollowerRecord
    from lockstep.jobs.compacting.layout import BaseRecord, TableCount
    from lockstep.jobs.compacting.past import PastState


_TRIES: Final = 3


class BasesProof(NamedTuple):
    """What was found; the bases are unaltered, and the newest is right, without findings."""

    bases: int
    rows: int  # of the newest
    number: int  # of the newest; 0 without one
    lsn: str
    findings: tuple[str, ...]


def prove(
    config: Config,
    chains: Mapping[tuple[LSN, int], str],
    reported: FollowerRecord | None = None,
    *,
    upto: LSN | None = None,
    folds: bool = True,
) -> BasesProof | None:
    """Check the bases that the policy keeps, of those not above an LSN; None if there are none.

    `chains` are those of the archive's frontiers, as far as they are known. `reported` is what a
    compaction has reported: that base, or a later one, must be there. Without `folds` the newest
    base is not made again: an altered archive can't be folded. What is found while an erasure, or
    a compaction, commits another base is looked at again.
    """
    proof = None
    for _ in range(_TRIES):
        bases = bases_of(config)
        proof = _proof(config, bases, chains, reported, upto, folds=folds)
        if proof is None or not proof.findings or not _is_replaced(config, bases):
            break
    return proof


def _is_replaced(config: Config, bases: Bases) -> bool:
    """Return whether there is a version after the one that was read."""
    newest = bases_of(config)
    try:
        return newest.find() and newest.table.version() > bases.table.version()
    except delta_log.UNREADABLE:
        return False  # it can't be read, and that is a finding


def _proof(
    config: Config,
    bases: Bases,
    chains: Mapping[tuple[LSN, int], str],
    reported: FollowerRecord | None,
    upto: LSN | None,
    *,
    folds: bool,
) -> BasesProof | None:
    stored = bases.files.names("")
    if not any(name.startswith("_delta_log/") and name.endswith(".json") for name in stored):
        if not stored and reported is None:
            return None
        was = f": one was made at {reported.lsn}, seq {reported.seq}" if reported else ""
        what = f"{bases.path} has no base any more{was}; `cdc archive compact` makes one"
        return BasesProof(0, 0, 0, "0/0", (what,))
    findings = delta_log.check(bases, reported.commit if reported else None).findings
    try:
        bases.find()
        kept = bases.kept(config.archive.bases_kept)
    except delta_log.UNREADABLE:
        findings.append(f"{bases.path}: Delta's log can't be read")
        return BasesProof(0, 0, 0, "0/0", tuple(findings))
    kept = [each for each in kept if upto is None or each.applied.lsn <= upto]
    sound: dict[str, list[TableCount] | None] = {}
    for number, record in enumerate(kept):
        at = record.applied
        if chains.get((at.lsn, at.seq), record.chain) != record.chain:
            findings.append(f"{_name(record)} has another chain than the archive at its frontier")
        if number + 1 < len(kept) and record.previous != layout.digest(kept[number + 1]):
            findings.append(f"{_name(record)} does not continue the base before it")
        findings += _contents(config, bases, record, sound)
    if kept and folds and not findings:
        findings += _folded(config, kept[0])
    newest = kept[0] if kept else None
    return BasesProof(
        len(kept),
        newest.rows if newest else 0,
        newest.number if newest else 0,
        newest.lsn if newest else "0/0",
        tuple(findings),
    )


def _name(record: BaseRecord) -> str:
    return f"base {record.number} ({record.lsn})"


def _contents(
    config: Config, bases: Bases, record: BaseRecord, sound: dict[str, list[TableCount] | None]
) -> Iterator[str]:
    """Yield what differs in a base's files; `sound` has what those before were found to hold."""
    try:
        added = log.added(bases.version(record.number))
    except delta_log.UNREADABLE:
        yield f"{_name(record)}: its version of Delta's log can't be read"
        return
    counts: list[TableCount] = []
    is_complete = True
    for path, add in added.items():
        if path not in sound:
            found = _file(bases, path, add)
            sound[path] = None if isinstance(found, str) else found
            if isinstance(found, str):
                tables = ", ".join(names.table_name(config.prefix, t) for t in _topics(add))
                yield f"{_name(record)}: file {path} ({tables}) is {found}"
        known = sound[path]
        is_complete &= known is not None
        counts += known or ()
    if not is_complete:
        return
    stated = {each.topic: each for each in record.tables if each.rows}
    held = {each.topic: each for each in layout.total(counts)}
    for topic in sorted(stated.keys() | held.keys()):
        if stated.get(topic) != held.get(topic):
            table = names.table_name(config.prefix, topic)
            yield f"{_name(record)}: {table} does not have the rows that it states"


def _file(bases: Bases, path: str, add: dict[str, Any]) -> list[TableCount] | str:
    """Return what a file holds, or what is wrong with it."""
    try:
        data = bases.files.read(path)
    except FileNotFoundError:
        return "missing"
    if sha256(data).hexdigest() != dict(add.get("tags") or ()).get(SHA256):
        return "altered"
    return layout.counted(pq.read_table(pa.BufferReader(data)).cast(layout.SCHEMA))


def _topics(add: dict[str, Any]) -> list[str]:
    try:
        return sorted(BaseFile.of(add).topics)
    except (ValueError, KeyError, TypeError, msgspec.MsgspecError):
        return []


def _folded(config: Config, record: BaseRecord) -> Iterator[str]:
    """Yield the tables of a base that are not the fold of the archive up to its frontier.

    Not of a table that is not compacted: its base may begin later, at an earlier key's newest rows.
    """
    archive = opened(config)
    if not archive.find():
        return
    frontier = frontiers.newest(config, archive.table, None, record.seq)
    if frontier is None or frontier.applied.seq != record.seq:
        yield f"{_name(record)}: the archive has no frontier of seq {record.seq}"
        return
    state = past.state(config, archive, None, frontier)
    itself = ArchivedFrontier(record.applied, record.chain, record.cut, {})
    wanted = _counts(state, record)
    found = _counts(past.state(config, archive, record, itself), record)
    for topic in sorted((wanted.keys() | found.keys()) - state.past.uncompacted):
        if wanted.get(topic) != found.get(topic):
            table = names.table_name(config.prefix, topic)
            yield f"{_name(record)}: {table} is not the fold of the archive up to its frontier"


def _counts(state: PastState, record: BaseRecord) -> dict[str, TableCount]:
    """Return what tables hold in a state, without the deletes that the base leaves out."""
    reader = PastChanges(state.past._replace(deletes_since_us=record.deletes_since_us))
    counts = (each for part in state.slices() for each in layout.counted(reader.rows(part)))
    return {each.topic: each for each in layout.total(counts)}
