"""The changes of nested documents in a cut of their mirror, for the store's sink.

Documents follow the mirror's `_frontiers` instead of the log: each row names a frontier and the
versions of all tables at it. Between two rows, the table rows that differ lead to the roots above
them (`sinks.documents.affected`, once for the old state, once for the new one), and these roots'
documents are rebuilt from the tables at exactly the later frontier. To a sink a kind of document is
a table: its key is the root's, its seq the frontier's, and children are columns.

Added or dropped columns change every document, regardless of which rows changed.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

from cdc.errors import ConfigError
from lockstep.jobs.documents.rows import NodeRows
from lockstep.sinks.contract import Applied, Change, Changes, Column, Version
from lockstep.sinks.documents import DocumentNode, affected, documents

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from cdc.config.followers import Document
    from lockstep.jobs.documents.mirror import MirrorVersion
    from lockstep.sinks.documents import Row, Terms

SCHEMA: Final = "documents"
# The column types of children: one and many.
ONE: Final = "document"
MANY: Final = "_document"
# How many roots' documents are in memory at a time.
_AT_ONCE: Final = 10_000


class DocumentTables(Protocol):
    """The tables at one frontier; `node` selects the table and the columns that are read."""

    def find(
        self, node: DocumentNode, columns: tuple[str, ...], wanted: frozenset[Terms]
    ) -> Iterator[Row]:
        """Yield the rows whose `columns` are among `wanted`."""
        ...

    def trace(
        self, node: DocumentNode, columns: tuple[str, ...], wanted: frozenset[Terms]
    ) -> Iterator[Row]:
        """Yield the same rows with at least their keys and terms."""
        ...

    def every(self, node: DocumentNode) -> Iterator[Row]:
        """Yield all rows."""
        ...

    def difference(self, node: DocumentNode, since: Self) -> tuple[Iterable[Row], Iterable[Row]]:
        """Return the rows that only `since` has, and those that it lacks; a changed row is both.

        With at least their keys and terms.
        """
        ...

    def differ(self, table: str, since: Self) -> bool:
        """Return whether the table may differ from its state in `since`."""
        ...


class DocumentKind:
    """One kind of document: its tree, and the table that it is for a sink."""

    def __init__(self, name: str, document: Document, versions: Mapping[str, Version]) -> None:
        self.root = tree(name, document, versions)
        # A table without any event so far has no version and no rows.
        self.rows = {
            node: NodeRows(node, versions[node.table])
            for node in self.root.walk()
            if node.table in versions
        }
        self.version = _version(self.root, versions)

    def changes(
        self,
        new: DocumentTables,
        applied: Applied,
        old: DocumentTables | None = None,
        *,
        was: DocumentNode | None = None,
        replaces: bool = False,
    ) -> Iterator[Changes]:
        """Yield the changes of the documents, in batches.

        From the tables `old` to those of `applied`. Every document is built if there is no `old`,
        or if its tree `was` different there; `replaces`: in place of those in the store.
        """
        if old is None:
            if replaces:
                yield Changes((self.version,), [], truncated=applied.seq)
            yield from self._every(new, applied)
            return
        if was not in (None, self.root):
            there = {row.key for row in new.every(self.root)}
            deleted = [row.key for row in old.every(self.root) if row.key not in there]
            yield self._made((), deleted, new, applied)
            yield from self._every(new, applied)
            return
        found = {
            node: new.difference(node, old) for node in self.rows if new.differ(node.table, old)
        }
        nothing: tuple[Iterable[Row], Iterable[Row]] = (), ()
        roots = affected(self.root, lambda node: found.get(node, nothing)[0], old.trace) | affected(
            self.root, lambda node: found.get(node, nothing)[1], new.trace
        )
        yield from self._documents(roots, new, applied)

    def _every(self, tables: DocumentTables, applied: Applied) -> Iterator[Changes]:
        rows = tables.every(self.root)
        while some := list(islice(rows, _AT_ONCE)):
            yield self._made(some, (), tables, applied)

    def _documents(
        self, roots: Mapping[bytes, Terms], tables: DocumentTables, applied: Applied
    ) -> Iterator[Changes]:
        left = iter(roots.items())
        while some := dict(islice(left, _AT_ONCE)):
            found = list(tables.find(self.root, self.root.key, frozenset(some.values())))
            there = {row.key for row in found}
            yield self._made(found, [key for key in some if key not in there], tables, applied)

    def _made(
        self,
        rows: Sequence[Row],
        deleted: Iterable[bytes],
        tables: DocumentTables,
        applied: Applied,
    ) -> Changes:
        made = zip(rows, documents(self.root, rows, tables.find), strict=True)
        return self.complete(made, applied, deleted)

    def complete(
        self,
        made: Iterable[tuple[Row, bytes]],
        applied: Applied,
        deleted: Iterable[bytes] = (),
    ) -> Changes:
        """Return the changes of documents that were made, and of roots that were deleted."""
        changes = [self._change(row.key, document, applied) for row, document in made]
        changes += [self._change(key, None, applied) for key in deleted]
        return Changes((self.version,), changes)

    def _change(self, key: bytes, document: bytes | None, applied: Applied) -> Change:
        return Change(
            key,
            applied.seq,
            document,
            self.version.schema_id,
            applied.lsn,
            applied.committed_at_us,
            op="d" if document is None else "c",
        )


class DocumentBuild(NamedTuple):
    """One kind of document, to be built from tables; pickled."""

    name: str
    document: Document
    versions: Mapping[str, Version]
    places: Mapping[str, MirrorVersion]
    applied: Applied

    def kind(self) -> DocumentKind:
        return DocumentKind(self.name, self.document, self.versions)


def tree(name: str, document: Document, versions: Mapping[str, Version]) -> DocumentNode:
    """Return the tree that the configuration describes; raise ConfigError if it is not possible."""
    version = versions.get(document.table)
    if version is None:
        return DocumentNode(
            name, document.table, (), document.columns, tuple(document.by.items()), document.one
        )
    if not version.key:
        raise ConfigError(
            f"document {name!r} is made of {document.table}, which has no key",
            hint="give it a primary key, or tables.<table>.key",
        )
    columns = document.columns or tuple(column.name for column in version.columns)
    if document.columns and not document.by:  # the root's key is read from the stored document
        columns = tuple(dict.fromkeys((*version.key, *columns)))
    taken = set(columns) & set(document.children)
    if taken:
        raise ConfigError(
            f"document {name!r} has columns and children of one name: {', '.join(sorted(taken))}",
            hint="call the child otherwise, or leave the column out by naming `columns`",
        )
    return DocumentNode(
        name,
        document.table,
        version.key,
        columns,
        tuple(document.by.items()),
        document.one,
        tuple(_ordered(each, version) for each in document.order),
        tuple(tree(field, child, versions) for field, child in document.children.items()),
        tuple(map(_form, version.columns)),
    )


def _form(column: Column) -> tuple[int | None, str, int]:
    """Return what a document's values of a column depend on."""
    # However long a varchar may be, its values are the same.
    return column.attnum, column.type, -1 if column.type == "varchar" else column.modifier


