"""The OpenSearch sink against a real server: what the contract's suite does not cover."""

from __future__ import annotations

import pickle
from random import Random
from typing import Any

import msgspec
import pytest

from cdc.errors import (
    CDCError,
    ConfigError,
    PermissionDeniedError,
    StoreLostError,
    SwitchedError,
    UnavailableError,
)
from lockstep.conformance.store import USERS, VALUES, applied, apply, change, key, row
from lockstep.sinks.contract import Change, Changes, Column, Version
from lockstep.sinks.opensearch import bulk as opensearch_bulk
from lockstep.sinks.opensearch import sink as opensearch
from lockstep.sinks.opensearch.sink import OpenSearchSink
from tests.fixtures.busy_opensearch import BusyOpenSearch
from tests.fixtures.store_opensearch import OpenSearchStore

# A field that accepts only booleans: the source has text there.
FLAGGED = {"public.users": {"name": {"type": "boolean"}}}


def users(*changes: Change, truncated: int | None = None) -> Changes:
    return Changes((USERS,), changes, truncated)


def user(seq: int, number: int, **values: object) -> Change:
    return change(USERS, seq, row(USERS, seq, number, **values), number)


def retyped(kind: str, schema_id: int = 9) -> Version:
    """Return the table after ALTER TABLE users ALTER name TYPE."""
    columns = [c._replace(type=kind) if c.name == "name" else c for c in USERS.columns]
    return USERS._replace(schema_id=schema_id, columns=tuple(columns))


@pytest.fixture
def sink(opensearch_store: OpenSearchStore) -> Any:  # noqa: ANN401 - a generator of a sink
    made = opensearch_store.sink()
    made.open()
    yield made
    made.close()


# --- any order ---


@pytest.mark.long("more orders", sample=["0", "1"])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_and_any_repetition_end_as_the_newest(
    opensearch_store: OpenSearchStore, seed: int
) -> None:
    """Refused documents too: a dead letter exists if and only if the newest version is refused."""
    chance = Random(seed)
    changes = []
    for seq in range(1, 61):
        number = chance.randrange(12)
        if chance.random() < 0.25:
            changes.append(change(USERS, seq, None, number))
        else:
            name = chance.choice(("true", "false", "maybe"))
            changes.append(user(seq, number, name=name))
    newest = {each.key: each for each in changes}
    sinks = [opensearch_store.sink(mappings=FLAGGED) for _ in range(2)]
    for each in sinks:
        each.open()
        each.begin(60, [USERS])
    played = changes + chance.choices(changes, k=40)
    chance.shuffle(played)
    while played:
        some = {each.key: each for each in played[: chance.randint(1, 9)]}
        played = played[len(some) :] if len(some) > 1 else played[1:]
        chance.choice(sinks).write(users(*some.values()))
    for each in sinks:
        each.write(users(*newest.values()))  # a sink does not know the other's letters
        each.commit(applied(60))
    wanted = {k: msgspec.json.decode(c.row) for k, c in newest.items() if k and c.row}
    passing = {k: r for k, r in wanted.items() if r["name"] != "maybe"}
    assert opensearch_store.rows("public.users") == passing
    refused = {str(r["id"]): r for r in wanted.values() if r["name"] == "maybe"}
    letters = opensearch_store.letters()
    assert {k: msgspec.json.decode(each["document"]) for k, each in letters.items()} == refused
    fresh = opensearch_store.sink(mappings=FLAGGED)
    fresh.open()
    stored = {k: msgspec.json.decode(r) for k, _, r in fresh.contents(USERS)}
    assert stored == wanted
    read = fresh.rows(USERS, [key(USERS, n) for n in range(12)])
    assert {k: msgspec.json.decode(r) for k, r in read.items()} == wanted
    for each in (*sinks, fresh):
        each.close()


# --- busy, full, closed ---


