"""Fold change events into table states, and check everything that the log promises about order.

This is the one oracle of tests, demo and `verify`: it knows docs/EVENTS.md and nothing of the code
that writes the log. Feed it the records of every data topic and of the logical messages' topic,
each partition in offset order and the partitions in any interleaving, and the frontier records;
`finish` returns the tables and every broken promise as a sentence:

- `seq` is dense over all topics, without gap or repeat; Position grows with it (an initial snapshot
  has rules of its own: `cdc.verify.snapshot`);
- in every partition, and for every key, `seq` ascends; in one epoch one key lives in one partition;
- a tombstone directly follows each delete of a key, and is nowhere else;
- rows are created once, changed and deleted only while they exist, unless the log did not hold the
  table before: an incremental snapshot follows (`read_empty`, where it found none), or the initial
  one left its rows out (`complete`);
- each cut between two frontiers holds the events it counts, and complete source transactions only;
- the last frontier is the newest commit;
- an event that points to a dead letter differs from it only in the values it leaves out, and each
  letter has such an event.

Events are applied in `seq` order as soon as they are dense, so memory follows the tables and the
skew between partitions, not the length of the log. Sentences name topics, offsets, seq and key
hashes, never row values. Nothing here reads a file, a socket or the clock.
"""

from __future__ import annotations

from base64 import b64decode
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cdc.errors import (
    CDCError,
    unquoted,
)
from cdc.events import LSN, Frontier, Position
from cdc.log.dead_letters import DeadLetterAssembler, Pointer
from cdc.log.records import alteration_of
from cdc.verify.events import Arrival, FoldEvent, Row, TableState, canonical, decode, key_hash
from cdc.verify.frontiers import Findings, PartitionSeqs, TransactionEnds, check_cuts
from cdc.verify.snapshot import SnapshotEvents

if TYPE_CHECKING:
    from collections.abc import Callable

_START = Position(0, LSN(0), 0)
_NO_ROW = "deletes a row that is not there"


class Folded(NamedTuple):
    """The outcome: `findings` is empty if and only if the log keeps its promises."""

    tables: dict[str, TableState]
    events: int
    seq: int
    frontier: Frontier | None
    findings: tuple[str, ...]
    initial: int = 0  # of the events, those of an initial snapshot


@dataclass(slots=True)
class _Partition:
    events: PartitionSeqs = field(default_factory=PartitionSeqs)
    last_offset: int = -1
    newest_seq: int = 0
    # The key of a delete whose tombstone has not arrived yet.
    deleted: bytes | None = None


