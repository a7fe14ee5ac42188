"""Spark apps for `spark-submit`, thin: they cut the log by frontiers and hand batches to sinks.

A job reads exactly the offsets between two frontier records, `read_committed`, checks the counts,
and keeps no position of its own but its sink's.
"""
