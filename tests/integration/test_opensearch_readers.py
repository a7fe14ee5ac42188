"""Two copies of a follower write to OpenSearch at once, while readers read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from random import Random
from typing import Final, NamedTuple

import pytest
from opensearchpy import OpenSearch

from cdc.errors import ConfigError, StoreLostError, SwitchedError, UnavailableError
from lockstep.conformance.store import USERS, applied, apply, change, key, row
from lockstep.sinks.contract import Change, Changes, Version
from lockstep.sinks.opensearch.reader import OpenSearchReader
from lockstep.sinks.opensearch.sink import OpenSearchSink
from tests.fixtures.busy_opensearch import BusyOpenSearch
from tests.fixtures.store_opensearch import OpenSearchStore

ACCOUNTS: Final = tuple(USERS._replace(table=f"t{n}", schema_id=20 + n) for n in range(2))
_TRANSFERS: Final = 40
_REWRITTEN_EVERY: Final = 13
_LOOK_SECONDS: Final = 5.0

Amounts = dict[int, int]


class Transfer(NamedTuple):
    """One cut: money moved between the tables, and what both then hold."""

    seq: int
    changes: tuple[Changes, ...]
    held: tuple[Amounts, ...]


def transfers(chance: Random) -> list[Transfer]:
    """Return a history whose sum over both tables never changes; some truncate and rewrite."""
    seq, made = 0, list[Transfer]()
    held: list[Amounts] = [dict.fromkeys(range(4), 100) for _ in ACCOUNTS]
    for at in range(_TRANSFERS):
        moved, cut = chance.randint(-20, 20), list[Changes]()
        rewritten = at % _REWRITTEN_EVERY == _REWRITTEN_EVERY - 1
        for which, version in enumerate(ACCOUNTS):
            amounts, truncated = dict(held[which]), None
            if rewritten:
                seq += 1
                truncated = seq
                amounts = dict.fromkeys(amounts, 0) | {chance.randrange(4): sum(amounts.values())}
            number = chance.randrange(4)
            amounts[number] += moved if which else -moved
            changes = list[Change]()
            for each in amounts if rewritten or not at else [number]:
                seq += 1
                complete = row(version, seq, each, amount=f"{amounts[each]}.00")
                changes.append(change(version, seq, complete, each))
            held[which] = amounts
            cut.append(Changes((version,), changes, truncated))
        made.append(Transfer(seq, tuple(cut), tuple(held)))
    return made


def together(parts: list[Changes]) -> Changes:
    """Return a table's changes of several cuts as those of one cut."""
    newest: dict[bytes | None, Change] = {}
    truncated = None
    for part in parts:
        if part.truncated:
            truncated = part.truncated
            newest.clear()
        newest |= {each.key: each for each in part.changes}
    return Changes(parts[0].versions, list(newest.values()), truncated)


class Writer(threading.Thread):
    """A copy of the follower that takes `many` transfers per cut."""

    def __init__(self, store: OpenSearchStore, history: list[Transfer], many: int) -> None:
        super().__init__()
        self._sink, self._history, self._many = store.sink(), history, many
        self.looked = threading.Event()
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            opened(self._sink)
            for at in range(0, len(self._history), self._many):
                self._apply(self._history[at : at + self._many])
                if self._many == 1:  # so that readers get their turn on any machine
                    self.looked.clear()
                    self.looked.wait(_LOOK_SECONDS)
            self._sink.close()
        except BaseException as error:  # noqa: BLE001 - reported by the test
            self.error = error

    def _apply(self, cut: list[Transfer]) -> None:
        versions: list[Version] = list(ACCOUNTS)
        while True:
            try:
                self._sink.begin(cut[-1].seq, versions)
                for which in range(len(versions)):
                    self._sink.write(together([each.changes[which] for each in cut]))
                self._sink.commit(applied(cut[-1].seq))
            except SwitchedError:
                opened(self._sink)
            else:
                return


def opened(sink: OpenSearchSink) -> None:
    """Open it as a follower does: what was only just created may not answer yet."""
    for _ in range(600):
        try:
            sink.open()
        except UnavailableError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("it never opens")


def amounts_now(store: OpenSearchStore) -> tuple[Amounts, ...]:
    found = [store.rows_by("id", version.name) for version in ACCOUNTS]
    return tuple({n: int(float(r["amount"])) for n, r in rows.items()} for rows in found)