class Fold:
    """Takes records one by one; `finish` returns the outcome. The log starts with seq 1.

    `complete` returns, by schema and name, whether a table has all its rows in the log.
    """

    def __init__(self, *, complete: Callable[[str, str], bool] = lambda *_: True) -> None:
        self.findings = Findings()
        self.tables: dict[str, TableState] = {}
        self.events = 0
        self.frontiers: list[Frontier] = []
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._homes: dict[tuple[str, int, bytes], tuple[int, int]] = {}
        self._complete_table = complete
        self._next_seq = 1
        self._waiting: dict[int, Arrival] = {}
        self._letters = DeadLetterAssembler()
        self._snapshot = SnapshotEvents()
        self._snapshot_dead: list[Arrival] = []  # whose letters have not arrived yet
        # Of the event applied last; a row that a key change has just deleted provides its TOAST.
        self._position = _START
        self._alone = False  # whether it is a transaction of its own
        self._op = ""
        self._moved: Row | None = None
        self._lsn = ("", LSN(0))
        self._last_seq = 0
        self._ends = TransactionEnds()

    @property
    def seq(self) -> int:
        """The newest `seq` up to which no event is missing."""
        return self._next_seq - 1

    def add(
        self, topic: str, partition: int, offset: int, key: bytes | None, value: bytes | None
    ) -> None:
        """Take one record of a data topic or of the logical messages', in its partition's order."""
        here = f"{topic}/{partition} offset {offset}"
        home = self._partitions.get((topic, partition))
        if home is None:
            home = self._partitions[topic, partition] = _Partition()
        if offset <= home.last_offset:
            self.findings.add(f"{here} was read after offset {home.last_offset}")
        home.last_offset = offset
        if value is None:
            self._take_tombstone(home, here, key)
            return
        self._expect_no_tombstone(home, here)
        try:
            event = decode(value)
        except msgspec.MsgspecError as error:
            self.findings.add(f"{here} is not a change event: {unquoted(error)}")
            return
        self._check_arrival(home, here, Arrival(topic, partition, offset, key, event))

    def add_letter(self, key: bytes | None, value: bytes | None) -> None:
        """Take one record of the topic of dead letters, in the order of its topic."""
        try:
            self._letters.add(key, value)
        except CDCError as error:
            self.findings.add(error.what)
        dead, self._snapshot_dead = self._snapshot_dead, []
        for arrival in dead:
            self._apply_initial(arrival)
        self._apply_in_turn()

    def add_frontier(self, frontier: Frontier) -> None:
        """Take one frontier record, in the order of its topic."""
        self.frontiers.append(frontier)
        self._begin_stream()

    def read_empty(self, topic: str) -> None:
        """Note that an incremental snapshot has read the table, and that it had no row by then."""
        if topic in self.tables:
            self.tables[topic].doubts = Findings()

    def finish(self) -> Folded:
        """Return the outcome; the log must have been read to its end, at a quiet moment."""
        self._apply_past_gaps()
        self._doubt_unmatched()
        for table in self.tables.values():
            self.findings.include(table.doubts)
        for letter in self._letters.pending():
            self.findings.add(f"no event points to dead letter {letter}")
        if self._position is not _START:
            self._end(self._position)
        for (topic, partition), home in self._partitions.items():
            self._expect_no_tombstone(home, f"the end of {topic}/{partition}")
        seqs = {each: home.events for each, home in self._partitions.items()}
        check_cuts(self.findings, self.frontiers, seqs, self._ends, newest=self.seq)
        return Folded(
            self.tables,
            self.events,
            self.seq,
            self.frontiers[-1] if self.frontiers else None,
            self.findings.sentences(),
            self._snapshot.applied,
        )

    # -- a record as it arrives -------------------------------------------------------------

    def _take_tombstone(self, home: _Partition, here: str, key: bytes | None) -> None:
        if key is None or home.deleted != key:
            self.findings.add(f"{here} is a tombstone of key {key_hash(key)} without its delete")
        home.deleted = None

    def _expect_no_tombstone(self, home: _Partition, here: str) -> None:
        if home.deleted is not None:
            self.findings.add(
                f"{here} is where the tombstone of key {key_hash(home.deleted)} should follow"
                " its delete"
            )
            home.deleted = None

    def _check_arrival(self, home: _Partition, here: str, arrival: Arrival) -> None:
        key, event = arrival.key, arrival.event
        seq = event.source.seq
        if seq <= home.newest_seq and not event.initial:
            self.findings.add(f"{here} holds seq {seq} after seq {home.newest_seq}")
        home.newest_seq = max(home.newest_seq, seq)
        home.events.add(arrival.offset, seq)
        if key is not None:
            self._check_key(here, arrival, key)
            if event.op == "d":
                home.deleted = key
        if event.initial and self._snapshot.takes(seq):
            self._apply_initial(arrival)
        elif event.initial or seq < self._next_seq or seq in self._waiting:
            self.findings.add(f"{here} holds seq {seq}, which arrived before: visible twice")
        else:
            self._waiting[seq] = arrival
            self._apply_in_turn()

    def _check_key(self, here: str, arrival: Arrival, key: bytes) -> None:
        """Check the key's order within its epoch: a new one may give it another partition."""
        identity = (arrival.topic, arrival.event.source.epoch, key)
        partition, seq = arrival.partition, arrival.event.source.seq
        known = self._homes.get(identity)
        if known is not None:
            if known[0] != partition:
                self.findings.add(
                    f"{here} holds key {key_hash(key)}, whose events were in partition {known[0]}"
                )
            if seq <= known[1]:
                self.findings.add(f"{here} holds seq {seq} of a key after its seq {known[1]}")
        self._homes[identity] = (partition, seq)

    # -- an initial snapshot: each event as it arrives ---------------------------------------

    def _apply_initial(self, arrival: Arrival) -> None:
        """Apply an event of the initial snapshot, once it is complete."""
        event = arrival.event
        if event.source.dead and event.source.dead.id not in self._letters:
            self._snapshot_dead.append(arrival)
            return
        self._snapshot.applied += 1
        self.events += 1
        if event.source.dead:
            event = self._from_dead_letter(arrival, event.source.dead)
        # While it waited for its letter, or in another partition, a newer generation may have
        # brought the row.
        if arrival.key is None or self._snapshot.is_newest(arrival, arrival.key):
            self._change(arrival._replace(event=event))
        self._begin_stream()

    def _begin_stream(self) -> None:
        """Apply the stream's events once the snapshot's are applied."""
        end = self._snapshot.end(self.frontiers)
        if end is not None:
            self._next_seq = end.seq + 1
            self._last_seq = end.seq
            self._ends.add(end.seq, end.epoch, LSN(end.lsn - 1))
            self._moved = None
            self._doubt_unmatched()
            self._apply_in_turn()

    def _doubt_unmatched(self) -> None:
        for arrival in self._snapshot.unmatched():
            self._doubt(self.tables[arrival.topic], arrival, _NO_ROW)

    # -- an event in its turn ---------------------------------------------------------------

    def _apply_in_turn(self) -> None:
        """Apply what is dense and complete; a letter may follow the event that points to it."""
        while (arrival := self._waiting.get(self._next_seq)) is not None:
            dead = arrival.event.source.dead
            if dead and dead.id not in self._letters:
                return
            del self._waiting[self._next_seq]
            self._apply(arrival)

    def _apply_past_gaps(self) -> None:
        for seq in sorted(self._waiting):
            if seq != self._next_seq:
                missing = str(self._next_seq)
                if seq - 1 > self._next_seq:
                    missing += f" to {seq - 1}"
                self.findings.add(f"seq {missing} is missing from the log")
            self._apply(self._waiting.pop(seq))

    def _apply(self, arrival: Arrival) -> None:
        if arrival.event.source.dead:
            arrival = arrival._replace(
                event=self._from_dead_letter(arrival, arrival.event.source.dead)
            )
        event = arrival.event
        self.events += 1
        self._check_position(arrival)
        if event.op != "m":
            self._change(arrival)
        elif event.message is not None and event.alters:
            alteration = alteration_of(b64decode(event.message.content))
            if alteration.topic in self.tables:
                self.tables[alteration.topic].alter(alteration)
        self._op = event.op
        self._last_seq = event.source.seq
        self._next_seq = event.source.seq + 1

    def _change(self, arrival: Arrival) -> None:
        event, table = arrival.event, self._table(arrival)
        table.events += 1
        moved, self._moved = self._moved, None
        if event.op == "t":
            table.rows.clear()
            table.keyless.clear()
            table.complete = True
        elif event.op not in {"c", "u", "d", "r"}:
            self._report(arrival, f"has the unknown op {event.op!r}")
        elif arrival.key is None:
            self._apply_keyless(table, arrival)
        else:
            self._apply_keyed(table, arrival, arrival.key, moved)

    def _from_dead_letter(self, arrival: Arrival, dead: Pointer) -> FoldEvent:
        """Return the event from its dead letter; the pointer if that can't be read."""
        pointing = arrival.event
        try:
            event = decode(self._letters.event(dead))
        except (CDCError, msgspec.MsgspecError) as error:
            why = error.what if isinstance(error, CDCError) else unquoted(error)
            self._report(arrival, f"points to a dead letter that can't be read: {why}")
            return pointing
        if pointing.without(dead.columns) != event.without(dead.columns):
            self._report(arrival, "differs from its dead letter in more than what it leaves out")
        return event

    def _end(self, last: Position) -> None:
        """Note that a source transaction ended with the event at `last`."""
        # A message outside any transaction is a transaction of its own, which its LSN ends.
        begins = last.commit_lsn - self._alone
        self._ends.add(self._last_seq, last.epoch, LSN(begins))

    def _check_position(self, arrival: Arrival) -> None:
        source = arrival.event.source
        # One transaction's events follow each other, so the text is parsed once for all of them.
        if source.commit_lsn != self._lsn[0]:
            try:
                self._lsn = (source.commit_lsn, LSN.parse(source.commit_lsn))
            except ValueError as error:
                self._report(arrival, str(error))
                return
        position = Position(source.epoch, self._lsn[1], source.ordinal)
        before = self._position
        if before is not _START and (self._alone or position[:2] != before[:2]):
            self._end(before)
        # A changed key is a delete and a create with one ordinal, and what is altered in the middle
        # of a transaction has that of the change before; nothing else shares one.
        shared = (self._op, arrival.event.op) == ("d", "c") or arrival.event.alters
        if position < before or (position == before and not shared):
            self._report(
                arrival,
                f"is at {position.commit_lsn} ordinal {position.ordinal}, not after"
                f" {before.commit_lsn} ordinal {before.ordinal} of the seq before",
            )
        if position != before:
            self._moved = None
        self._position = position
        self._alone = position.ordinal == 0 and not arrival.event.alters

    def _table(self, arrival: Arrival) -> TableState:
        table = self.tables.get(arrival.topic)
        source = arrival.event.source
        if table is None:
            complete = self._complete_table(source.schema, source.table)
            table = TableState(arrival.topic, source.schema, source.table, complete=complete)
            self.tables[arrival.topic] = table
        elif (table.schema, table.table) != (source.schema, source.table):
            self._report(arrival, f"is of {source.schema}.{source.table}, not of {table.name}")
        return table

    def _apply_keyed(
        self, table: TableState, arrival: Arrival, key: bytes, moved: Row | None
    ) -> None:
        event = arrival.event
        row = table.rows.get(key)
        if event.op == "d":
            if row is None and event.initial:
                self._snapshot.deletes_early(arrival, key)
            elif row is None:
                self._doubt(table, arrival, _NO_ROW)
            self._moved = table.rows.pop(key, None)
            return
        if event.op == "c" and row is not None:
            self._report(arrival, "creates a row that is there already")
        if event.op == "u" and row is None:
            self._doubt(table, arrival, "updates a row that is not there")
        earlier = moved if event.op == "c" else row
        table.rows[key] = self._complete(table, arrival, earlier)
        if event.op == "r" and not event.initial:
            table.doubts = Findings()

    def _apply_keyless(self, table: TableState, arrival: Arrival) -> None:
        event = arrival.event
        if event.op in {"u", "d"}:
            if event.before is None:
                self._report(arrival, "changes a keyless row without its old values")
                return
            old = canonical(event.before)
            if table.keyless[old] == 0:
                self._doubt(table, arrival, "changes or deletes a keyless row that is not there")
            elif table.keyless[old] == 1:
                del table.keyless[old]
            else:
                table.keyless[old] -= 1
        if event.op != "d":
            table.keyless[canonical(self._complete(table, arrival, event.before))] += 1

    def _complete(self, table: TableState, arrival: Arrival, earlier: Row | None) -> Row:
        """Return the new row with its unchanged columns taken from the `earlier` one."""
        event = arrival.event
        if event.after is None:
            self._report(arrival, "has no new row")
            return {}
        for column in event.source.unchanged:
            if earlier is None or column not in earlier:
                what = f"leaves column {column} unchanged, but no earlier event has its value"
                self._doubt(table, arrival, what)
                event.after.pop(column, None)  # unknown
            else:
                event.after[column] = earlier[column]
        return event.after

    def _report(self, arrival: Arrival, what: str) -> None:
        self.findings.add(arrival.sentence(what))

    def _doubt(self, table: TableState, arrival: Arrival, what: str) -> None:
        """Report it at the end, unless the log did not hold the table before."""
        if table.complete:
            table.doubts.add(arrival.sentence(what))
