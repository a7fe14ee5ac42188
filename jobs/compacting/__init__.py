"""Log compaction: from the archive, the newest event of each key up to a frontier, as a *base*.

`running` first: which tables changed, slices of them folded, one commit. `layout` has a base's
columns and what its commit states, `bases` the Delta table that holds them, `frontiers` finds where
a base or a reader starts, `slices` reads a part of base and archive, `fold` makes the newest event
of each key of it (pure), `older` looks up what an event takes from earlier ones, `tasks` runs
slices in executors. `restoring` fills stores from it, and `reporting` reports the newest base.
"""