@pytest.fixture
def client(opensearch_url: str) -> Iterator[OpenSearch]:
    """Return an application's own client."""
    with OpenSearch(opensearch_url, timeout=60) as client:
        yield client


def test_a_reader_waits_for_a_frontier_and_returns_it(
    opensearch_store: OpenSearchStore, client: OpenSearch
) -> None:
    """A search that spans a cut is repeated; without a frontier the reader waits."""
    never = OpenSearchReader(client, f"{opensearch_store.prefix}-never", "search")
    with pytest.raises(UnavailableError, match="no frontier"):
        never.read(lambda _: pytest.fail("there is nothing to search"), seconds=0.05)
    sink = opensearch_store.sink()
    opened(sink)
    reader = OpenSearchReader(client, opensearch_store.prefix, "search")
    asked = list[str]()

    def found(searching: OpenSearch) -> list[int]:
        if not asked:
            apply(sink, 2, Changes((USERS,), [change(USERS, 2, row(USERS, 2, 2), 2)]))
        asked.append("")
        alias = f"{opensearch_store.prefix}-{USERS.name}"
        return sorted(hit["_source"]["id"] for hit in searching.search(index=alias)["hits"]["hits"])

    with pytest.raises(UnavailableError, match="no frontier"):
        reader.read(found, seconds=0.05)  # nothing is applied yet
    apply(sink, 1, Changes((USERS,), [change(USERS, 1, row(USERS, 1, 1), 1)]))
    at = applied(2)
    assert reader.read(found) == ([1, 2], at.seq, at.lsn, at.committed_at_us, ())
    assert len(asked) == 2
    sink.begin(3, [USERS])
    with pytest.raises(UnavailableError, match="no frontier"):
        reader.read(found, seconds=0.05)
    assert len(asked) == 2
    sink.close()


def test_readers_are_warned_of_a_lost_index_until_it_is_built_again(
    opensearch_store: OpenSearchStore, client: OpenSearch
) -> None:
    """A search of several indices finds nothing in the one that is missing, and no error."""
    reader = OpenSearchReader(client, opensearch_store.prefix, "search")
    cut = [Changes((each,), [change(each, 1, row(each, 1, 1), 1)]) for each in ACCOUNTS]
    lost, kept = (each.name for each in ACCOUNTS)

    def found(searching: OpenSearch) -> int:
        hits = searching.search(index=f"{opensearch_store.prefix}-public.*")["hits"]["hits"]
        return len(hits)

    sink = opensearch_store.sink()
    opened(sink)
    apply(sink, 1, *cut)
    assert reader.read(found).found == 2
    opensearch_store.delete(f"{opensearch_store.prefix}-{lost}")
    with pytest.raises(StoreLostError):
        sink.open()
    for tables in (None, {lost, kept}):
        with pytest.raises(UnavailableError, match=f"has lost its index of {lost}"):
            reader.read(found, tables=tables)
    at = applied(1)
    assert reader.read(found, tables={kept}) == (1, at.seq, at.lsn, at.committed_at_us, (lost,))
    # Also for a copy that opens it later, and while the index is built again.
    other = opensearch_store.sink()
    with pytest.raises(StoreLostError):
        other.open()
    shadow = sink.at(2, frozenset({lost}))
    shadow.open()
    apply(shadow, 1, cut[0])
    with pytest.raises(UnavailableError, match="has lost its index"):
        reader.read(found)
    sink.switch(2)
    assert reader.read(found).found == 2
    assert reader.read(found).lost == ()
    opened(sink)
    assert reader.read(found).lost == ()
    for each in (sink, other, shadow):
        each.close()


def test_readers_of_two_writers_see_states_that_the_database_had(
    opensearch_store: OpenSearchStore, client: OpenSearch
) -> None:
    """The writers' cuts end at different frontiers."""
    history = transfers(Random(5))
    states = {each.seq: each.held for each in history}
    reader = OpenSearchReader(client, opensearch_store.prefix, "search")
    first = opensearch_store.sink()
    opened(first)
    first.close()
    writers = [Writer(opensearch_store, history, many) for many in (1, 3)]
    states_read = set()
    while any(writer.is_alive() for writer in writers):
        writers[0].looked.set()
        try:
            read = reader.read(lambda _: amounts_now(opensearch_store), seconds=30.0)
        except UnavailableError:
            continue
        assert read.found == states[read.seq], read.seq
        states_read.add(read.seq)
    assert [writer.error for writer in writers] == [None, None]
    assert states_read
    assert opensearch_store.record()["seq"] == history[-1].seq
    assert amounts_now(opensearch_store) == history[-1].held


