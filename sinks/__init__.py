"""Stores that follow the log: one contract, a folder a store.

The contract, in prose (`sinks.contract` has it in types, tests/contract holds every sink to it):

- A batch in, the same state however often. A change counts if and only if its `seq` is greater than
  the stored one; a delete leaves a tombstone with its seq, so that what comes late stays out.
- A follower's position lives in its store, written with the data: the applied frontier, the
  pipeline's epoch and a generation (one build of the follower). No other record of it counts.
- While a cut is being written the store says so, and up to which seq. A reader that finds the same
  applied frontier before and after its reading, and no cut under way, has read a state that the
  database had.
- Unknown is not null: a column that was not sent keeps its stored value.

Sinks import the words of `cdc.events` and the errors of `cdc.errors`, nothing else of ours.
"""
