"""The partitions of tables, at any depth, read without a lock on any of them.

`pg_partition_tree` locks every partition until the transaction ends, in the order of their oids and
without the root. So it waits for any session that holds one of them, and a DROP TABLE of a
partition, which then locks the default partition, may end in a deadlock with it.

https://www.postgresql.org/docs/current/catalog-pg-inherits.html
"""

from __future__ import annotations

from typing import Final

# `tree(root, oid, relkind, relispartition)`: of each of %s::oid[], the table and its partitions.
TREES: Final = """
WITH RECURSIVE tree(root, oid, relkind, relispartition) AS (
    SELECT c.oid, c.oid, c.relkind, c.relispartition FROM pg_class c WHERE c.oid = ANY(%s::oid[])
    UNION ALL
    SELECT t.root, c.oid, c.relkind, c.relispartition FROM tree t
    JOIN pg_inherits i ON i.inhparent = t.oid AND NOT i.inhdetachpending
    JOIN pg_class c ON c.oid = i.inhrelid WHERE t.relkind = 'p')
"""
