"""A model that changes a real Postgres as applications do, in an order that a seed decides.

`source` writes: interleaved transactions, savepoints, two-phase commits, changed keys, truncates,
COPY, DDL, replica identities. `account` asks Postgres itself (its `test_decoding`, with a separate
slot) what was committed, and compares the log with that event by event. `folding` folds the events
and compares the rows with what SELECT returned at LSNs without concurrent writes. Meanwhile the
daemon runs, is stopped for several schema versions, or dies.
"""
