"""Stores that follow the log: one contract, one folder per store.

The contract, in prose (`sinks.contract` has it in types, `lockstep.conformance` checks every sink):

- A batch gives the same state however often it is applied. A change counts if and only if its `seq`
  is greater than the stored one; a delete leaves a tombstone with its seq, so that late changes
  have no effect.
- A follower's position is in its store, written with the data: the applied frontier, the pipeline's
  epoch and a generation (one build of the follower). No other record of it counts.
- While a cut is being written the store shows it, with the cut's last seq. A reader that finds the
  same applied frontier before and after its reads, and no cut in flight, has read a state that the
  database had.
- Unknown is not null: a column that was not sent keeps its stored value.

Of our code, sinks import only the vocabulary of `cdc.events` and the errors of `cdc.errors`; the
one that writes to Kafka also uses the client of `cdc.log`.
"""
