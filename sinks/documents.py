"""Nested documents: a row with the rows that belong to it, at any depth, to one and to many.

Pure: rows come from a `Find`, which reads tables at one frontier; this module does not know which.
`affected` walks up from changed rows to the roots whose documents they may have changed,
`documents` builds the documents of roots by walking down.

A cut's documents are exact because both sides are read: a changed row's old image is walked up in
the tables before the cut, its new one in the tables after it. So a child that moves changes the
document that it left and the one that it joined, and an orphan appears when its parent does.

A row belongs to a parent if every column of `by` equals its parent's, as with a foreign key: NULL
equals nothing. If several rows match a child to one, the first in order is used.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

# The form in which a column's value is compared; None: NULL.
Term: TypeAlias = "Hashable"
Terms: TypeAlias = "tuple[Term, ...]"


class DocumentNode(NamedTuple):
    """A table's place in a document."""

    name: str  # the field's name; at the root the document's
    table: str  # `schema.table`
    key: tuple[str, ...]
    columns: tuple[str, ...]
    by: tuple[tuple[str, str], ...] = ()  # a column, and the parent's column that it equals
    one: bool = False
    order: tuple[tuple[str, bool], ...] = ()  # a column, and whether it is descending
    children: tuple[DocumentNode, ...] = ()
    # Attnum, type and modifier of the table's columns: another one may have a name now, or a column
    # other values.
    forms: tuple[tuple[int | None, str, int], ...] = ()

    @property
    def own(self) -> tuple[str, ...]:
        """The columns that join it to its parent."""
        return tuple(own for own, _ in self.by)

    @property
    def parents(self) -> tuple[str, ...]:
        """The columns of its parent that it is joined to."""
        return tuple(parents for _, parents in self.by)

    @property
    def ties(self) -> tuple[str, ...]:
        """Every column of its table by which rows are found."""
        found = dict.fromkeys((*self.key, *self.own))
        for child in self.children:
            found |= dict.fromkeys(child.parents)
        return tuple(found)

    def walk(self) -> Iterable[DocumentNode]:
        """Yield it and every node below it."""
        yield self
        for child in self.children:
            yield from child.walk()


class Row(NamedTuple):
    """A row in the form that its node shows."""

    key: bytes  # JSON, as in the log
    members: bytes  # the node's columns as members of a JSON object: `"id":7,"name":"Ada"`
    terms: Mapping[str, Term]  # of the node's ties
    place: tuple[object, ...]  # the sort key in lists; unique in a table

    def of(self, columns: tuple[str, ...]) -> Terms | None:
        """Return the terms of some columns; None if one is NULL, which equals nothing."""
        found = tuple([self.terms[each] for each in columns])
        return None if None in found else found


# Returns the rows of a node's table whose `columns` are among `wanted`, as of one frontier.
Find: TypeAlias = "Callable[[DocumentNode, tuple[str, ...], frozenset[Terms]], Iterable[Row]]"


def affected(
    root: DocumentNode, changed: Callable[[DocumentNode], Iterable[Row]], find: Find
) -> dict[bytes, Terms]:
    """Return the keys of the roots above the changed rows, as JSON and as terms.

    `changed` returns a node's changed rows and `find` reads the tables, both on the same side of
    the cut.
    """
    found = {}
    for row in _upward(root, changed, find):
        terms = row.of(root.key)
        if terms is not None:
            found[row.key] = terms
    return found


def _upward(
    node: DocumentNode, changed: Callable[[DocumentNode], Iterable[Row]], find: Find
) -> Iterable[Row]:
    """Yield the node's rows that changed, and those with a changed row below them."""
    yield from changed(node)
    for child in node.children:
        wanted = {row.of(child.own) for row in _upward(child, changed, find)}
        yield from _found(node, child.parents, wanted, find)


def documents(root: DocumentNode, rows: Sequence[Row], find: Find) -> list[bytes]:
    """Return the documents of the root's `rows`, in their order, as JSON objects."""
    members = [[row.members] for row in rows]
    for child in root.children:
        own, parents = child.own, child.parents
        wanted = {row.of(parents) for row in rows}
        belonging = list(_found(child, own, wanted, find))
        made: defaultdict[Terms | None, list[bytes]] = defaultdict(list)
        below = zip(belonging, documents(child, belonging, find), strict=True)
        for row, document in sorted(below, key=lambda pair: pair[0].place):
            made[row.of(own)].append(document)
        name = msgspec.json.encode(child.name) + b":"
        for row, into in zip(rows, members, strict=True):
            terms = row.of(parents)
            mine = made[terms] if terms is not None and terms in made else []
            into.append(name + _field(child, mine))
    return [b"{%b}" % b",".join(filter(None, each)) for each in members]


def _field(child: DocumentNode, documents: list[bytes]) -> bytes:
    if child.one:
        return documents[0] if documents else b"null"
    return b"[%b]" % b",".join(documents)


def _found(
    node: DocumentNode, columns: tuple[str, ...], wanted: set[Terms | None], find: Find
) -> Iterable[Row]:
    terms = frozenset(each for each in wanted if each is not None)
    return find(node, columns, terms) if terms else ()
