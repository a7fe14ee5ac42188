"""Lockstep: change data capture that keeps every store in lockstep with Postgres."""

__version__ = "0.1.0"
