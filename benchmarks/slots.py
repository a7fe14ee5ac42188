"""Replication slots for measurements: each subject drains a copy of one base slot."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg

from benchmarks.backlog import BASE_SLOT
from benchmarks.failure import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.programs import Program

_RELEASE_SECONDS = 30.0
_ATTACH_SECONDS = 90.0


@contextmanager
def copied(connection: psycopg.Connection, name: str) -> Iterator[str]:
    """Create a slot at the base slot's position, which sends the same WAL again."""
    connection.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [BASE_SLOT, name])
    with dropped(connection, name) as slot:
        yield slot


@contextmanager
def created(connection: psycopg.Connection, name: str) -> Iterator[str]:
    """Create a slot at the end of the WAL, which sends only later changes."""
    connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
    with dropped(connection, name) as slot:
        yield slot


@contextmanager
def dropped(connection: psycopg.Connection, name: str) -> Iterator[str]:
    """Drop the slot at the end of the block: a forgotten one would retain every later run's WAL."""
    try:
        yield name
    finally:
        drop(connection, name)


def drop(connection: psycopg.Connection, name: str) -> None:
    """Drop the slot; a walsender whose client has just disconnected may still hold it briefly."""
    deadline = time.monotonic() + _RELEASE_SECONDS
    while True:
        try:
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE slot_name = %s",
                [name],
            )
        except psycopg.errors.ObjectInUse:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def is_taken(connection: psycopg.Connection, slot: str) -> bool:
    """Return whether a walsender streams from the slot."""
    row = connection.execute(
        "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", [slot]
    ).fetchone()
    return row is not None and row[0] is not None


def wait_streaming(connection: psycopg.Connection, slot: str, program: Program) -> None:
    """Return when a walsender streams from the slot."""
    deadline = time.monotonic() + _ATTACH_SECONDS
    while True:
        program.check()
        if is_taken(connection, slot):
            return
        if time.monotonic() > deadline:
            raise BenchmarkError(
                f"{program.name} does not stream from slot {slot} within {_ATTACH_SECONDS:.0f} s",
                hint="look at its log in the folder that --keep leaves",
            )
        time.sleep(0.1)
