"""Identify which column of a table each column of a relation message is. Pure.

A relation message has the columns' names but not their numbers (attnum). A name can move to another
column: by a rename, or by DROP, RENAME and ADD, after which the message looks the same as before. A
number is never used twice, so a column that the configuration hides by name is tracked by number
(`hidden_columns`).

Three things are known about a message at some LSN: the columns' numbers as the catalog had them at
an earlier LSN (`before`), as it has them later (`today`), and the message's order, which is that of
the numbers. A column whose catalog row is the same in both had this name in between too. Any other
column lies between two such columns; its distance from them is bounded by the number of columns
that existed all the time and of those that may have existed. `possible_positions` returns every
possible position and never guesses between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from cdc.encode.masks import column_mask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.config import TableSelection
    from cdc.decode.messages import RelationColumn
    from cdc.log.records import ColumnNumbers, NumberedColumn

# The positions in a relation message where a column may be, by the column's number.
ColumnPositions: TypeAlias = dict[int, frozenset[int]]


class ExposedColumn(NamedTuple):
    """A hidden column that a relation message would show."""

    attnum: int
    hidden_as: str  # its name when it was hidden
    name: str  # its name, or possible name, in the message
    certain: bool


def possible_positions(
    columns: Sequence[RelationColumn],
    before: ColumnNumbers | None,
    today: ColumnNumbers,
    alike: Sequence[ColumnNumbers] = (),
) -> ColumnPositions:
    """Return where each column may be in a message that came after `before`, and before `today`.

    Without `before`, the table was not known at an earlier time: then the message is matched with
    the one of `alike` that lists the same columns.
    """
    every = frozenset(range(len(columns)))
    if columns and all(column.attnum for column in columns):
        return {column.attnum: frozenset({at}) for at, column in enumerate(columns)}
    if not today.columns:
        # The table was dropped, and its catalog rows with it: any column may be at any position.
        return {c.attnum: every for c in before.columns if not c.dropped} if before else {}
    if before is None:
        listed = [(c.name, c.type_id, c.type_modifier) for c in columns]
        for numbers in alike:
            sent = [c for c in numbers.columns if c.sent and not c.dropped]
            if [(c.name, c.type_id, c.type_modifier) for c in sent] == listed:
                return {c.attnum: frozenset({at}) for at, c in enumerate(sent)}
    return _PositionFinder(columns, before, today).find()


class _PositionFinder:
    """Computes the possible positions of one message's columns."""

    def __init__(
        self, columns: Sequence[RelationColumn], before: ColumnNumbers | None, today: ColumnNumbers
    ) -> None:
        self._count = len(columns)
        self._today = today.columns
        self._before = {c.attnum: c for c in before.columns} if before else None
        self._same_list = before is not None and before.membership == today.membership
        names = [column.name for column in columns]
        self._fixed: dict[int, int | None] = {}  # None: the message does not have it
        for now in self._today:
            if self._unchanged(now):
                self._fixed[now.attnum] = names.index(now.name) if now.name in names else None
        self._steady = {c.attnum for c in self._today if self._always(c)}
        self._possible = {c.attnum for c in self._today if self._ever(c)}

    def find(self) -> ColumnPositions:
        fixed = [at for _, at in sorted(self._fixed.items()) if at is not None]
        found = {attnum: self._of(attnum) for attnum in sorted(self._possible)}
        lost = [a for a in self._steady if self._before is not None and not found[a]]
        if fixed != sorted(set(fixed)) or lost:
            # Catalog and stream contradict each other: nothing is certain.
            every = frozenset(range(self._count))
            return dict.fromkeys(self._possible, every)
        return found

    def _unchanged(self, now: NumberedColumn) -> bool:
        """Whether the column's catalog row is the same as before."""
        then = (self._before or {}).get(now.attnum)
        return then is not None and not now.dropped and not then.dropped and then.xmin == now.xmin

    def _always(self, now: NumberedColumn) -> bool:
        """Whether the column was sent all the time."""
        if now.dropped or not now.sent:
            return False
        if self._before is None:
            return True
        then = self._before.get(now.attnum)
        return self._same_list and then is not None and then.sent and not then.dropped

    def _ever(self, now: NumberedColumn) -> bool:
        """Whether the column may have been sent at any time."""
        then = (self._before or {}).get(now.attnum)
        return then is None or not then.dropped

    def _of(self, attnum: int) -> frozenset[int]:
        if attnum in self._fixed:
            at = self._fixed[attnum]
            return frozenset() if at is None else frozenset({at})
        left_attnum, left = 0, -1
        right_attnum, right = len(self._today) + 1, self._count
        for other, at in sorted(self._fixed.items()):
            if at is not None and other < attnum:
                left_attnum, left = other, at
            elif at is not None and right_attnum > len(self._today):
                right_attnum, right = other, at
        least_below, most_below = self._between(left_attnum, attnum)
        least_above, most_above = self._between(attnum, right_attnum)
        if self._before is None:
            least_above = 0  # it may have been added later
        return frozenset(
            at
            for at in range(left + 1, right)
            if least_below <= at - left - 1 <= most_below
            and least_above <= right - at - 1 <= most_above
        )

    def _between(self, low: int, high: int) -> tuple[int, int]:
        """Return how many columns the message has between two numbers, at least and at most."""
        open_ = [a for a in range(low + 1, high) if a not in self._fixed and a in self._possible]
        return sum(a in self._steady for a in open_), len(open_)