def test_truncated_rows_do_not_return_with_other_fields(
    opensearch_store: OpenSearchStore,
) -> None:
    """While readers do not see its empty index yet: neither rows nor dead letters return."""

    def users(*seqs: int, truncated: int | None = None) -> Changes:
        rows = [change(USERS, n, row(USERS, n, n, name="x" * (n == 2)), n) for n in seqs]
        return Changes((USERS,), rows, truncated)

    sinks = [
        opensearch_store.sink(mappings={"public.users": {"name": {"type": kind}}})
        for kind in ("boolean", "keyword", "boolean")  # "x" is no boolean
    ]
    old, changed, ahead = sinks
    old.open()
    apply(old, 2, users(1, 2))
    assert opensearch_store.letters().keys() == {"2"}
    ahead.open()
    ahead.begin(9, [USERS])
    apply(old, 4, users(4, truncated=3))
    assert opensearch_store.letters() == {}
    assert opensearch_store.rows("public.users").keys() == {key(USERS, 1)}
    changed.open()
    apply(changed, 9, users(9))
    assert opensearch_store.rows("public.users").keys() == {key(USERS, 4), key(USERS, 9)}
    for each in sinks:
        each.close()


def test_rows_of_another_key_are_refused_until_the_table_is_rebuilt(
    opensearch_store: OpenSearchStore,
) -> None:
    """Or emptied by a truncate in the cut; changes that the build has are applied again."""
    renamed = USERS._replace(schema_id=9, key=("name",))

    def rows(version: Version, *seqs: int, truncated: int | None = None) -> Changes:
        made = [change(USERS, n, row(USERS, n, n), n) for n in seqs]
        if version is renamed:
            keys = [b'{"name":"n%d"}' % n for n in seqs]
            made = [c._replace(key=k, schema_id=9) for c, k in zip(made, keys, strict=True)]
        return Changes((USERS, version), made, truncated)

    sink = opensearch_store.sink()
    sink.open()
    apply(sink, 2, rows(USERS, 1, 2))
    cut = rows(USERS, 3), rows(renamed, 4, 5)
    with pytest.raises(ConfigError, match=r"public\.users has another key now \(name\)"):
        apply(sink, 5, *cut)
    shadow = sink.at(2, frozenset({"public.users"}))
    shadow.open()
    apply(shadow, 6, rows(renamed, 5, 6))
    sink.switch(2)
    sink.open()
    apply(sink, 6, *cut, rows(renamed, 6))
    assert opensearch_store.hits("public.users").keys() == {"n5", "n6"}
    apply(sink, 9, rows(USERS, 8, truncated=7))
    assert opensearch_store.hits("public.users").keys() == {"8"}
    sink.close()
    shadow.close()


@pytest.mark.parametrize("retyping", [False, True])
def test_readers_see_one_index_after_a_switch_that_overtakes_a_commit(
    opensearch_store: OpenSearchStore, busy_opensearch: BusyOpenSearch, *, retyping: bool
) -> None:
    """The commit shows readers another index: of the generation that they no longer see."""
    first = Changes((USERS,), [change(USERS, 1, row(USERS, 1, 1), 1)])
    columns = [c._replace(type="int4") if c.name == "name" else c for c in USERS.columns]
    retyped = USERS._replace(schema_id=9, columns=tuple(columns))
    old = opensearch_store.sink(url=busy_opensearch.url)
    old.open()
    apply(old, 1, first)
    other = opensearch_store.sink()
    shadow = other.at(2)
    shadow.open()
    apply(shadow, 1, first)

    def overtake(method: str, path: str) -> None:
        if (method, path) == ("POST", "/_aliases") and other.current() == 1:
            other.switch(2)

    busy_opensearch.before = overtake
    cut = Changes((retyped,), []) if retyping else Changes((USERS,), [], truncated=2)
    with pytest.raises(SwitchedError):
        apply(old, 3, cut)
    alias = f"{opensearch_store.prefix}-public.users"
    assert len(opensearch_store.call("GET", f"/_alias/{alias}")[1]) == 2  # as the commit left it
    old.open()
    assert len(opensearch_store.call("GET", f"/_alias/{alias}")[1]) == 1
    assert opensearch_store.rows("public.users") == {key(USERS, 1): row(USERS, 1, 1)}
    for each in (old, other, shadow):
        each.close()
