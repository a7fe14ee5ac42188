"""Hold a log with a snapshot in it against the source: what must be true whatever was killed.

It knows docs/EVENTS.md and reads the topics as plainly as a consumer can; it shares nothing with
the code that copies. Beside the final state, which `converge` compares:

- no `seq` twice; of the stream none is missing; every generation's lie below the next one's, and
  all below the stream's;
- of a key, `seq` ascends in the order of its partition;
- the changes behind the consistent point are exactly those that Postgres tells, in order;
- a row's version `n` goes on from its snapshot row by one with every update: so a change that is
  both in the snapshot and in the stream shows, and so does one that is in neither.
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
    gone: int  # keys of an older generation that were deleted
    changes: int
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
        if event["source"]["snapshot"] == "true":
            by_point[LSN.parse(event["source"]["commit_lsn"])].append(event["source"]["seq"])
    streamed = [e["source"]["seq"] for _, e in events if e["source"]["snapshot"] == "false"]
    _seqs(by_point, streamed, findings)
    _partitions(records, findings)
    _versions([(r, e) for r, e in events if e["op"] != "m"], findings)
    of_snapshot = [e for _, e in events if e["source"]["snapshot"] == "true"]
    return Account(
        max(by_point, default=LSN(0)),
        len(by_point),
        sum(e["op"] == "r" for e in of_snapshot),
        sum(e["op"] == "d" for e in of_snapshot),
        len(streamed),
        findings,
    )


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
    """Hold order against order: a reader of one partition has nothing but offsets."""
    newest: dict[tuple[str, bytes], int] = {}
    homes: dict[tuple[str, bytes], int] = {}
    for record in records:
        if record.key is None or record.value is None:
            continue
        key, seq = (record.topic, record.key), record.event["source"]["seq"]
        if homes.setdefault(key, record.partition) != record.partition:
            findings.append(f"a key of {record.topic} is in two partitions")
        if seq <= newest.get(key, 0):
            findings.append(f"{record.topic}: seq {seq} of a key behind its seq {newest[key]}")
        newest[key] = seq
    del findings[40:]


def _versions(events: list[tuple[Record, dict[str, Any]]], findings: list[str]) -> None:
    """Follow each row's `n` by seq, through changed keys."""
    rows: dict[tuple[str, bytes], int] = {}
    moved: tuple[Any, int] | None = None
    wrong: list[str] = []
    for record, event in sorted(events, key=lambda each: each[1]["source"]["seq"]):
        source, op = event["source"], event["op"]
        place = (source["txId"], source["ordinal"])
        if op == "t":
            rows = {key: n for key, n in rows.items() if key[0] != record.topic}
        if record.key is None:
            continue
        key = (record.topic, record.key)
        had = rows.pop(key, None)
        said = f"{record.topic} seq {source['seq']} op {op}"
        if op == "d":
            moved = None if had is None else (place, had)
            if had is None:
                wrong.append(f"{said}: deletes what is not there")
            continue
        n = rows[key] = int(event["after"]["n"])
        of_key_change = moved is not None and moved[0] == place
        if op == "c" and had is not None:
            wrong.append(f"{said}: creates what is there")
        elif op == "c" and moved is not None and of_key_change and n != moved[1] + 1:
            wrong.append(f"{said}: version {n} after {moved[1]}, under another key")
        elif op == "u" and (had is None or n != had + 1):
            wrong.append(f"{said}: version {n} after {had}")
        moved = None
    findings += wrong[:_SHOWN]
    if len(wrong) > _SHOWN:
        findings.append(f"and {len(wrong) - _SHOWN} more changes that do not fit their rows")
