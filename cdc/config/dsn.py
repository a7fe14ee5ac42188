"""Whether libpq can parse a connection string; no connection is made."""

from __future__ import annotations

import psycopg
from psycopg import conninfo


def is_readable(dsn: str) -> bool:
    """Return whether libpq accepts `dsn`. The reason is not returned: libpq quotes words of it."""
    try:
        conninfo.conninfo_to_dict(dsn)
    except psycopg.Error:
        return False
    return True
