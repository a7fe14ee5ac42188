"""What every sink guarantees, with any store."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest

from cdc.errors import ConfigError, OvertakenError, StoreLostError
from lockstep.conformance.store import (
    CLICKS,
    LINES,
    USERS,
    WIDER,
    Row,
    StoreUnderTest,
    applied,
    apply,
    change,
    key,
    row,
)
from lockstep.sinks.contract import Changes, Sink, StoreState, Version


@contextmanager
def opened(store: StoreUnderTest) -> Iterator[tuple[Sink, StoreState | None]]:
    """Open another sink on the store."""
    sink = store.sink()
    try:
        yield sink, sink.open()
    finally:
        sink.close()


def written(sink: Sink, seq: int, *tables: Changes) -> None:
    """Write a cut and die before its end."""
    sink.begin(seq, [version for changes in tables for version in changes.versions])
    for changes in tables:
        sink.write(changes)


def test_a_new_store_differs_from_one_at_a_frontier(store: StoreUnderTest) -> None:
    """And another process reads the complete frontier back."""
    with opened(store) as (sink, state):
        assert state is None
        assert apply(sink, 3, Changes((USERS,), [change(USERS, 3, row(USERS, 3, 1), 1)])) == 1
    with opened(store) as (_, state):
        assert state is not None
        assert state.applied == applied(3)
        assert state.applied.ends["shop.public.users"][2] == 9
        assert state.reached <= 3
    with opened(store) as (_, again):
        assert again == state


def test_rows_are_created_changed_and_deleted(sink: Sink, store: StoreUnderTest) -> None:
    """With keys of one and of several columns, nulls and any text; rows are readable by key."""
    odd = row(USERS, 2, 2, name='quote " back \\ nul\x01 é 😀', body=None, active=None, amount=None)
    line = row(LINES, 4, 7, 1)
    apply(
        sink,
        4,
        Changes(
            (USERS,),
            [
                change(USERS, 1, row(USERS, 1, 1), 1, op="c"),
                change(USERS, 2, odd, 2, op="c"),
                change(USERS, 3, None, 3),
            ],
        ),
        Changes((LINES,), [change(LINES, 4, line, 7, 1)]),
    )
    assert store.rows("public.users") == {key(USERS, 1): row(USERS, 1, 1), key(USERS, 2): odd}
    assert store.rows("public.lines") == {key(LINES, 7, 1): line}
    apply(
        sink,
        6,
        Changes((USERS,), [change(USERS, 5, row(USERS, 5, 2), 2), change(USERS, 6, None, 1)]),
    )
    assert store.rows("public.users") == {key(USERS, 2): row(USERS, 5, 2)}
    if sink.complete_rows:
        keys = [key(USERS, each) for each in (1, 2, 9)]
        assert set(sink.rows(USERS, keys)) == {key(USERS, 2)}


def test_a_column_that_is_not_sent_keeps_its_stored_value(
    sink: Sink, store: StoreUnderTest
) -> None:
    """In a sink that takes such rows; others get complete ones."""
    if sink.complete_rows:
        pytest.skip("the follower fills its rows")
    first, second = row(USERS, 1, 1, body="kept"), row(USERS, 2, 1, body="kept")
    apply(sink, 1, Changes((USERS,), [change(USERS, 1, first, 1)]))
    apply(sink, 2, Changes((USERS,), [change(USERS, 2, second, 1, unchanged=("body",))]))
    assert store.rows("public.users") == {key(USERS, 1): second}
    # A user's own text that equals the placeholder is a value.
    third = row(USERS, 3, 1, body="__debezium_unavailable_value")
    apply(sink, 3, Changes((USERS,), [change(USERS, 3, third, 1)]))
    assert store.rows("public.users") == {key(USERS, 1): third}


def test_a_repeated_or_late_change_has_no_effect(sink: Sink, store: StoreUnderTest) -> None:
    """An older row, an older delete and a row older than its delete do not count as applied."""
    newest = Changes((USERS,), [change(USERS, 5, row(USERS, 5, 1), 1), change(USERS, 6, None, 2)])
    assert apply(sink, 6, newest) >= 1
    late = [
        Changes((USERS,), [change(USERS, 5, row(USERS, 5, 1), 1)]),
        Changes((USERS,), [change(USERS, 2, row(USERS, 2, 1), 1)]),
        Changes((USERS,), [change(USERS, 3, None, 1)]),
        Changes((USERS,), [change(USERS, 4, row(USERS, 4, 2), 2)]),
        newest,
    ]
    for each in late:
        assert apply(sink, 6, each) == 0
        assert store.rows("public.users") == {key(USERS, 1): row(USERS, 5, 1)}


def test_a_truncate_deletes_only_rows_below_its_seq(sink: Sink, store: StoreUnderTest) -> None:
    """Only in its own table; what the same cut wrote after the truncate stays."""
    old = [change(USERS, seq, row(USERS, seq, seq), seq) for seq in (1, 2, 3)]
    lines = Changes((LINES,), [change(LINES, 4, row(LINES, 4, 1, 1), 1, 1)])
    apply(sink, 4, Changes((USERS,), old), lines)
    kept = row(USERS, 6, 2)
    truncated = Changes((USERS,), [change(USERS, 6, kept, 2)], truncated=5)
    for _ in range(2):
        apply(sink, 6, truncated)
        assert store.rows("public.users") == {key(USERS, 2): kept}
    apply(sink, 6, Changes((USERS,), [change(USERS, 3, row(USERS, 3, 3), 3)]))
    apply(sink, 6, Changes((USERS,), [], truncated=5))
    assert store.rows("public.users") == {key(USERS, 2): kept}
    assert store.rows("public.lines") == {key(LINES, 1, 1): row(LINES, 4, 1, 1)}
    new = row(USERS, 7, 4)
    for _ in range(2):
        apply(sink, 7, Changes((USERS,), [change(USERS, 7, new, 4)], truncated=7))
        assert store.rows("public.users") == {key(USERS, 4): new}
    apply(sink, 8, Changes((USERS,), [], truncated=8))
    assert store.rows("public.users") == {}


def test_a_cut_that_was_not_ended_is_known_and_can_be_written_again(
    store: StoreUnderTest,
) -> None:
    """A writer that died halfway leaves a record of how far its rows may reach."""
    with opened(store) as (sink, _):
        sink.begin(1, [USERS])
    with opened(store) as (sink, state):  # the very first cut
        assert state is not None
        assert (state.applied.seq, state.applied.place, state.reached) == (0, 0, 1)
        apply(sink, 1, Changes((USERS,), [change(USERS, 1, row(USERS, 1, 1), 1)]))
        cut = Changes(
            (USERS,), [change(USERS, each, row(USERS, each, each), each) for each in (2, 3)]
        )
        written(sink, 3, cut)
    with opened(store) as (sink, state):
        assert state is not None
        assert (state.applied.seq, state.reached) == (1, 3)
        sink.begin(2, [USERS])  # the recorded seq does not go back
    with opened(store) as (sink, state):
        assert state is not None
        assert state.reached == 3
        apply(sink, 3, cut)
    with opened(store) as (_, state):
        assert state is not None
        assert (state.applied, max(state.reached, 3)) == (applied(3), 3)
    assert set(store.rows("public.users")) == {key(USERS, each) for each in (1, 2, 3)}


def test_two_copies_repeat_each_other_and_the_frontier_never_goes_back(
    store: StoreUnderTest,
) -> None:
    """One is late with a cut that the other wrote long before."""
    cuts = [
        Changes((USERS,), [change(USERS, seq, row(USERS, seq, seq % 3), seq % 3)])
        for seq in range(1, 7)
    ]
    with opened(store) as (one, _), opened(store) as (other, _):
        for seq, cut in enumerate(cuts, 1):
            apply(one, seq, cut)
        for seq, cut in enumerate(cuts, 1):
            assert apply(other, seq, cut) == 0
    with opened(store) as (_, state):
        assert state is not None
        assert state.applied == applied(6)
    assert store.rows("public.users") == {
        key(USERS, n % 3): row(USERS, n, n % 3) for n in (4, 5, 6)
    }


def test_a_cut_above_a_frontier_is_refused_at_another(store: StoreUnderTest) -> None:
    """A difference between two frontiers does not apply to a store that is between them."""
    with opened(store) as (one, _), opened(store) as (other, _):
        one.begin(3, [USERS], above=0)
        other.begin(3, [USERS], above=0)  # the same, by another copy
        for reached in (2, 4):
            with pytest.raises(OvertakenError, match="another cut"):
                other.begin(reached, [USERS], above=0)
        one.write(Changes((USERS,), [change(USERS, 3, row(USERS, 3, 1), 1)]))
        one.commit(applied(3))
        with pytest.raises(OvertakenError, match="another cut"):
            other.begin(3, [USERS], above=0)
        one.begin(5, [USERS], above=3)
    with opened(store) as (other, state):
        assert state is not None
        assert (state.applied, state.reached) == (applied(3), 5)
        with pytest.raises(OvertakenError, match="another cut"):
            other.begin(6, [USERS], above=3)
        other.begin(5, [USERS], above=3)


def test_a_cut_that_is_no_difference_is_followed_by_no_difference(store: StoreUnderTest) -> None:
    """What was written before it is deleted by it only; a store without its rows may deny it."""
    with opened(store) as (one, _):
        one.begin(3, [USERS], above=0)
        one.commit(applied(3))
        one.begin(5, [USERS])
    with opened(store) as (other, state):
        assert state is not None
        assert state.replaces or not other.parallel
        if state.replaces:
            with pytest.raises(OvertakenError, match="another cut"):
                other.begin(5, [USERS], above=3)
        other.begin(6, [USERS])
        other.commit(applied(6))
    with opened(store) as (other, state):
        assert state is not None
        assert not state.replaces
        other.begin(7, [USERS], above=6)


def test_a_lost_store_raises_and_can_start_over(store: StoreUnderTest) -> None:
    """Both `open` and a running writer raise it; the copy that was replaced stays locked out."""
    with opened(store) as (old, _):
        apply(old, 2, Changes((USERS,), [change(USERS, 2, row(USERS, 2, 1), 1)]))
        store.lose()
        late = Changes((USERS,), [change(USERS, 3, row(USERS, 3, 2), 2)])
        with pytest.raises(StoreLostError):
            apply(old, 3, late)
        new = store.sink()
        try:
            assert new.open() is None
        except StoreLostError:
            new.start_over(2)
            assert new.open() is None
        with pytest.raises(StoreLostError):
            apply(old, 3, late)
        new.begin(1, [USERS])
        new.write(Changes((USERS,), [change(USERS, 1, row(USERS, 1, 1), 1)]))
        new.commit(applied(1, generation=2))
        new.close()
    assert store.rows("public.users") == {key(USERS, 1): row(USERS, 1, 1)}
    with opened(store) as (_, state):
        assert state is not None
        assert state.applied == applied(1, generation=2)


def test_a_tables_versions_are_followed(sink: Sink, store: StoreUnderTest) -> None:
    """Rows of an older and of a newer version, in one cut; then back to fewer columns."""
    apply(sink, 1, Changes((USERS,), [change(USERS, 1, row(USERS, 1, 1), 1)]))
    both = [change(USERS, 2, row(USERS, 2, 2), 2), change(WIDER, 3, row(WIDER, 3, 3), 3)]
    apply(sink, 3, Changes((USERS, WIDER), both))
    seen = store.rows("public.users")
    assert seen[key(USERS, 3)] == row(WIDER, 3, 3)
    for number in (1, 2):
        # A store with columns has a null there, one without has no value.
        found = seen[key(USERS, number)]
        assert {"age": None} | row(USERS, number, number) == {"age": None} | found
    narrower = USERS._replace(schema_id=5)
    apply(sink, 4, Changes((narrower,), [change(narrower, 4, row(narrower, 4, 3), 3)]))
    found = store.rows("public.users")[key(USERS, 3)]
    assert {"age": None} | found == {"age": None} | row(narrower, 4, 3)


def test_a_column_that_is_dropped_in_the_cut_that_brings_it(
    sink: Sink, store: StoreUnderTest
) -> None:
    """As for a follower that is new, or was stopped while a column was added and dropped."""
    narrower = USERS._replace(schema_id=5, columns=USERS.columns[:2])
    short = {"id": 2, "name": "n2"}
    rows = [change(WIDER, 1, row(WIDER, 1, 1), 1), change(narrower, 2, short, 2)]
    apply(sink, 2, Changes((WIDER, narrower), rows))
    seen = store.rows("public.users")
    assert seen[key(USERS, 1)] == row(WIDER, 1, 1)
    assert {k: v for k, v in seen[key(USERS, 2)].items() if v is not None} == short


def test_a_table_without_a_key_is_stored_or_refused(sink: Sink, store: StoreUnderTest) -> None:
    """Never in part: such rows differ only by their values, and may occur twice."""
    same = row(CLICKS, 1)
    cut = Changes(
        (CLICKS,),
        [
            change(CLICKS, 1, same, op="c"),
            change(CLICKS, 2, same, op="c"),
            change(CLICKS, 3, row(CLICKS, 3), op="c"),
            change(CLICKS, 4, None, before=same),
        ],
    )
    if not store.keyless:
        with pytest.raises(ConfigError, match=r"public\.clicks"):
            apply(sink, 4, cut)
        return
    for _ in range(2):
        apply(sink, 4, cut)
        assert sorted(each["id"] for each in store.rows("public.clicks").values()) == [1, 3]


def test_a_parallel_sink_writes_from_other_processes(store: StoreUnderTest) -> None:
    """It pickles, opened or not, and its copies need no `open`."""
    with opened(store) as (sink, _):
        if not sink.parallel:
            pytest.skip("its driver alone writes")
        changes = [change(USERS, seq, row(USERS, seq, seq), seq) for seq in range(1, 21)]
        sink.begin(20, [USERS])
        copy: Callable[[], Sink] = lambda: pickle.loads(pickle.dumps(sink))  # noqa: E731, S301
        for part in (0, 1):
            other = copy()
            assert other.write(Changes((USERS,), changes[part::2])) == 10
            other.close()
        sink.commit(applied(20))
    assert store.rows("public.users") == {key(USERS, n): row(USERS, n, n) for n in range(1, 21)}


def test_random_histories_end_as_the_model_whatever_is_repeated(store: StoreUnderTest) -> None:
    """Cuts are repeated, interrupted and written by new processes."""
    for seed in range(store.rounds):
        _play(store, Random(seed), 10_000 * seed)


def _play(store: StoreUnderTest, chance: Random, first: int) -> None:
    """Continue in the store with one random history, whose seqs start after `first`."""
    tables = {version.name: version for version in (USERS, LINES)}
    model = {name: store.rows(name) if first else {} for name in tables}
    seq, done = first, list[tuple[int, list[Changes]]]()
    sink = store.sink()
    sink.open()
    for _ in range(chance.randint(1, 4)):
        cut = []
        for version in chance.sample([USERS, LINES], chance.randint(1, 2)):
            many = chance.randint(1, 6)
            cut.append(
                _changes(
                    chance, version, seq, many, model[version.name], complete=sink.complete_rows
                )
            )
            seq += many + 1
        done.append((seq, cut))
        for again in (done[-1:] + chance.choices(done, k=chance.randint(0, 2)))[
            :: chance.choice((1, -1))
        ]:
            if chance.random() < 0.4:
                written(sink, again[0], *again[1][: chance.randint(0, 2)])
            if chance.random() < 0.3:
                sink.close()
                sink = store.sink()
                sink.open()
            apply(sink, again[0], *again[1])
        assert {name: store.rows(name) for name in tables} == model
    state = sink.open()
    assert state is not None
    assert state.applied == applied(seq)
    sink.close()


def _changes(
    chance: Random,
    version: Version,
    seq: int,
    many: int,
    model: dict[bytes, Row],
    *,
    complete: bool,
) -> Changes:
    """Return changes of distinct keys, and apply them to the model."""
    truncated = None
    if chance.random() < 0.1:
        seq += 1
        truncated = seq
        model.clear()
    keys = [(no, at) for no in range(3) for at in range(3)]
    changes = []
    for values in chance.sample(keys, many):
        seq += 1
        named = values[: len(version.key)] if len(version.key) > 1 else (values[0] * 3 + values[1],)
        at = key(version, *named)
        if chance.random() < 0.3:
            model.pop(at, None)
            changes.append(change(version, seq, None, *named))
            continue
        new, unchanged = row(version, seq, *named), tuple[str, ...]()
        if at in model and not complete and chance.random() < 0.4:
            unchanged = ("body",)
            new["body"] = model[at]["body"]
        model[at] = new
        changes.append(change(version, seq, new, *named, unchanged=unchanged))
    return Changes((version,), changes, truncated)
