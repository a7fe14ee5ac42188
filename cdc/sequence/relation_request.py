"""A relation to be described, with what the catalog and the configuration have of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.config.selection import ALL

if TYPE_CHECKING:
    from cdc.config import TableSelection
    from cdc.config.value_options import Values
    from cdc.decode.messages import Relation
    from cdc.events import LSN
    from cdc.source.lookups import SentTable, TableFacts


class RelationRequest(NamedTuple):
    """A relation to be described, and what is known of it from other sources than the stream."""

    relation: Relation
    facts: TableFacts  # of the catalog at or after `from_lsn`
    types: dict[int, str]
    from_lsn: LSN
    published: SentTable | None = None
    selection: TableSelection = ALL
    values: Values | None = None
    xid: int | None = None  # the transaction that the relation belongs to, where it is known

    @property
    def name(self) -> str:
        return f"{self.relation.namespace}.{self.relation.name}"

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.relation.columns)

    @property
    def marked(self) -> tuple[str, ...]:
        """The columns of the replica identity, as far as the stream marks them."""
        return tuple(column.name for column in self.relation.columns if column.key)

    @property
    def catalog_matches(self) -> bool:
        """Whether today's catalog describes the columns as the stream does."""
        if self.published is None:
            return True
        stream = tuple((c.name, c.type_id, c.type_modifier) for c in self.relation.columns)
        return stream == self.published.columns
