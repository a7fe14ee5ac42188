"""A randomly changing database, the log that the real encoder makes of it, and its frontiers.

Two keyed tables (one whose long column is often not sent, one with a key of two columns and
complete old rows) and one without a key. Keys change, tables are truncated, events outgrow their
topic, some rows are repeated as in an incremental snapshot. The log may start with an initial
snapshot: two generations of it, parallel ranges, seqs with holes. Topics may be widened: from the
epoch that starts there on, a key's events are in another partition.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, NamedTuple

import orjson

from cdc.decode.messages import (
    UNCHANGED,
    Delete,
    Insert,
    KeyTuple,
    OldTuple,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    Truncate,
    Update,
)
from cdc.encode.partition import partition_of
from cdc.events import LSN, Frontier, PartitionEnd
from cdc.log import names
from cdc.log.records import SchemaRecord
from tests.property.stream import (
    EPOCH,
    PARTITIONS,
    PREFIX,
    TIME_US,
    Session,
    begin,
    commit,
    frame,
    position,
)

Row = dict[str, Any]
Place = tuple[str, int]
USERS, LINES, CLICKS = f"{PREFIX}.public.users", f"{PREFIX}.public.lines", f"{PREFIX}.public.clicks"
KEYS: Final = {USERS: ("id",), LINES: ("no", "id"), CLICKS: ()}
_IDS: Final = {USERS: 1, LINES: 2, CLICKS: 3}


def _relation(topic: str, identity: ReplicaIdentity, *columns: RelationColumn) -> Relation:
    return Relation(_IDS[topic], "public", topic.rsplit(".", 1)[1], identity, columns)


_TEXT: Final = (RelationColumn(False, "name", 25, -1), RelationColumn(False, "body", 25, -1))  # noqa: FBT003
RELATIONS: Final = {
    USERS: _relation(USERS, ReplicaIdentity.DEFAULT, RelationColumn(True, "id", 20, -1), *_TEXT),  # noqa: FBT003
    LINES: _relation(
        LINES,
        ReplicaIdentity.FULL,
        RelationColumn(True, "id", 20, -1),  # noqa: FBT003
        RelationColumn(True, "no", 23, -1),  # noqa: FBT003
        *_TEXT,
    ),
    CLICKS: _relation(CLICKS, ReplicaIdentity.FULL, RelationColumn(True, "id", 20, -1), *_TEXT),  # noqa: FBT003
}


class Record(NamedTuple):
    """A record as a reader receives it."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


