"""However a table changes while it is read in chunks, the log ends equal to it, with TOAST."""

from __future__ import annotations

from random import Random

import orjson
from hypothesis import given
from hypothesis import strategies as st

from cdc.log import records
from cdc.log.completeness import Completeness
from cdc.snapshot.incremental import commands
from cdc.snapshot.incremental.records import CommandRecord, IncrementalRecord, TableName
from cdc.snapshot.incremental.topic import IncrementalLog
from cdc.snapshot.incremental.verifier import Verifier
from cdc.source import authority
from cdc.source.authority import Refusals, Scope
from tests.property.incremental_world import (
    KEYS,
    RELATION,
    SPAN,
    Database,
    Source,
    Worker,
    emit,
    folded,
    snapshots,
)
from tests.property.stream import MANY, PREFIX, TIME_US, Session, frame
from tests.property.test_sequencer_histories import Log
from tests.simulation.run import config

_SERVER = "7"
_CONFIG = config(100_000)
_STEPS = 120
_PATIENCE = 5_000


class Daemon:
    """The sequencer and the incremental snapshots, as the pipeline drives them, over a model."""

    def __init__(self, chance: Random, database: Database) -> None:
        self.chance, self.database = chance, database
        self.log = Log()
        self.snapshot_records: dict[bytes, bytes | None] = {}
        self.begin()

    def begin(self) -> None:
        """Start a session from what was committed."""
        self.session = Session(self.log.resume, KEYS, known=list(self.log.schemas), max_events=MANY)
        self.worker = Worker()
        verifier = Verifier(_CONFIG, _SERVER, Refusals(), dict)
        self.snapshots = snapshots(
            _CONFIG, self.worker, self.session.sequencer, verifier, lambda: Source(self.database)
        )
        known = [
            records.decode(IncrementalRecord, value, "")
            for key, value in self.snapshot_records.items()
            if value and b'"live"' in key
        ]
        obeyed = [
            records.decode(CommandRecord, value, "")
            for key, value in self.snapshot_records.items()
            if value and b'"command"' in key
        ]
        self.snapshots.adopt(IncrementalLog(known, obeyed, []), Completeness())
        self.reported = False
        self.at = next(
            (i for i, each in enumerate(self.database.wal) if each.lsn >= self.log.resume.end_lsn),
            len(self.database.wal),
        )
        self.frames: list[bytes] = []

    def read(self) -> None:
        """Take some frames of the stream, at any boundary."""
        if not self.frames and self.at < len(self.database.wal):
            self.frames = self.database.wal[self.at].frames
            self.at += 1
            if not self.reported or self.chance.random() < 0.1:
                self.frames.insert(1, frame(RELATION))
                self.reported = True
        count = self.chance.randint(1, len(self.frames)) if self.frames else 0
        self.session.feed(self.frames[:count])
        del self.frames[:count]

    def cut(self) -> None:
        if self.log.may_cut(self.session):
            self.log.commit(self.session)
            for _, key, value in self.snapshots.take():
                self.snapshot_records[key] = value

    @property
    def state(self) -> str:
        found = [
            records.decode(IncrementalRecord, value, "")
            for key, value in self.snapshot_records.items()
            if value and b'"live"' in key
        ]
        return found[0].state if found else "none"

    @property
    def caught_up(self) -> bool:
        return self.at == len(self.database.wal) and not self.frames

    def step(self, kinds: str) -> None:
        match self.chance.choice(kinds):
            case "w":
                self.database.write()
            case "h":
                self.database.release()
            case "r":
                self.read()
            case "t":
                self.snapshots.tick(self.log.resume.end_lsn)
            case "k":
                self.worker.run_one()
            case "c":
                self.cut()
            case "x":
                self.begin()


@given(st.integers(0, 2**32 - 1))
def test_the_log_ends_as_the_table(seed: int) -> None:
    chance = Random(seed)
    database = Database(chance)
    daemon = Daemon(chance, database)
    for _ in range(chance.randint(0, 20)):
        daemon.step("wrc")
    of, empty_first = TableName("public", "wide"), chance.random() < 0.3
    named = (
        None if empty_first or chance.random() < 0.5 else tuple((str(k),) for k in range(-2, SPAN))
    )
    start = commands.Command(
        do="start", id="one", tables=(of,), keys=named, empty_first=empty_first
    )
    secret = authority.secret_of(_CONFIG)
    assert secret is not None
    scope = Scope(PREFIX, _SERVER)
    body = commands.encode(start)
    signed = authority.sign(secret, authority.COMMAND_PURPOSE, scope, TIME_US, body)
    emit(database, commands.COMMAND, signed)
    deadly = "x" if chance.random() < 0.5 else ""
    for _ in range(_STEPS):
        daemon.step("wwrrrrrttkkch" + deadly)
    turns = 0
    while daemon.state != "done" or not daemon.caught_up or database.hung:
        daemon.step("rrrtkch")
        turns += 1
        assert turns < _PATIENCE, f"not over: {daemon.state}"
    daemon.cut()
    values = [each.value for each in daemon.log.records if each.value is not None]
    seqs = sorted(orjson.loads(value)["source"]["seq"] for value in values)
    assert seqs == list(range(1, len(seqs) + 1))
    assert folded(values) == database.rows
