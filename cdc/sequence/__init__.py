"""Frames to records in the total order: transactions, table versions, Position and seq."""
