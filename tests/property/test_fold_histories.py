"""The fold reproduces the result of a history, and finds every fault injected into its log.

A history is a random sequence of source transactions over a keyed table with unchanged columns, one
with a composite key and a keyless one. It is written as docs/EVENTS.md specifies, with frontier
records and the offsets that Kafka's control records take; then one fault is injected.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.events import LSN, Frontier, PartitionEnd
from cdc.verify.events import canonical
from cdc.verify.fold import Fold, Folded

Row = dict[str, Any]
PARTITIONS = 3
KEYS = {"users": ("id",), "follows": ("follower", "followee"), "clicks": ()}
PLACEHOLDER = "__debezium_unavailable_value"


@dataclass
class Rec:
    """A record as a reader receives it; mutable, so that a fault can be injected."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


@dataclass
class Log:
    """The log of a history, as the contract requires it, and the content of the tables."""

    chance: random.Random
    records: list[Rec] = field(default_factory=list)
    frontiers: list[Frontier] = field(default_factory=list)
    tables: dict[str, dict[bytes, Row]] = field(default_factory=dict)
    clicks: list[Row] = field(default_factory=list)
    seq: int = 0
    commit: int = 0x16E9000
    ordinal: int = 0
    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    counts: Counter[tuple[str, int]] = field(default_factory=Counter)

    def event(
        self,
        table: str,
        op: str,
        before: Row | None,
        after: Row | None,
        unchanged: tuple[str, ...] = (),
    ) -> None:
        self.seq += 1
        source: Row = {"schema": "public", "table": table, "seq": self.seq, "epoch": 1}
        source |= {"commit_lsn": str(LSN(self.commit)), "ordinal": self.ordinal, "schema_id": 1}
        if unchanged:
            source["unchanged"] = unchanged
            after = {k: PLACEHOLDER if k in unchanged else v for k, v in (after or {}).items()}
        key = key_of(table, after or before or {}) if op != "t" else None
        value = orjson.dumps({"before": before, "after": after, "source": source, "op": op})
        place = (f"shop.public.{table}", zlib.crc32(key) % PARTITIONS if key else 0)
        self.append(place, key, value)
        self.counts[place] += 1
        if op == "d" and key:
            self.append(place, key, None)

    def append(self, place: tuple[str, int], key: bytes | None, value: bytes | None) -> None:
        offset = self.ends.get(place, 0)
        self.records.append(Rec(*place, offset, key, value))
        self.ends[place] = offset + 1

    def cut(self, touched: Counter[tuple[str, int]]) -> None:
        """End a Kafka transaction: its control records take one offset each, then a frontier."""
        for place in touched:
            self.ends[place] += 1
        ends = tuple(PartitionEnd(*place, self.ends[place], n) for place, n in touched.items())
        self.frontiers.append(Frontier(1, LSN(self.commit + 48), self.seq, 0, ends))
        self.counts.clear()


def key_of(table: str, row: Row) -> bytes | None:
    return orjson.dumps({c: row[c] for c in KEYS[table]}) if KEYS[table] else None


def change(log: Log) -> None:
    """Make one random change to the tables and write it to the log."""
    log.ordinal += 1
    chance = log.chance
    table = chance.choice(("users", "users", "follows", "clicks"))
    if chance.random() < 0.03:
        log.tables[table] = {}
        if table == "clicks":
            log.clicks.clear()
        log.event(table, "t", None, None)
    elif table == "clicks":
        change_clicks(log)
    else:
        change_keyed(log, table, log.tables.setdefault(table, {}))


def change_clicks(log: Log) -> None:
    """Change the keyless table, whose old rows are complete."""
    new = {"url": f"/{log.chance.randrange(3)}", "ms": 1.5}
    what = log.chance.choice("ccud") if log.clicks else "c"
    if what == "c":
        log.event("clicks", "c", None, new)
    else:
        old = log.clicks.pop(log.chance.randrange(len(log.clicks)))
        log.event("clicks", what, old, new if what == "u" else None)
    if what != "d":
        log.clicks.append(new)