def attnums(columns: Sequence[RelationColumn], found: ColumnPositions) -> tuple[int | None, ...]:
    """Return each column's number; None if more than one is possible."""
    possible: list[list[int]] = [[] for _ in columns]
    for attnum, positions in found.items():
        for at in positions:
            possible[at].append(attnum)
    return tuple(each[0] if len(each) == 1 else None for each in possible)


def hides(selection: TableSelection, name: str) -> bool:
    """Return whether the configuration hides a column of this name."""
    return column_mask(selection, name) is not None


def hides_something(selection: TableSelection) -> bool:
    """Return whether the configuration may hide a column of the table."""
    return bool(selection.included is not None or selection.excluded or selection.masks)


def hidden_columns(
    selection: TableSelection, so_far: dict[int, str], numbers: ColumnNumbers
) -> dict[int, str]:
    """Return the hidden columns by number, with the name that each was hidden by.

    Adds to `so_far` the columns that the configuration hides by their names in `numbers`, and those
    that are computed from a hidden one and sent, unless `keep` is configured for them. Removes a
    column if `keep` is configured for the name it was hidden by, but not if it was dropped: the
    stream may be from before the drop.
    """
    found = dict(so_far)
    for column in numbers.columns:
        if column.dropped:
            continue
        if hides(selection, column.name):
            found[column.attnum] = column.name
        elif found.get(column.attnum) == column.name and _kept(selection, column.name):
            del found[column.attnum]
    for column in numbers.columns:
        computed = found.keys() & set(column.computed_from)
        if computed and column.sent and not column.dropped and not _kept(selection, column.name):
            found.setdefault(column.attnum, column.name)
    return found


def computed_from_hidden(numbers: ColumnNumbers, hidden: dict[int, str], attnum: int) -> list[str]:
    """Return the names of the hidden columns that a column is computed from."""
    column = next((each for each in numbers.columns if each.attnum == attnum), None)
    return [hidden[each] for each in (column.computed_from if column else ()) if each in hidden]


def exposed_columns(
    selection: TableSelection,
    columns: Sequence[RelationColumn],
    found: ColumnPositions,
    hidden: dict[int, str],
) -> list[ExposedColumn]:
    """Return each hidden column that has, or may have, a name that is not hidden."""
    exposed = []
    for attnum, was in sorted(hidden.items()):
        positions = found.get(attnum, frozenset())
        for at in sorted(positions):
            name = columns[at].name
            # `keep` applies to a name: to the hidden column only if that is still its name.
            if hides(selection, name) or (name == was and _kept(selection, name)):
                continue
            exposed.append(ExposedColumn(attnum, was, name, len(positions) == 1))
    return exposed


def _kept(selection: TableSelection, name: str) -> bool:
    mask = selection.mask(name)
    return mask is not None and mask.kind == "keep"
