"""A model that does to a real Postgres whatever applications do, in an order that a seed decides.

`source` writes: interleaved transactions, savepoints, two phases, changed keys, truncates, COPY,
DDL, replica identities. `account` asks Postgres itself (its `test_decoding`, a slot of its own)
what was committed, and holds the log against that event by event. `folding` folds the events and
holds the rows against what SELECT gave at LSNs when nobody wrote. The daemon runs meanwhile, or is
away for several schema versions, or dies.
"""
