"""The archive: every record of the log in one Delta table, with proof that nothing is missing.

`running` first: cut after cut, which `cuts` writes and commits. `layout` has the table's columns
and what a commit states, `merkle` the tree over a cut's records, `rows` turns records into rows,
`writing` puts them into files (in the driver, or in executors: `tasks`), `table` commits. `proving`
checks all of it again, with `delta_log`; `versions` finds rows, `upkeep` joins small files.
"""
