"""Snapshots: the rows that tables have already, put into the log beside their changes."""
