"""`cdc diff`: what differs between two states of a table, also where it is empty at one of them."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

from cdc.config import Config
from cdc.decode.messages import Truncate
from cdc.errors import ConfigError
from cdc.log import records
from cdc.snapshot.initial import topic
from cdc.snapshot.initial.records import SnapshotState
from lockstep.jobs.compacting import past, slices
from lockstep.jobs.compacting.differences import RowDifference, differences
from lockstep.jobs.compacting.older import OlderEvents
from lockstep.jobs.compacting.restoring import unreadable
from lockstep.jobs.compacting.running import Compaction
from lockstep.jobs.compacting.slices import PastTables
from lockstep.jobs.cuts import direct_tables
from tests.property.archived_world import ArchivedWorld, configured
from tests.property.followed_world import LINES, USERS, World
from tests.property.test_reduce import made

TABLE = ("public", "users")


class Emptied(World):
    """A world that only truncates its users once it `empties` them."""

    empties = False

    def _step(self) -> tuple[Any, bool]:
        if not self.empties:
            return super()._step()
        self.rows[USERS].clear()
        return Truncate((1,), cascade=False, restart_identity=False), False


def _found(config: Config, world: World, first: int, last: int) -> dict[bytes, RowDifference]:
    ends = world.frontiers[first].seq, world.frontiers[last].seq
    return {orjson.dumps(each.key): each for each in differences(config, TABLE, *ends)}


@pytest.mark.parametrize("slice_bytes", [1_000, 1 << 24])
def test_every_row_of_a_table_that_was_emptied_is_a_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_bytes: int
) -> None:
    """A base at the later frontier does not list the table, and has no rows to plan slices by."""
    monkeypatch.setattr(slices, "SLICE_BYTES", slice_bytes)
    monkeypatch.setattr(slices, "OWN_BYTES", slice_bytes // 2)
    world, config = Emptied(Random(2), 1 << 24), configured(tmp_path)
    world.snapshot().run(12)
    full = len(world.frontiers) - 1
    world.empties = True
    world.run(1)
    ArchivedWorld(config, world).archive_upto(len(world.frontiers))
    record, _ = Compaction(config, None).run()
    assert USERS not in {each.topic for each in record.tables}
    last = len(world.frontiers) - 1
    found = _found(config, world, full, last)
    assert {each.op for each in found.values()} == {"delete"}
    assert {key: each.before for key, each in found.items()} == world.states[full][USERS] != {}
    assert _found(config, world, last, last) == {}


def test_a_table_that_the_archive_does_not_have_is_refused(tmp_path: Path) -> None:
    world, config = made(Random(2), 2, 1 << 24, started=True), configured(tmp_path)
    ArchivedWorld(config, world).archive_upto(len(world.frontiers))
    first, last = world.frontiers[0].seq, world.frontiers[-1].seq
    with pytest.raises(ConfigError, match=r"no table public\.other"):
        list(differences(config, ("public", "other"), first, last))


def test_a_table_that_was_copied_directly_is_not_read_from_the_archive(tmp_path: Path) -> None:
    """Though the configuration no longer has `snapshot: direct`: the log's record shows it."""
    world, config = made(Random(2), 2, 1 << 24, started=True), configured(tmp_path)
    ArchivedWorld(config, world).archive_upto(len(world.frontiers))
    first, last = world.frontiers[0].seq, world.frontiers[-1].seq
    with pytest.raises(ConfigError, match="copied directly"):
        list(differences(config, TABLE, first, last, {USERS}))
    state = past.find(config)
    assert state is not None
    older = OlderEvents(PastTables(state.past))
    assert unreadable(config, older, frozenset({USERS}), ()) == []
    assert unreadable(config, older, frozenset({USERS}), {USERS}) == [
        "public.users was copied directly, not through the log"
    ]


def test_the_record_of_the_initial_snapshot_shows_what_was_copied_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path)
    for state, wanted in (
        (None, []),
        (SnapshotState(pipeline="shop", stage="done"), []),
        (SnapshotState(pipeline="shop", stage="done", direct=(USERS,)), ["public.users"]),
    ):
        text = state and records.encode(state)
        read = text and records.decode(SnapshotState, text, "shop.cdc.snapshot")
        monkeypatch.setattr(topic, "read_state", lambda _, read=read: read)
        known = direct_tables.recorded(config)
        assert direct_tables.direct(config, [USERS, LINES], known) == wanted
