"""Cases that a capture of Postgres must pass: from SQL to a reader of the topics, on every major.

One file per kind of case, one test per case, named by what it claims; docs/GUARANTEES.md, "Cases",
has the list. Elsewhere, because they are older or need faults in servers:

Temporal, numbers, text, structured: every type under every option, tests/integration/test_values*.
Identity: keys of a configuration that no longer fit, tests/integration/test_keys.py.
TOAST: nothing.
DDL: histories of many changes, tests/stateful; publications, tests/integration/test_slot_gaps.py.
Partitions: detached ones by leaf, masks and filters, tests/integration/test_partitions.py.
Transactions: prepared ones, tests/faults/test_postgres_prepared.py; large ones,
test_large_transaction.py; 100,000 subtransactions, tests/integration/test_subtransactions.py;
deaths at every failpoint, tests/faults/test_failpoints.py and campaign.py.
Slot: nearly all, tests/integration/test_slot_*.py, test_source_watch.py and tests/faults.

Not here: snapshots, followers, and PostGIS, whose binaries none of our servers has.
"""
