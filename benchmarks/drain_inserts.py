"""drain-inserts: single-row inserts of about 240 bytes, in transactions of 100."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import rows as bench
from benchmarks.contents import EachIdOnce
from benchmarks.workload import Clock

if TYPE_CHECKING:
    import psycopg


class Inserts:
    """What an application that writes row by row puts into the WAL."""

    name = "drain-inserts"
    tables = (bench.TABLE,)
    rows = 1_000_000
    clock = Clock.FIRST_RECORD
    in_progress = False

    def create(self, connection: psycopg.Connection, rows: int) -> None:  # noqa: ARG002 - empty
        connection.execute(bench.CREATE_TABLE)

    def load(self, connection: psycopg.Connection, rows: int) -> None:
        bench.insert_singly(connection, bench.TABLE, bench.VALUES, rows)

    def contents(self, connection: psycopg.Connection, rows: int) -> dict[str, EachIdOnce]:  # noqa: ARG002
        return {bench.TABLE: EachIdOnce(bench.TABLE, rows)}
