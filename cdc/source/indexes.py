"""Which indexes identify a table's rows: each rule once, as SQL.

In each expression `i` is a row of `pg_index` and `c` the row of `pg_class` of its table. The rules
are those of Postgres' RelationGetIndexList.

https://www.postgresql.org/docs/current/catalog-pg-index.html
"""

from __future__ import annotations

from typing import Final

# The primary key, where Postgres can use it as replica identity: not if it is DEFERRABLE. That of a
# partitioned table counts although it is invalid while some partition lacks it.
PRIMARY_KEY: Final = "(i.indisprimary AND i.indimmediate AND (i.indisvalid OR c.relkind = 'p'))"
# The index whose columns are logged with updates and deletes; none where REPLICA IDENTITY is FULL
# or NOTHING.
REPLICA_IDENTITY: Final = f"""(CASE c.relreplident
    WHEN 'd' THEN {PRIMARY_KEY}
    WHEN 'i' THEN i.indisreplident AND i.indimmediate AND i.indisvalid
    ELSE false END)"""
# Whether no two rows have the same values in the index's columns, except where one is null.
UNIQUE: Final = "(i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL)"
# The column numbers of the index, without those that it only INCLUDEs.
COLUMNS: Final = "(i.indkey::int2[])[0:i.indnkeyatts - 1]"
# Whether Postgres accepts updates and deletes of the table `c` once it is published.
IDENTIFIES_ROWS: Final = f"""(c.relreplident = 'f' OR EXISTS (
    SELECT FROM pg_index i WHERE i.indrelid = c.oid AND {REPLICA_IDENTITY}))"""
