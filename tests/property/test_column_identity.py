"""A table's random history: no reader, however late, treats a hidden column as a clear one.

The model knows which column each name was at each LSN. A daemon reads the catalog at any later
time, continues or restarts, and masks as `Relations` decides. Each value of a hidden column is
checked by its column number, so a name that passed to another column is a leak.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.config import Mask
from cdc.config.patterns import parse_name
from cdc.config.selection import ALL
from cdc.decode.messages import Relation, RelationColumn, ReplicaIdentity
from cdc.errors import ConfigError
from cdc.events import LSN
from cdc.log.records import ColumnNumbers, NumberedColumn
from cdc.publication import column_identity
from cdc.publication.column_identity import possible_numbers
from cdc.sequence.relation_request import RelationRequest
from cdc.sequence.relations import Relations
from cdc.source.lookups import TableFacts

NAMES = "abcdef"
HIDDEN_NAME = "b"
SECRET = 2  # its number

steps = st.lists(
    st.tuples(st.sampled_from(["rename", "swap", "add", "drop", "row", "row"]),
              st.integers(0, 5), st.integers(0, 5)),
    min_size=1, max_size=14,
)  # fmt: skip
# For each message: how many steps later the catalog is read, and whether the daemon restarts.
looks = st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=14, max_size=14)


class State(NamedTuple):
    """The table after a step."""

    columns: tuple[NumberedColumn, ...]
    has_row: bool

    @property
    def alive(self) -> list[NumberedColumn]:
        return [column for column in self.columns if not column.dropped]

    def numbers(self, lsn: int, hidden: dict[int, str] | None = None) -> ColumnNumbers:
        return ColumnNumbers(relation_id=7, lsn=LSN(lsn), columns=self.columns, hidden=hidden or {})


def history(chosen: list[tuple[str, int, int]]) -> list[State]:
    """Return the table at each LSN, changed at random from step to step."""
    columns = [NumberedColumn(at, name, type_id=25) for at, name in enumerate("abc", 1)]
    states = [State(tuple(columns), has_row=True)]
    for xid, (what, one, other) in enumerate(chosen, 1):
        alive = [c for c in columns if not c.dropped]
        free = [name for name in NAMES if name not in {c.name for c in alive}]

        def put(
            column: NumberedColumn, name: str, *, dropped: bool = False, xid: int = xid
        ) -> None:
            columns[column.attnum - 1] = NumberedColumn(
                column.attnum, name, type_id=25, xmin=xid, dropped=dropped
            )

        at, to = alive[one % len(alive)], alive[other % len(alive)]
        if what == "rename" and free:
            put(at, free[other % len(free)])
        elif what == "swap" and at is not to:
            put(at, to.name)
            put(to, at.name)
        elif what == "add" and free:
            columns.append(
                NumberedColumn(len(columns) + 1, free[one % len(free)], type_id=25, xmin=xid)
            )
        elif what == "drop" and len(alive) > 1:
            put(at, "", dropped=True)
        states.append(State(tuple(columns), has_row=what == "row"))
    return states


@settings(max_examples=600)
@given(steps, looks)
def test_the_hidden_column_is_never_shown(
    chosen: list[tuple[str, int, int]], looks: list[tuple[int, bool]]
) -> None:
    selection = ALL._replace(masks=((parse_name(HIDDEN_NAME), Mask("null")),))
    states = history(chosen)
    written = [states[0].numbers(0, {SECRET: HIDDEN_NAME})]  # by `cdc setup`
    relations = Relations("shop", [], 0, written)
    seen = 0
    for lsn, state in enumerate(states):
        if not state.has_row:
            continue
        later, restarts = looks[lsn % len(looks)]
        if restarts:
            relations = Relations("shop", [], 0, written)
        # Time never goes back: the catalog is read no earlier than it was read before.
        seen = max(seen, min(len(states) - 1, lsn + later))
        columns = tuple(
            RelationColumn(False, c.name, c.type_id, -1)  # noqa: FBT003 - of no key
            for c in state.alive
        )
        relation = Relation(7, "public", "t", ReplicaIdentity.NOTHING, columns)
        facts = TableFacts((), {}, states[seen].numbers(seen))
        try:
            request = RelationRequest(relation, facts, {}, LSN(lsn), selection=selection)
            version, _ = relations.version(request, replaying=False)
        except ConfigError:
            return  # the daemon halts, and nothing is published
        written += relations.take_numbers()
        for column, reported in zip(state.alive, version.columns, strict=True):
            assert reported.attnum in (None, column.attnum)
            if column.attnum == SECRET:
                assert reported.mask is not None


@settings(max_examples=600)
@given(steps, st.integers(0, 14), st.integers(0, 14), st.integers(0, 14))
def test_every_column_is_among_the_places_that_are_possible(
    chosen: list[tuple[str, int, int]], one: int, two: int, three: int
) -> None:
    states = history(chosen)
    first, then, last = sorted(min(each, len(states) - 1) for each in (one, two, three))
    columns = [RelationColumn(False, c.name, c.type_id, -1) for c in states[then].alive]  # noqa: FBT003
    for before in (states[first].numbers(first), None):
        found = column_identity.possible_positions(columns, before, states[last].numbers(last))
        for at, column in enumerate(states[then].alive):
            assert at in found[column.attnum]


@given(st.integers(0, 2**32), st.integers(0, 6), st.integers(0, 6))
def test_numbers_that_are_proven_are_those_that_the_table_had(
    seed: int, between: int, later: int
) -> None:
    """Whatever is added and dropped before a relation message, and after it."""
    chance, columns, highest = Random(seed), list(range(1, 5)), 4

    def change(times: int) -> None:
        nonlocal highest
        for _ in range(times):
            if columns and chance.random() < 0.4:
                columns.remove(chance.choice(columns))
            else:
                highest += 1
                columns.append(highest)

    before, highest_before = tuple(columns), highest
    change(between)
    then = tuple(columns)
    change(later)
    found = possible_numbers(len(then), before, highest_before, columns, highest)
    assert found in {None, then}
    if set(before) <= set(columns) and len(columns) == highest:
        assert found == then
