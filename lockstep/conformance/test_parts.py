"""A cut that is written in parts has the same result as one written at once."""

from __future__ import annotations

import msgspec

from lockstep.conformance.store import (
    CLICKS,
    USERS,
    StoreUnderTest,
    applied,
    apply,
    change,
    key,
    row,
)
from lockstep.sinks.contract import Change, Changes, Sink


def partial(sink: Sink, seq: int, number: int) -> Change:
    """Return an update without a value for `body`; complete if the sink needs that."""
    at, update = key(USERS, number), row(USERS, seq, number, body=None)
    if not sink.complete_rows:
        return change(USERS, seq, update, number, unchanged=("body",))
    stored = msgspec.json.decode(sink.rows(USERS, [at])[at])
    return change(USERS, seq, update | {"body": stored["body"]}, number)


def test_a_key_in_two_writes_of_one_cut(sink: Sink, store: StoreUnderTest) -> None:
    """A large cut is written in pieces: a later one applies to the result of earlier ones."""

    def users(seq: int, *numbers: int) -> Changes:
        return Changes((USERS,), [change(USERS, seq + n, row(USERS, seq + n, n), n)
                                  for n in numbers])  # fmt: skip

    apply(sink, 3, users(0, 1, 2, 3))
    sink.begin(20, [USERS])
    sink.write(users(4, 1, 4, 5))
    # A value that this cut contains, and one that only the store has.
    sink.write(Changes((USERS,), [partial(sink, 11, 1), partial(sink, 12, 2)]))
    deletes = [change(USERS, 15, None, 5), change(USERS, 16, None, 3)]
    sink.write(Changes((USERS,), [*users(10, 4).changes, partial(sink, 17, 1), *deletes]))
    seen = sink.rows(USERS, [key(USERS, n) for n in range(1, 6)])
    sink.commit(applied(20))
    wanted = {
        key(USERS, 1): row(USERS, 17, 1, body="long 5"),
        key(USERS, 2): row(USERS, 12, 2, body="long 2"),
        key(USERS, 4): row(USERS, 14, 4),
    }
    assert store.rows("public.users") == wanted
    assert {at: msgspec.json.decode(each) for at, each in seen.items()} == wanted
    sink.begin(40, [USERS])
    sink.write(users(20, 1, 2, 6))
    sink.write(users(30, 7)._replace(truncated=30))
    sink.write(Changes((USERS,), [partial(sink, 38, 7), *users(30, 2).changes]))
    assert sink.rows(USERS, [key(USERS, 1), key(USERS, 4)]) == {}
    sink.commit(applied(40))
    assert store.rows("public.users") == {
        key(USERS, 2): row(USERS, 32, 2),
        key(USERS, 7): row(USERS, 38, 7, body="long 37"),
    }
    if not store.keyless:
        return
    clicks = {n: row(CLICKS, n) for n in range(50, 60)}
    new = [change(CLICKS, n, clicks[n], op="c") for n in range(50, 60)]
    sink.begin(60, [CLICKS])
    sink.write(Changes((CLICKS,), new[:2]))
    sink.write(Changes((CLICKS,), [new[2], change(CLICKS, 53, None, before=clicks[50])]))
    sink.write(Changes((CLICKS,), new[5:7], truncated=54))
    sink.write(Changes((CLICKS,), [new[7], change(CLICKS, 58, None, before=clicks[55]), new[9]]))
    sink.commit(applied(60))
    assert sorted(each["id"] for each in store.rows("public.clicks").values()) == [56, 57, 59]
