"""Whether libpq can read a connection string, asked of libpq itself; nothing is connected to."""

from __future__ import annotations

import psycopg
from psycopg import conninfo


def is_readable(dsn: str) -> bool:
    """Return whether libpq takes `dsn`. Why not is left unsaid: libpq quotes words of it."""
    try:
        conninfo.conninfo_to_dict(dsn)
    except psycopg.Error:
        return False
    return True
