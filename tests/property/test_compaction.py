"""A base at a frontier is the fold of all events up to it: for any history, cuts and bases.

The oracle is the world, which changes its tables itself and never reads the log.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.config import Config
from cdc.errors import ConfigError
from cdc.verify.events import canonical
from lockstep.jobs.compacting import layout, past, proving, runs, slices
from lockstep.jobs.compacting.older import OlderEvents
from lockstep.jobs.compacting.past import PastState, newest_rows
from lockstep.jobs.compacting.running import Compaction
from lockstep.jobs.compacting.slices import PastTables
from lockstep.jobs.cuts.in_order import in_order
from lockstep.jobs.cuts.reduce import Bounds, parsed
from lockstep.sinks.contract import Change
from lockstep.sinks.delta import lake
from tests.fixtures.seeds import examples
from tests.property.archived_world import ArchivedWorld, configured
from tests.property.followed_world import CLICKS, LINES, USERS
from tests.property.test_reduce import made


def rows_of(state: PastState) -> pa.Table:
    """Return the rows of a state, as its slices have them."""
    tables = PastTables(state.past)
    older = OlderEvents(tables)
    parts = [newest_rows(state.past, tables, older, each) for each in state.slices()]
    return pa.concat_tables([layout.SCHEMA.empty_table(), *parts])


def contents(state: PastState, rows: pa.Table) -> dict[str, Any]:
    """Return the tables that rows of a base hold: their events read as the contract says."""
    older = OlderEvents(PastTables(state.past))
    found: dict[str, Any] = {USERS: {}, LINES: {}}
    for row in rows.to_pylist():
        if row["topic"] == CLICKS or row["op"] == "d":
            continue
        event = parsed(row["value"])
        if event.source.dead is not None:
            event = older.letter(event)
        after = orjson.loads(bytes(event.after))
        fill = orjson.loads(row["fill"] or b"{}")
        assert fill.keys() <= set(event.source.unchanged)
        assert row["key"] not in found[row["topic"]], "a key is there once"
        found[row["topic"]][row["key"]] = after | fill
    clicks = [row for row in rows.to_pylist() if row["topic"] == CLICKS]
    events = [row["key"] for row in clicks], [row["value"] for row in clicks]
    bounds = Bounds(0, state.past.seq)
    found[CLICKS] = keyless(
        in_order([events], bounds, letter=older.event, rows=lambda *_: {}).changes
    )
    return found


def keyless(changes: Sequence[Change]) -> list[bytes]:
    found: list[bytes] = []
    for change in changes:
        if change.op in "ud":
            found.remove(canonical(orjson.loads(change.before or b"")))
        if change.row is not None:
            found.append(canonical(orjson.loads(change.row)))
    return sorted(found)


def expect(state: PastState, rows: pa.Table, wanted: dict[str, Any]) -> None:
    found = contents(state, rows)
    assert found[USERS] == wanted[USERS]
    assert found[LINES] == wanted[LINES]
    assert found[CLICKS] == sorted(map(canonical, wanted[CLICKS]))


@settings(max_examples=examples(25), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    transactions=st.integers(1, 14),
    started=st.booleans(),
    limit=st.sampled_from([2_000, 1 << 24]),
    widened=st.booleans(),
    slice_bytes=st.sampled_from([6_000, 1 << 24]),
    least_bytes=st.sampled_from([0, runs.LEAST_BYTES]),
    ratio=st.sampled_from([0, 1, runs.RATIO]),
    tombstone_hours=st.sampled_from([0.0, 0.00001, 168.0]),
)
def test_a_base_is_the_fold_of_all_events_up_to_its_frontier(
    *,
    seed: int,
    transactions: int,
    started: bool,
    limit: int,
    widened: bool,
    slice_bytes: int,
    least_bytes: int,
    ratio: int,
    tombstone_hours: float,
) -> None:
    """Made at once or in steps, of any cuts, slices and runs; so is any frontier since."""
    chance = Random(seed)
    world = made(chance, transactions, limit, started=started, widened=widened)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(slices, "SLICE_BYTES", slice_bytes)
        patched.setattr(slices, "OWN_BYTES", slice_bytes // 2)
        patched.setattr(runs, "LEAST_BYTES", least_bytes)
        patched.setattr(runs, "RATIO", ratio)  # with 0 no run is ever folded again
        path = Path(folder) / "archive"
        config = configured(path, bases_kept=3, tombstone_hours=tombstone_hours)
        archived = ArchivedWorld(config, world)
        last = len(world.frontiers)
        for upto in sorted({chance.randint(1, last) for _ in range(4)} | {last}):
            archived.archive_upto(upto)
            if chance.random() < 0.6 or upto == last:
                record, is_new = Compaction(config, None).run()
                assert is_new
                assert Compaction(config, None).run() == (record, False)
                assert record.seq == world.frontiers[upto - 1].seq
                assert record.applied.ends == archived.position.applied.ends
                expect_base(config, record, world.states[upto - 1])
        for _ in range(3):
            at = chance.randrange(last)
            state = past.find(config, world.frontiers[at].lsn)
            assert state is not None
            assert state.frontier.applied.seq == world.frontiers[at].seq
            expect(state, rows_of(state), world.states[at])


@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 2**32), transactions=st.integers(3, 14))
def test_a_base_of_cuts_that_were_archived_again_otherwise_is_not_continued(
    seed: int, transactions: int
) -> None:
    """The archive's log is restored to an older one, and other cuts get the numbers."""
    chance = Random(seed)
    world = made(chance, transactions, 1 << 24, started=True)
    last = len(world.frontiers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "archive"
        config = configured(path)
        archived = ArchivedWorld(config, world)
        shutil.copytree(path, Path(folder) / "older")
        at = chance.randint(1, last)
        for upto in sorted({chance.randint(1, at), at}):
            archived.archive_upto(upto)
        base, _ = Compaction(config, None).run()
        shutil.rmtree(path / "_delta_log")
        shutil.copytree(Path(folder) / "older" / "_delta_log", path / "_delta_log")
        archived = ArchivedWorld(config, world)
        for upto in sorted({chance.randint(1, last) for _ in range(3)} | {last}):
            archived.archive_upto(upto)
            state = past.find(config)
            assert state is not None
            assert state.frontier.applied.seq == world.frontiers[upto - 1].seq
            expect(state, rows_of(state), world.states[upto - 1])
            if world.frontiers[upto - 1].seq < base.seq:
                with pytest.raises(ConfigError, match=f"before base {base.number}"):
                    Compaction(config, None).run()
        record, _ = Compaction(config, None).run()
        assert record.seq == world.frontiers[last - 1].seq
        assert Compaction(config, None).run() == (record, False)
        expect_base(config, record, world.states[last - 1])


def expect_base(config: Config, record: layout.BaseRecord, wanted: dict[str, Any]) -> None:
    """Expect the newest base to hold these tables, and its proof, made without it, to close."""
    state = past.find(config)
    assert state is not None
    assert state.base == record
    base = PastTables(state.past).base
    assert base is not None
    rows = lake.read(base, layout.SCHEMA.names).cast(layout.SCHEMA)
    assert layout.total(layout.counted(rows)) == tuple(each for each in record.tables if each.rows)
    expect(state, rows_of(state), wanted)
    assert proving.prove(config, {}) == proving.BasesProof(
        min(record.number, 3), record.rows, record.number, record.lsn, ()
    )