def _ordered(text: str, version: Version) -> tuple[str, bool]:
    """Return the column, and whether a minus sign in front of it reverses the order."""
    names = {column.name for column in version.columns}
    return (text[1:], True) if text not in names and text.startswith("-") else (text, False)


def _version(root: DocumentNode, versions: Mapping[str, Version]) -> Version:
    """Return the table version that the documents are for a sink."""
    top = versions[root.table]
    known = {column.name: column for column in top.columns}
    children = (
        Column(child.name, ONE if child.one else MANY, 0, -1, nullable=child.one)
        for child in root.children
    )
    return Version(
        # It changes whenever the version of one of its tables changes.
        max(versions[table].schema_id for node in root.walk() if (table := node.table) in versions),
        SCHEMA,
        root.name,
        f"{SCHEMA}.{root.name}",
        top.key,
        (*(known[name] for name in root.columns), *children),
        {**top.values, "document": _shape(root, versions)["fields"]},
    )


def _shape(node: DocumentNode, versions: Mapping[str, Version]) -> dict[str, object]:
    """Return what a mapping needs about the children, by their fields."""
    version = versions.get(node.table)
    known = {column.name: column for column in version.columns} if version else {}
    return {
        "columns": [
            [name, known[name].type, known[name].modifier] for name in node.columns if name in known
        ],
        "many": not node.one,
        "values": dict(version.values) if version else {},
        "fields": {child.name: _shape(child, versions) for child in node.children},
    }
