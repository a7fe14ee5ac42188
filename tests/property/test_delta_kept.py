"""Mirrors that keep what others drop: every version of a row, or deleted rows, flagged."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from cdc.errors import ConfigError
from lockstep.conformance.store import CLICKS, USERS, Row, applied, key, row
from lockstep.jobs.apply.buckets import files_to_end
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.sinks.contract import Change, Changes
from lockstep.sinks.delta import buckets, targets
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from tests.fixtures.seeds import examples, first_seed

LSN_OF_0 = 0x16E9000


def change(seq: int, value: Row | None, number: int, **more: Any) -> Change:  # noqa: ANN401
    """Return a change; two of them share a transaction."""
    reported = None if value is None else msgspec.json.encode(value)
    place = (USERS.schema_id, LSN_OF_0 + seq // 2, 1_700_000_000_000_000 + seq // 2)
    return Change(
        key(USERS, number), seq, reported, *place, op="d" if value is None else "u", **more
    )


def cut(sink: DeltaSink, seq: int, changes: list[Change], truncated: int | None = None) -> None:
    sink.begin(seq, [USERS])
    sink.write(Changes((USERS,), changes, truncated))
    sink.commit(applied(seq))


def by_tasks(sink: DeltaSink, seq: int, changes: list[Change], chance: Random) -> None:
    """Write and commit a cut as tasks do that have some keys each, and hold a few changes."""
    truncates = [each for each in changes if each.op == "t"]
    truncated = max((each.seq for each in truncates), default=None)
    sink.begin(seq, [USERS])
    target = sink.target([USERS], seq, truncated, truncates)
    if target is None:
        return  # it is there already
    tasks: list[list[Change]] = [[], []]
    for each in sorted(changes, key=lambda each: (each.key or b"", each.seq)):
        if each.key is not None:
            tasks[zlib.crc32(each.key) % 2].append(each)
    found = files_to_end(target)
    for task in tasks:
        size = chance.randint(1, 4)
        parts = [Changes((USERS,), task[at : at + size]) for at in range(0, len(task), size)]
        found += buckets.written(target, parts)
    found.sort(key=lambda piece: (piece.place, piece.path))
    marked = buckets.marked({target.place: target}, found)
    sink.stage(target, [json.loads(action) for _, action in marked])
    sink.commit(applied(seq))


def stored(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (
        read_as_of_arrow(str(path), ["public.users"]).tables["public.users"].to_pylist()
    )
    return rows


def as_of(rows: list[dict[str, Any]], lsn: int) -> dict[int, int]:
    """Return the seq of each row that was valid at an LSN, by id."""
    held = [
        each
        for each in rows
        if each["_commit_lsn"] <= lsn
        and (each["_valid_to_lsn"] is None or lsn < each["_valid_to_lsn"])
    ]
    found = {each["id"]: each["_seq"] for each in held}
    assert len(found) == len(held), "one version at a time"
    return found


@pytest.mark.parametrize("applier", ["delta-rs", "vectors", "tasks"])
@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + examples(6)))
def test_a_history_holds_every_state_that_the_table_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, applier: str
) -> None:
    """Also deletes, truncates and values that were not sent, however the changes are cut.

    And however they are divided among tasks, in turns with cuts that the driver writes.
    """
    chance = Random(seed)
    settings = DeltaSettings(
        "shop", "mirror", "shop", str(tmp_path), history=frozenset({"public.users"}),
        applier="vectors" if applier == "tasks" else applier,
    )  # fmt: skip
    for limit in ("HELD_BYTES", "KEYS_AT_ONCE", "ROWS_AT_ONCE"):
        monkeypatch.setattr(targets, limit, chance.choice([1, 2, 500]))
    sink = DeltaSink(settings)
    sink.open()
    now: dict[int, tuple[int, str]] = {}
    states: dict[int, dict[int, tuple[int, str]]] = {}
    seq = 2
    for _ in range(5):
        changes = []
        for _ in range(chance.randint(1, 8)):
            seq += 1
            number, what = chance.randint(1, 4), chance.random()
            if what < 0.1:
                now.clear()
                changes.append(change(seq, None, 0)._replace(key=None, op="t"))
            elif what < 0.3:
                now.pop(number, None)
                changes.append(change(seq, None, number))
            else:
                unchanged = ("body",) if number in now and what < 0.6 else ()
                body = now[number][1] if unchanged else f"body {seq}"
                reported = row(USERS, seq, number, body="?" if unchanged else body)
                now[number] = seq, body
                changes.append(change(seq, reported, number, unchanged=unchanged))
            states[LSN_OF_0 + seq // 2] = dict(now)
        truncates = [each.seq for each in changes if each.op == "t"]
        for _ in range(chance.randint(1, 2)):
            if applier == "tasks" and chance.random() < 0.7:
                by_tasks(sink, seq, changes, chance)
            else:
                cut(sink, seq, changes, max(truncates, default=None))
            rows = {at: msgspec.json.decode(text) for at, _, text in sink.contents(USERS)}
            assert {at: each["body"] for at, each in rows.items()} == {
                key(USERS, number): body for number, (_, body) in now.items()
            }
            if chance.random() < 0.3:
                sink.close()
                sink = DeltaSink(settings)
                sink.open()
    every = stored(tmp_path)
    for lsn, state in states.items():
        assert as_of(every, lsn) == {number: at for number, (at, _) in state.items()}
    current = {each["id"]: (each["_seq"], each["body"]) for each in every if each["_current"]}
    assert current == now
    assert all((each["_valid_to"] is None) == each["_current"] for each in every)
    contents = {at: seq for at, seq, _ in sink.contents(USERS)}
    assert contents == {key(USERS, number): at for number, (at, _) in now.items()}
    sink.close()


@pytest.mark.parametrize("applier", ["delta-rs", "vectors"])
def test_versions_of_rows_that_share_a_seq_are_ended_by_key(tmp_path: Path, applier: str) -> None:
    """As rows of a view and of a direct snapshot do."""
    settings = DeltaSettings(
        "shop", "mirror", "shop", str(tmp_path), history=frozenset({"public.users"}),
        applier=applier,
    )  # fmt: skip
    sink = DeltaSink(settings)
    sink.open()
    cut(sink, 2, [change(2, row(USERS, 2, number), number) for number in (1, 2, 3, 4)])
    cut(sink, 4, [change(4, row(USERS, 4, 1), 1), change(4, row(USERS, 4, 2), 2)])
    cut(sink, 6, [change(6, row(USERS, 6, 2), 2), change(6, None, 3)])
    found = sorted((each["id"], each["_seq"], each["_current"]) for each in stored(tmp_path))
    assert found == [
        *((1, 2, False), (1, 4, True)),
        *((2, 2, False), (2, 4, False), (2, 6, True)),
        (3, 2, False),
        (4, 2, True),
    ]
    sink.close()


def test_a_deleted_row_stays_marked_with_its_last_values(tmp_path: Path) -> None:
    """And is a normal row again when it is recreated."""
    settings = DeltaSettings("shop", "mirror", "shop", str(tmp_path), soft=True)
    sink = DeltaSink(settings)
    sink.open()
    cut(sink, 2, [change(1, row(USERS, 1, 1), 1), change(2, row(USERS, 2, 2), 2)])
    cut(sink, 4, [change(3, None, 1), change(4, None, 9)])
    found = {each["id"]: each for each in stored(tmp_path)}
    assert {number: (each["_deleted"], each["_seq"]) for number, each in found.items()} == {
        1: (True, 3),
        2: (False, 2),
    }
    assert found[1]["name"] == "n1"
    assert set(dict.fromkeys(at for at, _, _ in sink.contents(USERS))) == {key(USERS, 2)}
    cut(sink, 5, [change(5, row(USERS, 5, 1), 1)])
    found = {each["id"]: each for each in stored(tmp_path)}
    assert (found[1]["_deleted"], found[1]["name"]) == (False, "n5")
    sink.close()


def test_a_history_without_a_key_is_refused(tmp_path: Path) -> None:
    sink = DeltaSink(
        DeltaSettings("shop", "mirror", "shop", str(tmp_path), history=frozenset({"public.clicks"}))
    )
    sink.open()
    with pytest.raises(ConfigError, match=r"public\.clicks"):
        sink.begin(1, [CLICKS])