def change_keyed(log: Log, table: str, rows: dict[bytes, Row]) -> None:
    """Create, update, delete or re-key one row."""
    ids = {c: log.chance.randrange(6) for c in KEYS[table]}
    row = {**ids, "n": str(log.seq), "bio": f"long {log.seq}"}
    key = key_of(table, row)
    assert key is not None
    old = rows.get(key)
    if old is None:
        rows[key] = row
        log.event(table, "c", None, row)
        return
    what = log.chance.choice("udk")
    if what == "u":
        unchanged = ("bio",) if log.chance.random() < 0.5 else ()
        rows[key] = {**row, "bio": old["bio"]} if unchanged else row
        log.event(table, "u", None, row, unchanged)
        return
    del rows[key]
    log.event(table, "d", {c: old[c] for c in KEYS[table]}, None)
    moved = {**old, **dict.fromkeys(KEYS[table], log.chance.randrange(6, 12))}
    new_key = key_of(table, moved)
    if what == "k" and new_key is not None and new_key not in rows:
        # One ordinal for both events; the new row's long column was not sent.
        rows[new_key] = moved
        log.event(table, "c", None, moved, ("bio",))


def history(chance: random.Random, transactions: int) -> Log:
    """Return the log of `transactions` source transactions, cut at random between them."""
    log = Log(chance)
    for _ in range(transactions):
        log.commit += chance.randrange(48, 500)
        log.ordinal = 0
        for _ in range(chance.randrange(1, 5)):
            change(log)
        if chance.random() < 0.4:
            log.cut(Counter(log.counts))
    if log.counts:
        log.cut(Counter(log.counts))
    return log


def fold(log: Log) -> Folded:
    """Fold the log, its partitions interleaved at random."""
    state = Fold()
    waiting: dict[tuple[str, int], list[Rec]] = {}
    for record in log.records:
        waiting.setdefault((record.topic, record.partition), []).append(record)
    while waiting:
        place = log.chance.choice(sorted(waiting))
        for _ in range(log.chance.randrange(1, 8)):
            record = waiting[place].pop(0)
            state.add(*place, record.offset, record.key, record.value)
            if not waiting[place]:
                del waiting[place]
                break
    for frontier in log.frontiers:
        state.add_frontier(frontier)
    return state.finish()


def seed() -> st.SearchStrategy[random.Random]:
    return st.integers(0, 2**32).map(random.Random)


@settings(max_examples=60, deadline=None)
@given(seed(), st.integers(0, 60))
def test_a_history_folds_to_its_tables_without_findings(chance: random.Random, n: int) -> None:
    """For any interleaving of the partitions."""
    log = history(chance, n)
    folded = fold(log)
    assert folded.findings == ()
    assert folded.events == folded.seq == log.seq
    for table, rows in log.tables.items():
        if table != "clicks" and f"shop.public.{table}" in folded.tables:
            assert folded.tables[f"shop.public.{table}"].rows == rows
    if "shop.public.clicks" in folded.tables:
        expected = Counter(canonical(row) for row in log.clicks)
        assert folded.tables["shop.public.clicks"].keyless == expected


def drop(log: Log) -> None:
    log.records.remove(log.chance.choice([r for r in log.records if r.value is not None]))


def drop_tombstone(log: Log) -> None:
    log.records.remove(log.chance.choice([r for r in log.records if r.value is None]))


def duplicate(log: Log) -> None:
    """Write an event a second time at the end of its partition."""
    record = log.chance.choice([r for r in log.records if r.value is not None])
    place = (record.topic, record.partition)
    log.records.append(Rec(*place, log.ends[place], record.key, record.value))