def test_only_refused_items_are_sent_again(
    opensearch_store: OpenSearchStore,
    busy_opensearch: BusyOpenSearch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 429 and 503 for items and for complete requests, and 413 for what is too large."""
    monkeypatch.setattr(opensearch_bulk, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(opensearch_bulk, "PATIENCE_SECONDS", 300.0)
    sink = opensearch_store.sink(url=busy_opensearch.url, mappings=FLAGGED)
    sink.open()
    busy_opensearch.refused_requests = [429, 503, 429]
    busy_opensearch.item_chance = 0.2
    many = [user(n, n, name="maybe" if n % 50 == 0 else "true") for n in range(1, 301)]
    assert apply(sink, 300, users(*many)) == 300
    assert busy_opensearch.items_refused > 50
    # Each item passed once; the six that were refused for good also as letter and as deletion.
    assert busy_opensearch.items_passed == 300 + 6 + 6
    busy_opensearch.item_chance, busy_opensearch.largest = 0.0, 4_000
    body = "x" * 10_000
    largest = [user(n, n, name="true", body=body if n == 450 else "") for n in range(301, 501)]
    assert apply(sink, 500, users(*largest)) == 200
    assert len(opensearch_store.rows("public.users")) == 500 - 6 - 1
    letter = opensearch_store.letters()["450"]
    assert (letter["seq"], letter["document"], letter["error"]) == (450, None, "content_too_long")
    assert letter["bytes"] > 10_000
    sink.close()


def test_items_that_are_always_refused_are_an_error(
    opensearch_store: OpenSearchStore,
    busy_opensearch: BusyOpenSearch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opensearch_bulk, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(opensearch_bulk, "PATIENCE_SECONDS", 0.1)
    sink = opensearch_store.sink(url=busy_opensearch.url)
    sink.open()
    apply(sink, 1, users(user(1, 1)))

    def refused(seq: int, kind: type[CDCError], what: str) -> None:
        with pytest.raises(kind, match=what) as caught:
            apply(sink, seq, users(user(seq, 1, name="secret")))
        assert "secret" not in str(caught.value)

    busy_opensearch.item_chance = 1.0
    refused(2, UnavailableError, "429|503")
    busy_opensearch.item_chance = 0.0
    (index,) = opensearch_store.call("GET", f"/{opensearch_store.prefix}-public.users/_alias")[1]
    for setting, hint in (("read_only_allow_delete", "disk"), ("write", "remove index.blocks")):
        opensearch_store.call("PUT", f"/{index}/_settings", {f"index.blocks.{setting}": True})
        refused(2, UnavailableError, hint)
        opensearch_store.call("PUT", f"/{index}/_settings", {f"index.blocks.{setting}": None})
    busy_opensearch.denied = True
    refused(2, PermissionDeniedError, "rights")
    busy_opensearch.denied = False
    broken = opensearch_store.sink(mappings={"public.odd": {"x": {"type": "no_such_type"}}})
    with pytest.raises(ConfigError, match="no_such_type"):
        broken.begin(2, [USERS._replace(table="odd", schema_id=8)])
    broken.close()
    busy_opensearch.close()
    refused(2, UnavailableError, "can't be reached")
    sink.close()
    host = busy_opensearch.url.removeprefix("http://")
    with pytest.raises(ConfigError, match="%2F") as odd:
        opensearch_store.sink(url=f"http://u:se/cret@{host}")
    assert "se/cret" not in f"{odd.value} {odd.value.hint}"
    sink = opensearch_store.sink(url=f"http://u:s%40cret@{host}")
    with pytest.raises(UnavailableError, match=f" http://{host} can't be reached") as caught:
        sink.open()
    assert "s%40cret" not in f"{caught.value} {caught.value.hint}"
    sink.close()


def test_documents_of_a_missing_shard_do_not_count_as_missing(
    opensearch_store: OpenSearchStore, busy_opensearch: BusyOpenSearch
) -> None:
    """OpenSearch answers 200, with errors for some documents, or with fewer of them."""
    sink = opensearch_store.sink(url=busy_opensearch.url, mappings=FLAGGED)
    sink.open()
    apply(sink, 2, users(user(1, 1, name="true"), user(2, 2, name="maybe")))
    both = [key(USERS, n) for n in (1, 2, 3)]
    busy_opensearch.recovering = True
    for read in (
        lambda: sink.rows(USERS, both[:1]),
        lambda: sink.rows(USERS, both[1:]),
        lambda: list(sink.contents(USERS)),
    ):
        with pytest.raises(UnavailableError):
            read()
    late = opensearch_store.sink(url=busy_opensearch.url, mappings=FLAGGED)
    late.open()
    with pytest.raises(UnavailableError, match="shards"):  # of the letters
        late.begin(3, [USERS])
    busy_opensearch.recovering = False
    assert sink.rows(USERS, both).keys() == set(both[:2])
    # A deleted index of letters is created again.
    opensearch_store.delete(f"{opensearch_store.prefix}-dead")
    newer = users(user(3, 2, name="false"))
    with pytest.raises(SwitchedError):
        apply(sink, 3, newer)
    sink.open()
    assert apply(sink, 3, newer) == 0
    assert set(opensearch_store.rows("public.users")) == set(both[:2])
    late.close()
    sink.close()


def test_too_many_shards_need_a_person(opensearch_store: OpenSearchStore) -> None:
    """Reported in OpenSearch's own words, with the setting to raise."""
    # An index may have 1,024; the node that tests share, 1,000 of all indices.
    sink = opensearch_store.sink(settings={"number_of_shards": 1_024})
    sink.open()
    with pytest.raises(ConfigError, match=r"cluster\.max_shards_per_node"):
        sink.begin(1, [USERS])
    sink.close()


# --- deleted indices ---


def test_an_index_that_was_made_by_somebody_else_is_not_ours(
    opensearch_store: OpenSearchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted and recreated under the same name, with all its aliases; then only the record."""
    monkeypatch.setattr(opensearch, "CHECK_SECONDS", 0.0)
    sink = opensearch_store.sink()
    sink.open()
    apply(sink, 1, users(user(1, 1)))
    _, found = opensearch_store.call("GET", f"/{opensearch_store.prefix}-public.users/_alias")
    ((index, output),) = found.items()
    opensearch_store.call("DELETE", f"/{index}")
    opensearch_store.call("PUT", f"/{index}", output)
    with pytest.raises(StoreLostError, match=index):
        apply(sink, 2, users(user(2, 2)))
    with pytest.raises(StoreLostError, match=index):
        opensearch_store.sink().open()
    sink.start_over(2)
    assert sink.open() is None
    apply(sink, 2, users(user(1, 1), user(2, 2)))
    assert len(opensearch_store.rows("public.users")) == 2
    opensearch_store.delete(f"{opensearch_store.prefix}-followers")
    with pytest.raises(StoreLostError):
        apply(sink, 3, users(user(3, 3)))
    with pytest.raises(StoreLostError, match="no record"):
        opensearch_store.sink().open()
    sink.close()


def test_aliases_that_somebody_changed_are_set_back(
    opensearch_store: OpenSearchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers would get a stranger's documents, or none."""
    monkeypatch.setattr(opensearch, "CHECK_SECONDS", 0.0)
    alias = f"{opensearch_store.prefix}-public.users"
    sink = opensearch_store.sink()
    sink.open()
    apply(sink, 1, users(user(1, 1)))
    _, found = opensearch_store.call("GET", f"/{alias}/_alias")
    (ours,) = found
    stranger = f"{opensearch_store.prefix}-stranger"
    assert opensearch_store.call("PUT", f"/{stranger}")[0] == 200
    for seq, kind, other in ((2, "add", stranger), (4, "remove", ours)):
        actions = {"actions": [{kind: {"index": other, "alias": alias}}]}
        for reopens in (False, True):
            assert opensearch_store.call("POST", "/_aliases", actions)[0] == 200
            if reopens:
                sink.open()
            apply(sink, seq + reopens, users(user(seq + reopens, 2)))
            _, held = opensearch_store.call("GET", f"/_alias/{alias}")
            assert list(held) == [ours]
    assert set(opensearch_store.hits("public.users")) == {"1", "2"}
    sink.close()


# --- mappings that change ---


def test_a_changed_type_gets_a_new_index_and_readers_move_at_the_commit(
    opensearch_store: OpenSearchStore, sink: OpenSearchSink
) -> None:
    store = opensearch_store

    def lagging() -> list[str]:
        return list(store.call("GET", f"/{store.prefix}-public.users/_alias")[1])

    apply(sink, 3, users(user(1, 1, name="5"), user(2, 2, name="x"), user(3, 3)))
    (first,) = lagging()
    wider = USERS._replace(
        schema_id=4, columns=(*USERS.columns, Column("age", "int4", 23, -1, nullable=True))
    )
    sink.begin(3, [wider])
    assert lagging() == [first]
    numbers = retyped("int4")
    sink.begin(5, [numbers])
    sink.write(Changes((numbers,), [change(numbers, 5, row(numbers, 5, 3, name=7), 3)]))
    assert lagging() == [first]
    assert store.rows("public.users")[key(USERS, 3)]["name"] == "n3"
    sink.commit(applied(5))
    (second,) = lagging()
    assert second != first
    assert store.call("GET", f"/{first}")[0] == 404
    hits = store.hits("public.users")
    assert {k: hit["_version"] for k, hit in hits.items()} == {"1": 1, "2": 2, "3": 5}
    assert set(store.hits("public.users", {"range": {"name": {"gte": 5}}})) == {"1", "3"}
    # Copied with their versions: a change that was late before is still late.
    assert apply(sink, 5, users(user(2, 2), user(1, 1))) == 0


def test_refused_documents_are_dead_letters_until_the_fields_accept_them(
    opensearch_store: OpenSearchStore,
) -> None:
    store = opensearch_store
    sink = store.sink()
    sink.open()
    many = [user(n, n, name="true" if n % 3 else f"n{n}") for n in range(1, 61)]
    apply(sink, 60, users(*many))
    sink.close()
    strict = store.sink(mappings=FLAGGED)
    strict.open()
    apply(strict, 61, users(user(61, 1, name="false")))
    assert set(store.letters()) == {str(n) for n in range(3, 61, 3)}
    assert len(store.rows("public.users")) == 40
    apply(strict, 63, users(user(62, 3, name="true"), change(USERS, 63, None, 6)))
    assert set(store.letters()) == {str(n) for n in range(9, 61, 3)}
    strict.close()
    again = store.sink()
    again.open()
    apply(again, 64, users(user(64, 1)))
    assert store.letters() == {}
    assert len(store.rows("public.users")) == 59
    assert store.rows("public.users")[key(USERS, 9)] == row(USERS, 9, 9)
    again.close()


def test_a_repeated_cut_keeps_the_dead_letter_of_a_document_that_only_lucene_refuses(
    opensearch_store: OpenSearchStore,
) -> None:
    """A keyword of more than 32,766 bytes: versions are compared before it is refused."""
    store = opensearch_store
    sink = store.sink()
    sink.open()
    apply(sink, 1, users(user(1, 1, body="x" * 40_000)))
    sink.close()
    strict = store.sink(mappings={"public.users": {"body": {"type": "keyword"}}})
    strict.open()
    cut = users(user(2, 2, body="y" * 40_000), user(3, 3))
    for _ in range(3):
        apply(strict, 3, cut)
        assert set(store.letters()) == {"1", "2"}
    assert len(strict.rows(USERS, [key(USERS, n) for n in (1, 2, 3)])) == 3
    assert store.rows("public.users").keys() == {key(USERS, 3)}
    apply(strict, 5, users(user(4, 1), user(5, 2)))
    assert store.letters() == {}
    assert store.rows("public.users").keys() == {key(USERS, n) for n in (1, 2, 3)}
    strict.close()


def test_a_dead_letter_is_known_whose_number_could_not_be_recorded(
    opensearch_store: OpenSearchStore, busy_opensearch: BusyOpenSearch
) -> None:
    """The sink stores it, can't write its record, and writes the cut again."""
    sink = opensearch_store.sink(url=busy_opensearch.url, mappings=FLAGGED)
    sink.open()
    apply(sink, 1, users(user(1, 1, name="true")))
    stored = list[str]()

    def record_is_not_written(method: str, path: str) -> None:
        if "-dead" in path and "/_bulk" in path:
            stored.append(path)
        elif stored and method == "PUT":
            raise ConnectionResetError(path)

    busy_opensearch.before = record_is_not_written
    with pytest.raises(CDCError):
        apply(sink, 2, users(user(2, 2)))
    busy_opensearch.before = lambda _method, _path: None
    assert set(opensearch_store.letters()) == {"2"}
    sink.open()
    apply(sink, 2, users(user(2, 2)))
    read = sink.rows(USERS, [key(USERS, 2)])
    assert {k: msgspec.json.decode(r) for k, r in read.items()} == {key(USERS, 2): row(USERS, 2, 2)}
    apply(sink, 3, users(user(3, 2, name="false")))
    assert opensearch_store.letters() == {}
    sink.close()


def test_what_executors_wrote_into_an_index_that_another_copy_replaces_is_not_committed(
    opensearch_store: OpenSearchStore, sink: OpenSearchSink
) -> None:
    """The driver of a large cut writes nothing itself."""
    apply(sink, 1, users(user(1, 1, name="1")))
    sink.begin(5, [USERS])
    other = opensearch_store.sink()
    other.open()
    numbers = retyped("int4")
    other.begin(9, [numbers])
    executor = pickle.loads(pickle.dumps(sink))  # noqa: S301 - as Spark sends it
    executor.write(users(user(5, 2, name="2")))
    executor.close()
    with pytest.raises(SwitchedError, match=r"another copy .* writes public\.users elsewhere"):
        sink.commit(applied(5))
    other.close()


class Killed(BaseException):
    """A process that dies before a request."""


def test_another_process_finishes_an_interrupted_change_of_index(
    opensearch_store: OpenSearchStore,
) -> None:
    """Killed before each of the requests that replace one index with another."""
    for point in range(1, 100):
        version = USERS._replace(table=f"u{point}")
        other = retyped("int4")._replace(table=version.table)
        seq = 10 * point
        old = [change(version, seq + n, row(version, seq, n, name=f"{n}x"), n) for n in (1, 2, 3)]
        new = change(other, seq + 5, row(other, seq, 3, name=7), 3)
        cut = Changes((other,), [new])
        before = opensearch_store.sink()
        before.open()
        apply(before, seq + 3, Changes((version,), old))
        before.close()
        died = _killed_before(point, opensearch_store.sink(), seq + 5, cut)
        after = opensearch_store.sink()
        state = after.open()
        assert state is not None
        assert state.applied.seq in {seq + 3, seq + 5}
        apply(after, seq + 5, cut)
        after.close()
        found = opensearch_store.rows_by("id", version.name)
        assert {k: each["name"] for k, each in found.items()} == {1: "1x", 2: "2x", 3: 7}
        pattern = f"/{opensearch_store.prefix}-{version.name}-*/_alias"
        assert len(opensearch_store.call("GET", pattern)[1]) == 1, point
        if not died:
            assert point > 10
            return
    pytest.fail("it never came to its end")


def _killed_before(request: int, sink: OpenSearchSink, seq: int, cut: Changes) -> bool:
    """Apply the cut, but die before this request; return whether it died."""
    sink.open()
    left, original = [request], sink.client.call

    def call(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - the client's
        left[0] -= 1
        if not left[0]:
            raise Killed
        return original(*args, **options)

    sink.client.call = call  # type: ignore[method-assign]
    try:
        apply(sink, seq, cut)
    except Killed:
        return True
    else:
        return False
    finally:
        sink.client.call = original  # type: ignore[method-assign]
        sink.close()


# --- odd names and keys ---


def test_odd_names_and_keys_arrive_and_come_back(
    opensearch_store: OpenSearchStore, sink: OpenSearchSink
) -> None:
    """Column names that no field, keys that no `_id`, and table names that no index can have."""
    names = ("k", "a.b", "a", "", "_id", "_source", "_x41", " ", 'q"u', "Ünï", "..", "_own")
    columns = tuple(Column(name, "text", 25, -1, nullable=True) for name in names)
    odd = Version(30, 'Se"x', "Ta.Ble/Ö" * 6, "x", ("k",), columns, VALUES)
    keys = ["", "a", "sha256:1", "x" * 513, "ü" * 256, "ü" * 257, "_", 'q"\\', "{}"]
    rows = [dict.fromkeys(names, f"v{n}") | {"k": each} for n, each in enumerate(keys)]
    changes = [
        Change(msgspec.json.encode({"k": r["k"]}), n, msgspec.json.encode(r), 30, n, n)
        for n, r in enumerate(rows, 1)
    ]
    hashed = Change(b'{"sha256":"ab"}', 50, msgspec.json.encode(rows[1] | {"a": "z"}), 30, 50, 50)
    assert apply(sink, 50, Changes((odd,), [*changes, hashed])) == len(keys) + 1
    assert opensearch_store.letters() == {}
    found = sink.rows(odd, [each.key for each in (*changes, hashed) if each.key])
    assert found == {each.key: each.row for each in (*changes, hashed)}
    assert {key for key, _, _ in sink.contents(odd)} >= {each.key for each in changes}
