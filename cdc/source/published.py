"""What Postgres sends of a table today: columns and row filter, as the catalogs have them.

Today's catalog may be younger than the change that is being read. Held against what the stream says
of the table it tells whether the catalog speaks of that time at all. Looked up by
`cdc.source.lookups`.
"""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """A published table, in the terms of a relation message."""

    columns: tuple[tuple[str, int, int], ...]  # name, type and modifier; none: the table is gone
    where: str | None  # as Postgres writes the filter
    ancestors: tuple[tuple[str, str], ...] = ()  # the partitioned tables that it is a part of
    attnums: tuple[int, ...] = ()  # of the columns