def swap(log: Log) -> None:
    """Swap two events of one partition."""
    events = [r for r in log.records if r.value is not None]
    one = log.chance.choice(
        [
            r
            for r in events
            if sum((o.topic, o.partition) == (r.topic, r.partition) for o in events) > 1
        ]
    )
    same = [r for r in events if (r.topic, r.partition) == (one.topic, one.partition)]
    other = log.chance.choice([r for r in same if r is not one])
    one.key, other.key = other.key, one.key
    one.value, other.value = other.value, one.value


def stray(log: Log) -> None:
    """Send a later event of a key to another partition, as a changed partitioner would."""
    seen: set[tuple[str, bytes]] = set()
    later = []
    for record in log.records:
        if record.key is not None and record.value is not None:
            if (record.topic, record.key) in seen:
                later.append(record)
            seen.add((record.topic, record.key))
    record = log.chance.choice(later)
    record.partition = (record.partition + 1) % PARTITIONS
    log.records.remove(record)
    log.records.append(record)
    record.offset = 10**6


def tear(log: Log) -> None:
    """Cut inside a source transaction, with counts and offsets that agree with each other."""
    sources = {}
    for record in log.records:
        if record.value is not None:
            source = orjson.loads(record.value)["source"]
            sources[source["seq"]] = (source["commit_lsn"], record)
    torn = [
        index
        for index, frontier in enumerate(log.frontiers[:-1])
        if frontier.seq > 1 and sources[frontier.seq][0] == sources[frontier.seq - 1][0]
    ]
    index = log.chance.choice(torn)
    cut, after = log.frontiers[index : index + 2]
    record = sources[cut.seq][1]
    place = (record.topic, record.partition)
    ends = tuple(
        end._replace(offset=record.offset, events=end.events - 1) if end[:2] == place else end
        for end in cut.partitions
    )
    log.frontiers[index] = cut._replace(partitions=ends, seq=cut.seq - 1)
    lagging = {end[:2]: end for end in after.partitions}
    end = lagging.get(place, PartitionEnd(*place, record.offset + 2, 0))
    lagging[place] = end._replace(events=end.events + 1)
    log.frontiers[index + 1] = after._replace(partitions=tuple(lagging.values()))


def miscount(log: Log) -> None:
    index = log.chance.randrange(len(log.frontiers))
    frontier = log.frontiers[index]
    first = frontier.partitions[0]
    ends = (first._replace(events=first.events + 1), *frontier.partitions[1:])
    log.frontiers[index] = frontier._replace(partitions=ends)


def lose_last_frontier(log: Log) -> None:
    log.frontiers.pop()


def claim_too_much(log: Log) -> None:
    """Set a frontier's LSN above a commit whose events are in a later cut."""
    frontier = log.frontiers[0]
    log.frontiers[0] = frontier._replace(lsn=LSN(log.commit + 1))


def lose_transaction(log: Log) -> None:
    """Lose a complete source transaction."""
    lost = log.chance.choice(log.records)
    while lost.value is None:
        lost = log.chance.choice(log.records)
    assert lost.value is not None
    commit = orjson.loads(lost.value)["source"]["commit_lsn"]
    log.records = [
        r
        for r in log.records
        if r.value is None or orjson.loads(r.value)["source"]["commit_lsn"] != commit
    ]


FAULTS: list[Callable[[Log], None]] = [
    drop,
    drop_tombstone,
    duplicate,
    swap,
    stray,
    tear,
    miscount,
    lose_last_frontier,
    claim_too_much,
    lose_transaction,
]


@pytest.mark.parametrize("fault", FAULTS, ids=[f.__name__ for f in FAULTS])
@settings(max_examples=30, deadline=None)
@given(chance=seed())
def test_every_fault_is_found(fault: Callable[[Log], None], chance: random.Random) -> None:
    """And reported without any row's values."""
    log = history(chance, 60)
    fault(log)
    findings = fold(log).findings
    assert findings
    assert not any("long " in sentence for sentence in findings)
