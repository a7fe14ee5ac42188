"""Check a log with a snapshot in it against the source: what must be true whatever was killed.

It relies on docs/EVENTS.md and reads the topics as a plain consumer does; it shares nothing with
the code that copies. In addition to the final state, which `converge` compares:

- no `seq` occurs twice; none of the stream's is missing; every generation's are below the next
  one's, and all below the stream's;
- the `seq` of a key ascends in the order of its partition;
- the changes after the consistent point are exactly those that Postgres reports, in order;
- a row's version `n` continues from its snapshot row, by one with every update: so a change that is
  both in the snapshot and in the stream is found, and so is one that is in neither;
- a row that is read again in the stream is as the changes before it left it, and never one that
  they deleted.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from cdc.events import LSN
from tests.fixtures.witness import Record, data_records, records_of

if TYPE_CHECKING:
    from tests.fixtures.daemon import PipelineUnderTest

_SHOWN = 5


class Account(NamedTuple):
    """What was found."""

    point: LSN  # the last generation's
    generations: int
    snapshot_rows: int
    deleted: int  # keys of an older generation that were deleted
    changes: int
    read_again: int  # rows of incremental snapshots
    findings: list[str]


def take(pipeline: PipelineUnderTest) -> Account:
    """Read the log and return what is wrong in it; the load must have stopped."""
    records = data_records(pipeline)
    # A message takes a seq as any event does.
    messages = records_of(pipeline, lambda name: name == f"{pipeline.config.prefix}.cdc.messages")
    findings: list[str] = []
    by_point: dict[LSN, list[int]] = defaultdict(list)
    events = [(record, record.event) for record in [*records, *messages] if record.value]
    for _, event in events:
        if _initial(event):
            by_point[LSN.parse(event["source"]["commit_lsn"])].append(event["source"]["seq"])
    streamed = [e["source"]["seq"] for _, e in events if not _initial(e)]
    _seqs(by_point, streamed, findings)
    _partitions(records, findings)
    rows = _Rows(complete=bool(by_point))
    for record, event in sorted(events, key=lambda each: each[1]["source"]["seq"]):
        if event["op"] != "m":
            rows.take(record, event)
    findings += rows.wrong[:_SHOWN]
    if len(rows.wrong) > _SHOWN:
        findings.append(f"and {len(rows.wrong) - _SHOWN} more that do not fit their rows")
    of_snapshot = [event for _, event in events if _initial(event)]
    return Account(
        max(by_point, default=LSN(0)),
        len(by_point),
        sum(e["op"] == "r" for e in of_snapshot),
        sum(e["op"] == "d" for e in of_snapshot),
        len(streamed) - rows.read_again,
        rows.read_again,
        findings,
    )


def _initial(event: dict[str, Any]) -> bool:
    """Whether the initial snapshot wrote it: before the first change that commits after."""
    source = event["source"]
    return bool(source["snapshot"] == "true" and source["ordinal"] == 0)


def _seqs(by_point: dict[LSN, list[int]], streamed: list[int], findings: list[str]) -> None:
    every = [seq for seqs in by_point.values() for seq in seqs] + streamed
    if len(set(every)) != len(every):
        findings.append(f"{len(every) - len(set(every))} events share their seq with another")
    end = 0
    for point in sorted(by_point):
        if min(by_point[point]) <= end:
            findings.append(f"the snapshot at {point} has a seq below the one before it")
        end = max(by_point[point])
    if streamed and min(streamed) <= end:
        findings.append(f"the stream's seq {min(streamed)} is not above the snapshot's {end}")
    if streamed and max(streamed) - min(streamed) + 1 != len(streamed):
        findings.append("the stream's seqs have holes")


def _partitions(records: list[Record], findings: list[str]) -> None:
    """Compare offset order with seq order: a reader of one partition has only offsets."""
    newest: dict[tuple[str, bytes], int] = {}
    homes: dict[tuple[str, bytes], int] = {}
    for record in records:
        if record.key is None or record.value is None:
            continue
        key, seq = (record.topic, record.key), record.event["source"]["seq"]
        if homes.setdefault(key, record.partition) != record.partition:
            findings.append(f"a key of {record.topic} is in two partitions")
        if seq <= newest.get(key, 0):
            findings.append(f"{record.topic}: seq {seq} of a key after its seq {newest[key]}")
        newest[key] = seq
    del findings[40:]


class _Rows:
    """Every row's `n`, tracked by seq, across key changes.

    A log that is not `complete` starts with tables whose existing rows it does not have.
    """

    def __init__(self, *, complete: bool) -> None:
        self._complete = complete
        self._rows: dict[tuple[str, bytes], int] = {}
        self._deleted: set[tuple[str, bytes]] = set()
        self._moved: tuple[Any, int] | None = None
        self.read_again = 0
        self.wrong: list[str] = []

    def take(self, record: Record, event: dict[str, Any]) -> None:
        """Take the next event, by seq."""
        source, op = event["source"], event["op"]
        moved, self._moved = self._moved, None
        if op == "t":
            deleted = [key for key in self._rows if key[0] == record.topic]
            self._deleted.update(deleted)
            for each in deleted:
                del self._rows[each]
        if record.key is None:
            return
        key, place = (record.topic, record.key), (source["txId"], source["ordinal"])
        had = self._rows.pop(key, None)
        output = f"{record.topic} seq {source['seq']} op {op}"
        if op == "d":
            self._deleted.add(key)
            self._moved = None if had is None else (place, had)
            if had is None and self._complete:
                self.wrong.append(f"{output}: deletes what is not there")
            return
        n = self._rows[key] = int(event["after"]["n"])
        before = moved[1] if moved is not None and moved[0] == place else None
        self._judge(output, "i" if _initial(event) else op, n, had, before, key)
        self._deleted.discard(key)

    def _judge(
        self,
        output: str,
        op: str,
        n: int,
        had: int | None,
        moved: int | None,
        key: tuple[str, bytes],
    ) -> None:
        unknown = had is None and (self._complete or key in self._deleted)
        self.read_again += op == "r"
        if op == "c" and had is not None:
            self.wrong.append(f"{output}: creates what is there")
        elif op == "c" and moved is not None and n != moved + 1:
            self.wrong.append(f"{output}: version {n} after {moved}, under another key")
        elif op == "u" and (unknown or (had is not None and n != had + 1)):
            self.wrong.append(f"{output}: version {n} after {had}")
        elif op == "r" and (unknown or (had is not None and n != had)):
            self.wrong.append(f"{output}: read again with version {n}, where {had} was")
