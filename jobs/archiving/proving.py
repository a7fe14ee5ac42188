"""Prove that the archive is complete and unaltered up to an LSN, or name what is not.

Four things are recomputed, from the outside in: Delta's commits by their digests, each file by its
SHA-256, each cut's Merkle roots and the digests of the partitions from its records, and both
chains: of the cut records and of the log's frontiers. Nothing but the storage is needed.

A record that was erased has its leaf instead of its salt: the Merkle root closes with it. The
digests of its partition can't be recomputed then; they were when it was archived. How many records
of each cut are erased is compared with the audit records of erasures, and these with the digests
that the cuts after them, and the newest commit, have of them.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow.compute as pc

from cdc.errors import CDCError, UnavailableError
from cdc.events import LSN
from cdc.log import names, records
from cdc.verify.digests import CutCheck, FrontierChain
from cdc.verify.noted import NotedChain, NotedCheck
from cdc.verify.schemas import SchemaCheck
from lockstep.jobs.archiving import delta_log, layout, merkle
from lockstep.jobs.archiving.erasing import decode_erasure
from lockstep.jobs.archiving.layout import Audits
from lockstep.jobs.archiving.rows import archive_topic, erased_topic
from lockstep.jobs.archiving.stored import Place, Stored, is_unaltered, last_cuts
from lockstep.jobs.archiving.table import ArchiveTable
from lockstep.jobs.archiving.writing import FILE_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from cdc.config import Config
    from cdc.log.follower_reports import FollowerRecord
    from cdc.log.records import FrontierRecord
    from cdc.verify.digests import SpanCheck
    from lockstep.jobs.archiving.delta_log import LogCheck
    from lockstep.jobs.archiving.layout import ArchivePosition, CutRecord, CutSpan

# Seqs of missing events that a sentence names.
_NAMED: Final = 5
_IS_ERASED_EVENT: Final = pc.field("leaf").is_valid() & pc.field("op").is_valid()
# How often it starts again after an erasure has deleted files that it had listed.
_TRIES: Final = 3
# How many cuts after the newest executors may have written files of.
_AHEAD: Final = 2
# Cuts whose chains are kept, for the comparison with the topics.
_CHAINS: Final = 100_000


class Noted(NamedTuple):
    """Chains that were noted elsewhere, and whether the log is proved too."""

    chains: Sequence[NotedChain] = ()
    has_log: bool = False


class ArchiveProof(NamedTuple):
    """What was found; the archive is complete and unaltered if there are no findings."""

    cuts: int
    events: int
    records: int
    erased: int  # records
    erased_events: int
    undigested: int  # events of frontiers without digests, proved by the Merkle roots alone
    seq: int
    lsn: str
    chain: str  # of the log's frontiers
    digest: str  # of the newest cut record
    findings: tuple[str, ...]
    anchored: bool  # whether a frontier has the chain that was looked for
    chains: dict[tuple[LSN, int], str]  # of the frontiers that end the newest cuts
    # Files with a cut after the newest, which no commit names: of a job that was killed or is
    # writing, or of a commit that is missing.
    unnamed: tuple[str, ...]
    noted: int  # chains noted elsewhere that it has


def prove(
    config: Config,
    archive: ArchiveTable,
    upto: LSN | None = None,
    anchor: str | None = None,
    reported: FollowerRecord | None = None,
    noted: Noted | None = None,
) -> ArchiveProof:
    """Recompute everything up to an LSN, or all; look for a frontier with the chain `anchor`.

    `reported` is a report of the archive's job, from before this: all that it states must be there,
    and so must all that was noted. Raises ConfigError if there is no archive, and UnavailableError
    if files were erased again and again meanwhile.
    """
    for _ in range(_TRIES):
        proving = _Proving(config, archive, upto, anchor, reported, noted or Noted())
        with suppress(FileNotFoundError):  # of a file that was listed, and replaced since
            proving.run()
            return proving.proof()
    raise UnavailableError(
        f"{archive.path} was erased from while it was proved", hint="prove it again"
    )


class _Proving:
    def __init__(
        self,
        config: Config,
        archive: ArchiveTable,
        upto: LSN | None,
        anchor: str | None,
        reported: FollowerRecord | None,
        noted: Noted,
    ) -> None:
        self._config, self._archive, self._upto, self._anchor = config, archive, upto, anchor
        self._reported = reported
        self._noted, self._has_log = NotedCheck(noted.chains), noted.has_log
        self._files: list[str] = []  # that no commit names
        self._unnamed: list[str] = []
        self._findings: list[str] = []
        self._cuts = self._events = self._records = self._erased = self._undigested = 0
        self._erased_events = 0
        self._audits: list[bytes] = []  # audit records of erasures
        self._audited = [Audits()]  # what a cut states after each number of them
        self._has_audits = True  # whether all cuts so far state what is there
        self._erased_in: dict[int, int] = {}  # records of each cut
        self._position: ArchivePosition | None = None  # that the newest commit states
        self._newest: CutRecord | None = None
        self._digest = ""
        self._chain = FrontierChain("", 0)
        self._own = archive_topic(config.prefix)  # of cut records
        self._schema_place = names.schema_topic(config.prefix), 0
        self._schemas = SchemaCheck(self._schema_place[0])
        self._last: FrontierRecord | None = None  # not above `upto`
        self._anchored = False
        self._chains: dict[tuple[LSN, int], str] = {}

    def proof(self) -> ArchiveProof:
        last = self._last
        return ArchiveProof(
            self._cuts, self._events, self._records, self._erased, self._erased_events,
            self._undigested,
            last.seq if last else 0, str(last.lsn) if last else "0/0", last.chain if last else "",
            self._digest, tuple(self._findings), self._anchored, self._chains,
            tuple(self._unnamed), self._noted.found,
        )  # fmt: skip

    def run(self) -> None:
        places = self._places()
        if places is None:
            return
        sound = [place for place in places if self._is_sound(place)]
        stored = Stored(self._archive.files, sound)
        for record, value in self._cut_records(stored):
            self._cut(stored, record, value)
            if self._upto is not None and LSN.parse(record.lsn) >= self._upto:
                # Audit records are of the archive, not of a cut.
                self._expect_audited(stored.erased())
                break
        else:
            self._expect_end()
            self._expect_audited(self._erased)
        self._findings += self._schemas.finish(all_stated=False)
        last = self._last
        end = NotedChain(last.seq if last else 0, last.lsn if last else LSN(0), "")
        self._findings += self._noted.finish(
            end=end,
            # What is after the archive's end the log has, if it can be read.
            upto=end.lsn if self._has_log else self._upto,
            after_end="its job is late, or its newest commits are missing",
        )

    # -- Delta's log, and the files ----------------------------------------------------------------

    def _places(self) -> list[Place] | None:
        """Return the files that the newest version has; None if it can't be read."""
        # Listed before the commits are read: so of a job that writes meanwhile no cut record is of
        # a later cut than the next, and no other file of a later one than executors may write.
        files = self._archive.files.names("")
        log = self._checked_log()
        self._findings += log.findings
        try:
            self._archive.find()
            added = self._archive.added()
            with suppress(CDCError, msgspec.MsgspecError):
                self._position = self._archive.position()
            places = [Place.of(add) for add in added.values()]
        except delta_log.UNREADABLE:
            self._findings.append(f"{self._archive.path}: Delta's log can't be read")
            return None
        data = {each for each in files if "/" not in each and each.endswith(FILE_SUFFIX)}
        self._files = sorted(data - log.named - added.keys())
        return places

    def _checked_log(self) -> LogCheck:
        """Return what is wrong with Delta's log, and was not only changed while it was read."""
        reported = self._reported.commit if self._reported else None
        for _ in range(_TRIES - 1):
            with suppress(FileNotFoundError):
                log = delta_log.check(self._archive, reported)
                if not log.findings:
                    return log
        return delta_log.check(self._archive, reported)

    def _is_sound(self, place: Place) -> bool:
        """Return whether a file is as it was written; FileNotFoundError if it was replaced."""
        found = is_unaltered(self._archive.files, place)
        if found:
            return True
        if found is None and self._is_replaced(place):
            raise FileNotFoundError(place.path)
        self._findings.append(f"{place} is {'missing' if found is None else 'altered'}")
        return False

    def _is_replaced(self, place: Place) -> bool:
        """Return whether a version after the loaded one is without a file."""
        newest = ArchiveTable(self._archive.path, self._archive.storage, self._config.pipeline)
        try:
            is_later = newest.find() and newest.table.version() > self._archive.table.version()
            return is_later and place.path not in newest.added()
        except delta_log.UNREADABLE:
            return False

    # -- cuts --------------------------------------------------------------------------------------

    def _cut_records(self, stored: Stored) -> Iterator[tuple[CutRecord, bytes]]:
        own, erased = self._own, erased_topic(self._config.prefix)
        values: dict[str, list[tuple[int, bytes]]] = {own: [], erased: []}
        for topic, rows in stored.all_of(values):
            places = rows["offset"].to_pylist()
            values[topic] += zip(places, rows["value"].to_pylist(), strict=True)
        self._audits = [value for _, value in sorted(values[erased])]
        for value in self._audits:
            self._audited.append(self._audited[-1].after(value))
        found = []
        for _, value in values[own]:
            try:
                found.append((layout.decode(value), value))
            except msgspec.MsgspecError:
                self._findings.append("a cut record can't be read")
        yield from sorted(found, key=lambda each: each[0].number)

    def _cut(self, stored: Stored, record: CutRecord, value: bytes) -> None:
        before, number = self._newest, record.number
        expected = before.number + 1 if before else 1
        if number != expected:
            lost = f"seq {(before.seq if before else 0) + 1} to {record.above}"
            self._findings.append(f"cuts {expected} to {number - 1} ({lost}) are missing")
        elif record.previous != self._digest:
            self._say(record, "does not continue the cut before it")
        elif record.above != (before.seq if before else 0):
            self._say(record, f"starts after seq {record.above}")
        if layout.root(record.spans) != record.root:
            self._say(record, "has another root than its spans")
        self._expect_audits(Audits(record.audits, record.audit), self._named(record))
        self._newest, self._digest = record, layout.digest(value)
        self._cuts += 1
        frontiers = self._frontiers(stored, record)
        check = CutCheck(frontiers)
        seqs: list[int] = []
        for span in record.spans:
            self._span(stored, record, span, check.partition((span.topic, span.partition)), seqs)
        spans = {(span.topic, span.partition) for span in record.spans}
        for topic, partition in set(check.partitions) - spans:
            self._say(record, f"has no span of {topic} [{partition}]")
        self._expect_dense(record, frontiers, seqs)
        self._events += record.events
        self._records += record.records

    def _frontiers(self, stored: Stored, record: CutRecord) -> list[FrontierRecord]:
        """Return the cut's frontier records, each after its place in the chain was checked."""
        found = []
        for frontier in self._decoded(stored, record):
            for each in self._chain.add(frontier):
                what = f"the frontier {frontier.lsn} (seq {frontier.seq}) {each.what}"
                self._say(record, what)
            self._anchored |= frontier.chain == self._anchor
            self._noted.add(frontier)
            self._schemas.state(frontier.schemas, f"the frontier {frontier.lsn}")
            if self._upto is None or frontier.lsn <= self._upto:
                self._last = frontier
            if frontier.digests is None:
                self._undigested += sum(events for *_, events in frontier.partitions)
            found.append(frontier)
        if not found or found[-1].chain != record.chain or found[-1].seq != record.seq:
            self._say(record, "does not hold the frontier that it states")
        if found:
            self._chains[found[-1].lsn, found[-1].seq] = found[-1].chain
            if len(self._chains) > _CHAINS:
                del self._chains[next(iter(self._chains))]
        return found

    def _decoded(self, stored: Stored, record: CutRecord) -> Iterator[FrontierRecord]:
        topic = names.frontier_topic(self._config.prefix)
        for rows in stored.span(record.number, topic, 0):
            for value in rows["value"].to_pylist():
                try:
                    frontier = records.decode(records.FrontierRecord, value or b"", topic)
                except CDCError:
                    self._say(record, "has a frontier record that can't be read")
                    continue
                if frontier.pipeline == record.pipeline:
                    yield frontier

    def _span(
        self, stored: Stored, record: CutRecord, span: CutSpan, check: SpanCheck, seqs: list[int]
    ) -> None:
        tree, erased = merkle.Tree(), 0
        for rows in stored.span(record.number, span.topic, span.partition):
            columns: dict[str, list[Any]] = rows.select(
                ["offset", "key", "value", "salt", "leaf"]
            ).to_pydict()
            self._erased_events += rows.filter(_IS_ERASED_EVENT).num_rows
            tree.extend(
                leaf if leaf is not None else merkle.leaf(salt, offset, key, value)
                for offset, key, value, salt, leaf in zip(*columns.values(), strict=True)
            )
            erased += len(rows) - rows["leaf"].null_count
            if not erased:
                check.add(columns["offset"], columns["key"], columns["value"])
            if (span.topic, span.partition) == self._schema_place:
                for row in zip(columns["offset"], columns["key"], columns["value"], strict=True):
                    self._schemas.add(*row)
            if span.events:
                seqs += _seqs(rows)
        self._erased += erased
        self._erased_in[record.number] = self._erased_in.get(record.number, 0) + erased
        place = f"{span.topic} [{span.partition}] offsets {span.start} to {span.end - 1}"
        if tree.count != span.records:
            what = f"{place}: {tree.count} records, where {span.records} were archived"
            self._say(record, what)
        elif tree.root().hex() != span.root:
            self._say(record, f"{place}: its records are not those that were archived")
        elif not erased:
            for each in check.finish():
                self._say(record, f"{place}: {each.what}")

    def _expect_dense(
        self, record: CutRecord, frontiers: list[FrontierRecord], seqs: list[int]
    ) -> None:
        """Check that each seq of the cut is there once; an initial snapshot leaves holes."""
        holes = sum(each.holes for each in frontiers)
        if len(seqs) == record.seq - record.above - holes and (
            holes or len(set(seqs)) == len(seqs)
        ):
            return
        if holes:
            self._say(record, f"{len(seqs)} events of {record.events} are there")
            return
        missing = sorted(set(range(record.above + 1, record.seq + 1)) - set(seqs))
        named = ", ".join(map(str, missing[:_NAMED])) + (" …" if len(missing) > _NAMED else "")
        self._say(record, f"lacks {len(missing)} events: seq {named}")

    def _expect_end(self) -> None:
        """Check that the newest cut is the one that the newest commit and the job's report state.

        Nor may a file have a cut that is after the next.
        """
        if self._upto is not None:
            at = self._newest.lsn if self._newest else "0/0"
            self._findings.append(f"the archive ends at {at}, before {self._upto}")
        position = self._position
        if position is None:
            self._findings.append("the newest commit states no position")
            return
        stated = position.newest
        self._expect_audits(position.audits, "the newest commit")
        if 0 < position.audits.number < len(self._audits):
            many = len(self._audits) - position.audits.number
            self._findings.append(f"{many} audit records of erasures are after the newest commit's")
        number = self._newest.number if self._newest else 0
        if stated is not None and stated.number > number:
            self._findings.append(f"cuts {number + 1} to {stated.number} are missing")
        reported, seq = self._reported, self._newest.seq if self._newest else 0
        if reported is not None and reported.seq > seq:
            self._findings.append(
                f"it ends at seq {seq}, and its job has reported seq {reported.seq}"
                f" ({reported.lsn}): seq {seq + 1} to {reported.seq} are missing"
            )
        self._expect_unnamed(number)

    def _expect_unnamed(self, number: int) -> None:
        """Check that files which no commit names are of cuts that may be without one.

        Executors write files of the cut after the next, ahead of its turn; a cut record only the
        job itself, in its turn (`cuts`).
        """
        for name in self._files:
            last, last_record = last_cuts(self._archive.files, name, self._own)
            if last > number + _AHEAD or last_record > number + 1:
                what = f"file {name} has cut {last}, and the newest commit has cut {number}"
                self._findings.append(f"{what}: commits are missing")
            elif last > number:
                self._unnamed.append(name)

    def _expect_audited(self, erased: int) -> None:
        """Check that the audit records of erasures count what is erased in all cuts."""
        counted, by_cut, has_cuts = 0, Counter[int](), True
        for value in self._audits:
            try:
                audit = decode_erasure(value)
            except msgspec.MsgspecError:
                self._findings.append("an audit record of an erasure can't be read")
                continue
            counted += audit.records
            by_cut.update(dict(audit.cuts))
            has_cuts &= sum(many for _, many in audit.cuts) == audit.records
        if counted != erased:
            self._findings.append(f"{erased} records are erased, where erasures state {counted}")
        if not has_cuts:  # an older version has erased some
            return
        for number, many in sorted(self._erased_in.items()):
            if many != by_cut[number]:
                what = f"{many} of its records are erased, where erasures state {by_cut[number]}"
                self._findings.append(f"cut {number}: {what}")
                return  # what follows from it is not named again

    def _expect_audits(self, stated: Audits, where: str) -> None:
        """Check what is stated of the erasures before; the first one that differs is named."""
        if not self._has_audits or not stated.number:
            return
        if stated not in self._audited[stated.number : stated.number + 1]:
            self._has_audits = False
            self._findings.append(
                f"{where}: of the {stated.number} erasures before, an audit record is missing or is"
                " not what was written"
            )

    def _say(self, record: CutRecord, what: str) -> None:
        self._findings.append(f"{self._named(record)}: {what}")

    @staticmethod
    def _named(record: CutRecord) -> str:
        return f"cut {record.number} (seq {record.above + 1} to {record.seq}, {record.lsn})"


def _seqs(rows: pa.Table) -> list[int]:
    """Return the seqs of the events among rows: those with an operation."""
    return [
        seq
        for seq, op in zip(rows["seq"].to_pylist(), rows["op"].to_pylist(), strict=True)
        if op is not None
    ]
