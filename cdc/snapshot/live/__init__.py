"""Live snapshots: a table is read again, chunk by chunk, through the stream. See `manager`."""