@dataclass
class World:
    """`records` and `frontiers` are the log; `states` are the tables at each frontier."""

    chance: Random
    limit: int
    rows: dict[str, dict[bytes, Row]] = field(default_factory=lambda: {USERS: {}, LINES: {}})
    clicks: list[Row] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    frontiers: list[Frontier] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    versions: list[SchemaRecord] = field(default_factory=list)
    seq: int = 0
    holes: int = 0
    lsn: int = 0x1000
    epoch: int = EPOCH
    partitions: int = PARTITIONS
    _ends: dict[Place, int] = field(default_factory=dict)
    _counts: Counter[Place] = field(default_factory=Counter)
    _dead: bool = False
    _again: set[int] = field(default_factory=set)  # ordinals of the transaction, repeated as `r`

    def widen(self) -> World:
        """Give every topic more partitions, and start an epoch on them."""
        self.epoch, self.partitions = self.epoch + 1, self.partitions + self.chance.randint(1, 3)
        return self

    @property
    def time_us(self) -> int:
        """When the newest transaction committed: 10 ms after the one before."""
        return TIME_US + 100 * self.lsn

    def run(self, transactions: int, *, ends: bool = True) -> World:
        """Commit and publish transactions; unless it `ends`, the last have no frontier yet."""
        first = self.seq
        newest_id = max((each.schema_id for each in self.versions), default=0)
        resume = position(seq=self.seq, commit_lsn=self.lsn, end_lsn=self.lsn, schema_id=newest_id)
        session = Session(
            resume,
            {1: ("id",), 2: ("no", "id"), 3: ()},
            known=self.versions,
            limit=self.limit,
            epoch=self.epoch,
            partitions=self.partitions,
        )
        self.lsn += 100
        for xid in range(transactions):
            self.lsn += 100
            steps = [self._step() for _ in range(self.chance.randint(1, 8))]
            session.feed([begin(self.lsn, 700 + xid, self.time_us)])
            if xid == 0:
                session.feed([frame(relation) for relation in RELATIONS.values()])
            session.feed([frame(step, self.lsn - 10) for step, _ in steps])
            session.feed([commit(self.lsn, self.lsn + 8, self.time_us)])
            again = self._reported_again([reported for _, reported in steps])
            for each in session.waiting():
                self._publish(*each, again)
            if self.chance.random() < 0.4:
                self._cut()
        self.versions = [*self.versions, *session.new_versions]
        assert self.seq >= first
        if ends:
            self._cut()
        return self

    def snapshot(self, *, widened: bool = False) -> World:
        """Start the log with an initial snapshot: a generation that was lost, and another.

        `widened`: the topics got more partitions between the two.
        """
        old = [self._new(USERS) for _ in range(self.chance.randint(0, 8))]
        old_keys = {key_of(USERS, row): row for row in old}
        new = {k: row for k, row in old_keys.items() if self.chance.random() < 0.6}
        new |= {key_of(USERS, row): row for row in (self._new(USERS) for _ in range(4))}
        base = 0
        for rows in (old_keys, new):
            if widened and rows is new:
                self.widen()
            seqs = self.chance.sample(range(base + 1, base + 40), len(rows))
            base += 50
            ordered = list(zip(rows.items(), seqs, strict=True))
            for (key, row), seq in ordered:
                self._initial(key, seq, "r", None, row)
        for key in old_keys.keys() - new.keys():
            base += 1
            self._initial(key, base, "d", orjson.loads(key), None)
        self.rows[USERS] = dict(new)
        self.seq = base
        self.holes = base - sum(self._counts.values())
        self._cut()
        return self

    # -- what an application does ------------------------------------------------------------------

    def _new(self, topic: str) -> Row:
        ids: Row = {"id": self.chance.randrange(7)}
        if topic == LINES:
            ids["no"] = self.chance.randrange(3)
        return {**ids, "name": f"n{self.chance.randrange(1000)}", "body": self._body()}

    def _body(self) -> str:
        long = self.chance.random() < 0.15
        return f"b{self.chance.randrange(1000)}" + "x" * (3_000 if long else 0)

    def _step(self) -> tuple[Any, bool]:
        """Return a change as the walsender sends it; and whether it is a repeated row."""
        kind = self.chance.random()
        if kind < 0.03:
            topic = self.chance.choice([USERS, LINES, CLICKS])
            self.rows.get(topic, {}).clear()
            if topic == CLICKS:
                self.clicks.clear()
            return Truncate((_IDS[topic],), cascade=False, restart_identity=False), False
        if kind < 0.15:
            return self._click(), False
        return self._keyed(self.chance.choice([USERS, USERS, LINES]))

    def _click(self) -> Any:  # noqa: ANN401 - any row message
        kind = self.chance.choice("iiud") if self.clicks else "i"
        new = {"id": self.chance.randrange(3), "name": "c", "body": self._body()}
        if kind == "i":
            self.clicks.append(new)
            return Insert(3, _tuple(new))
        old = self.clicks.pop(self.chance.randrange(len(self.clicks)))
        if kind == "d":
            return Delete(3, OldTuple(_tuple(old)))
        self.clicks.append(new)
        return Update(3, OldTuple(_tuple(old)), _tuple(new))

    def _keyed(self, topic: str) -> tuple[Any, bool]:
        rows, number = self.rows[topic], _IDS[topic]
        new = self._new(topic)
        key = key_of(topic, new)
        old = rows.get(key)
        if old is None:
            if rows and self.chance.random() < 0.4:
                return self._moved(topic, self.chance.choice(sorted(rows)), new), False
            rows[key] = new
            return Insert(number, _tuple(new)), False
        if self.chance.random() < 0.3:
            del rows[key]
            return Delete(number, self._old(topic, old)), False
        complete = OldTuple(_tuple(old)) if topic == LINES else None
        if topic == USERS and self.chance.random() < 0.6:
            rows[key] = {**new, "body": old["body"]}
            return Update(number, None, _tuple(new, sent=False)), False
        rows[key] = new
        return Update(number, complete, _tuple(new)), topic == USERS and self.chance.random() < 0.2

    def _moved(self, topic: str, key: bytes, new: Row) -> Any:  # noqa: ANN401 - as above
        """Give a row another key; a long column may not be sent."""
        old = self.rows[topic].pop(key)
        sent = topic == LINES or self.chance.random() < 0.3
        moved = new if sent else {**new, "body": old["body"]}
        self.rows[topic][key_of(topic, moved)] = moved
        return Update(_IDS[topic], self._old(topic, old), _tuple(moved, sent=sent))

    @staticmethod
    def _old(topic: str, row: Row) -> KeyTuple | OldTuple:
        if topic == LINES:
            return OldTuple(_tuple(row))
        return KeyTuple((str(row["id"]).encode(), None, None))

    # -- the log -----------------------------------------------------------------------------------

    @staticmethod
    def _reported_again(reported: list[bool]) -> set[int]:
        return {ordinal for ordinal, again in enumerate(reported, 1) if again}

    def _publish(
        self, topic: str, number: int, key: bytes | None, value: bytes | None, again: set[int]
    ) -> None:
        place = topic, number
        if topic == names.dead_topic(PREFIX):
            self._dead = True
        elif value is not None:
            event = orjson.loads(value)
            self.seq = max(self.seq, event["source"]["seq"])
            self._counts[place] += 1
            if event["source"]["ordinal"] in again and "dead" not in event["source"]:
                event["op"], event["source"]["snapshot"] = "r", "true"
                value = orjson.dumps(event)
        self._append(place, key, value)

    def _append(self, place: Place, key: bytes | None, value: bytes | None) -> None:
        offset = self._ends.get(place, 0)
        self.records.append(Record(*place, offset, key, value))
        self._ends[place] = offset + 1

    def _initial(
        self, key: bytes, seq: int, op: str, before: Row | None, after: Row | None
    ) -> None:
        source: Row = {"schema": "public", "table": "users", "epoch": self.epoch, "seq": seq}
        source |= {"commit_lsn": str(LSN(self.lsn)), "ordinal": 0, "schema_id": 1}
        source |= {"snapshot": "true", "ts_us": 1}
        event = {"before": before, "after": after, "source": source, "op": op}
        place = (USERS, partition_of(key, self.partitions))
        self._append(place, key, orjson.dumps(event))
        self._counts[place] += 1
        if op == "d":
            self._append(place, key, None)

    def _cut(self) -> None:
        """End a Kafka transaction: its markers take an offset each; then a frontier."""
        places = set(self._counts) | ({(names.dead_topic(PREFIX), 0)} if self._dead else set())
        if not places:
            return
        for place in places:
            self._ends[place] += 1
        ends = tuple(
            PartitionEnd(*place, self._ends[place], self._counts[place]) for place in sorted(places)
        )
        self.frontiers.append(
            Frontier(self.epoch, LSN(self.lsn + 8), self.seq, self.time_us, ends, self.holes)
        )
        self.holes, self._dead = 0, False
        self._counts.clear()
        state: dict[str, Any] = {topic: dict(rows) for topic, rows in self.rows.items()}
        self.states.append({**state, CLICKS: list(self.clicks)})


def key_of(topic: str, row: Row) -> bytes:
    """Return a row's key as the log writes it."""
    return orjson.dumps({name: row[name] for name in KEYS[topic]})


def _tuple(row: Row, *, sent: bool = True) -> tuple[Any, ...]:
    """Return a row in its table's order; its long column may not be sent."""
    names_ = ["id", *(["no"] if "no" in row else []), "name", "body"]
    return tuple(
        UNCHANGED if name == "body" and not sent else str(row[name]).encode() for name in names_
    )
