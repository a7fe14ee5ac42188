"""Spark apps for `spark-submit`, thin: they cut the log by frontiers and pass batches to sinks.

A job reads exactly the offsets between two frontier records, `read_committed`, and checks the
counts. Its only position is its sink's.
"""
