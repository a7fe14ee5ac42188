"""Stores that follow the log: one contract, one file a store.

The contract: a batch in, the same state however often. A sink applies a change if and only if its
`seq` is greater than the stored one, keeps a versioned tombstone for deletes, and writes its
applied frontier together with the data. Sinks import the event types of `cdc.events` only.
"""
