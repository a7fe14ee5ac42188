"""The initial snapshot: existing rows, before the stream's first change. See `session`."""
