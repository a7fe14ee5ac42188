"""What Postgres currently sends of a table: columns and row filter, as the catalogs have them.

The catalog may be newer than the change that is being read. A comparison with the stream's own
description of the table shows whether the catalog is about that time at all. Looked up by
`cdc.source.lookups`.
"""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """A published table, in the terms of a relation message."""

    columns: tuple[tuple[str, int, int], ...]  # name, type and modifier; none: the table is dropped
    where: str | None  # as Postgres writes the filter
    ancestors: tuple[tuple[str, str], ...] = ()  # the partitioned tables that it is a part of
    attnums: tuple[int, ...] = ()  # of the columns
