"""Incremental snapshots: tables read again, in chunks, while the stream goes on. See `manager`."""
