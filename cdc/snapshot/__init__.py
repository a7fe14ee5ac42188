"""Snapshots: the existing rows of tables, written to the log in addition to their changes."""
