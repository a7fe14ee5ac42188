"""Rows and messages to keys and events, by code compiled for each table version."""
