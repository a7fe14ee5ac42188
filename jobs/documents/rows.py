"""Convert a mirror's Arrow batches into the rows of a document's nodes (`sinks.documents.Row`).

One `NodeRows` per node: it reads only the columns that the node shows, joins by and sorts by.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from cdc.errors import ConfigError
from lockstep.jobs.documents.values import Cells, ValueReader, exact_texts
from lockstep.sinks.delta import layout as delta_layout
from lockstep.sinks.documents import Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from lockstep.sinks.contract import Version
    from lockstep.sinks.documents import DocumentNode

Rank = tuple[int, object]


class NodeRows:
    """Reads rows of one table version for one node."""

    def __init__(self, node: DocumentNode, version: Version) -> None:
        self.node, self.version, self.topic = node, version, version.topic
        ties, order = node.ties, tuple(name for name, _ in node.order)
        wanted = tuple(dict.fromkeys((*node.columns, *ties, *order)))
        known = {column.name: column for column in version.columns}
        missing = [name for name in wanted if name not in known]
        if missing:
            raise ConfigError(
                f"document {node.name!r} names columns that {node.table} has not: "
                f"{', '.join(missing)}",
                hint="see followers.<name>.documents; `cdc tail` shows which columns there are",
            )
        self._readers = {name: ValueReader(known[name], version.values) for name in wanted}
        self._labels = {name: msgspec.json.encode(name) + b":" for name in wanted}
        self._compared = frozenset((*ties, *order))
        self.columns = (*wanted, delta_layout.SEQ, delta_layout.EXACT)

    @cached_property
    def traced(self) -> NodeRows:
        """The same rows with their keys and terms only, for ways up to a root."""
        return NodeRows(self.node._replace(columns=(), order=()), self.version)

    def read(self, batch: pa.RecordBatch) -> Iterator[Row]:
        """Yield the rows of a batch that has `columns`."""
        names = list(self._readers)
        exact = exact_texts(batch.column(delta_layout.EXACT), names, batch.num_rows)
        cells = {
            name: self._readers[name].read(
                batch.column(name), texts, compares=name in self._compared
            )
            for name, texts in zip(names, exact, strict=True)
        }
        node = self.node
        keys = self._members(cells, node.key, batch.num_rows)
        members = self._members(cells, node.columns, batch.num_rows)
        ties = node.ties
        terms = list(zip(*(cells[name].terms for name in ties), strict=True))
        places = list(zip(*_order(node, cells), strict=True))
        for at in range(batch.num_rows):
            yield Row(
                b"{%b}" % keys[at],
                members[at],
                dict(zip(ties, terms[at], strict=True)),
                places[at],
            )

    def _members(self, cells: dict[str, Cells], columns: tuple[str, ...], rows: int) -> list[bytes]:
        if not columns:
            return [b""] * rows
        labelled = ([self._labels[name] + json for json in cells[name].json] for name in columns)
        return [b",".join(each) for each in zip(*labelled, strict=True)]


def _order(node: DocumentNode, cells: dict[str, Cells]) -> Iterator[Sequence[object]]:
    """Yield each row's sort key: the node's order, then the key."""
    for name, descending in (*node.order, *((name, False) for name in node.key)):
        ranks = cells[name].ranks
        yield [_Backwards(rank) for rank in ranks] if descending else ranks


class _Backwards:
    """A rank that sorts descending, with NULL first, as in Postgres."""

    __slots__ = ("rank",)

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def __lt__(self, other: _Backwards) -> bool:
        return bool(other.rank < self.rank)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Backwards) and self.rank == other.rank

    def __hash__(self) -> int:
        return hash(self.rank)
