"""Frontier records to cuts, and a cut's events to one change for each key."""
