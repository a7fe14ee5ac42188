"""Prove that the topics equal the database: fold the log, read the tables, compare every value.

The database must be quiet: nothing may write to the published tables while this runs. The proof
waits for what the database has committed by then, so it also finds a log that never catches up.
Both sides are read by code that shares nothing with the daemon's encoders: `cdc.verify.fold` and
`cdc.playground.demo.database`. Findings name tables, columns and key hashes, never values.

For a table that the initial snapshot did not copy into the log (`snapshot: direct`, or `none`) the
log holds what has changed since: that part is compared, and the number of missing rows is reported.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from cdc.log import names, records
from cdc.playground.demo import database
from cdc.playground.demo.tail import Tail
from cdc.snapshot.incremental import topic as incremental
from cdc.verify.events import TableState, canonical, key_hash
from cdc.verify.fold import Fold, Folded
from cdc.verify.frontiers import Findings

if TYPE_CHECKING:
    import psycopg

    from cdc.config import Config
    from cdc.events import LSN, Frontier
    from cdc.verify.events import Row

WAIT_SECONDS: Final = 60.0
_READ_SECONDS: Final = 0.05
# How long to read up to known end offsets before slot and ends are looked up again.
_LOOK_SECONDS: Final = 2.0
_NAMED: Final = 3  # key hashes in one sentence

# Key columns with their values, in the order of the columns' names.
Key = tuple[tuple[str, Any], ...]


class DemoProof(NamedTuple):
    """The outcome: `findings` is empty if and only if the log equals the database.

    For a table that is only partly in the log, that part must be equal: `not_in_log` reports the
    other rows.
    """

    equal: bool
    tables: int
    rows: int
    events: int
    seq: int
    frontier: Frontier | None
    findings: tuple[str, ...]
    initial: int = 0  # of the events, those of the initial snapshot
    not_in_log: tuple[str, ...] = ()


def prove(config: Config, *, wait_seconds: float = WAIT_SECONDS) -> DemoProof:
    """Wait until the log has everything committed so far, then compare it with the database.

    Raises what the clients raise when a server is down; a log that never catches up is a finding.
    """
    findings = Findings()
    folded = _read_log(config, database.wal_end(config), wait_seconds, findings)
    for sentence in folded.findings:
        findings.add(sentence)
    states = dict(folded.tables)
    rows, not_in_log = 0, list[str]()
    with database.snapshot(config) as connection:
        published = database.published(connection, config.publication)
        for table in published:
            topic = names.data_topic(config.prefix, table.schema, table.table)
            elsewhere = copied_elsewhere(config, *table[:2])
            state = states.pop(topic, TableState(topic, *table[:2], complete=elsewhere is None))
            count = compare(state, table, connection, findings)
            rows += count
            if not state.complete and count > len(state):
                not_in_log.append(
                    f"{table.name}, {count - len(state)} of {count} rows ({elsewhere})"
                )
    if not published:
        findings.add(f"the publication {config.publication} holds no table")
    for state in states.values():
        findings.add(f"the log holds {state.name}, which the publication does not")
    sentences = findings.sentences()
    return DemoProof(
        equal=not sentences,
        tables=len(published),
        rows=rows,
        events=folded.events,
        seq=folded.seq,
        frontier=folded.frontier,
        findings=sentences,
        initial=folded.initial,
        not_in_log=tuple(not_in_log),
    )


def copied_elsewhere(config: Config, schema: str, table: str) -> str | None:
    """Return where the table's existing rows were copied; None where that is the log."""
    kind = config.selection.of((schema, table)).snapshot
    if config.snapshot.mode == "never" or kind == "log":
        return None
    to = "straight into Delta Lake" if kind == "direct" else "nowhere"
    return f"snapshot: {kind}, {to}"


def _read_log(config: Config, end: LSN, wait_seconds: float, findings: Findings) -> Folded:
    """Fold the log up to `end`; add a finding when no events arrive for `wait_seconds`."""
    fold = Fold(complete=lambda *table: copied_elsewhere(config, *table) is None)
    tail = Tail(config)
    try:
        events, deadline = -1, 0.0
        while not _has_all(config, end, fold, tail):
            if fold.events > events:
                events, deadline = fold.events, time.monotonic() + wait_seconds
            elif time.monotonic() > deadline:
                findings.add(
                    f"the log did not reach {end} within {wait_seconds:.0f} s: "
                    + _log_state(config, fold)
                )
                break
    finally:
        tail.close()
    for record in incremental.read(config):
        if record.found_empty:
            fold.read_empty(names.data_topic(config.prefix, record.schema, record.table))
    return fold.finish()


def _has_all(config: Config, end: LSN, fold: Fold, tail: Tail) -> bool:
    """Read what is available; return whether everything up to `end` was read, with its frontier."""
    confirmed = database.confirmed(config)
    # Looked up after the slot: what was confirmed by then is before these ends.
    tail.find_topics()
    ends = tail.ends()
    until = time.monotonic() + _LOOK_SECONDS
    while True:
        for seen in tail.read(_READ_SECONDS):
            if seen.topic == tail.dead_topic:
                fold.add_letter(seen.key, seen.value)
            elif seen.topic != tail.frontier_topic:
                fold.add(*seen)
            elif seen.value is not None:
                record = records.decode(records.FrontierRecord, seen.value, seen.topic)
                fold.add_frontier(record.frontier())
        if tail.caught_up(ends):
            break
        if time.monotonic() > until:
            return False
    newest = fold.frontiers[-1] if fold.frontiers else None
    reached = confirmed >= end or (newest is not None and newest.lsn >= end)
    return reached and (newest.seq if newest else 0) == fold.seq


def _log_state(config: Config, fold: Fold) -> str:
    newest = fold.frontiers[-1].lsn if fold.frontiers else "none"
    return (
        f"slot {config.slot} confirmed {database.confirmed(config)}, the frontier is {newest} and"
        f" the newest event seq {fold.seq}; see that the daemon runs"
    )


def compare(
    state: TableState,
    table: database.ComparedTable,
    connection: psycopg.Connection,
    findings: Findings,
    place: str = "the log",
) -> int:
    """Compare one table; return how many rows the database has. `place` has the state."""
    if table.key:
        return _compare_keyed(state, table, connection, findings, place)
    if state.rows:
        findings.add(f"{table.name}: {len(state.rows)} rows are in {place} under a key")
    stored = Counter(canonical(row) for row in database.rows(connection, table))
    more = {f"rows of {place} are not in the database": state.keyless - stored}
    if state.complete:
        more[f"rows of the database are missing from {place}"] = stored - state.keyless
    for what, those in more.items():
        _add_finding(findings, table, what, [key_hash(row) for row in those.elements()])
    return stored.total()


def _compare_keyed(
    state: TableState,
    table: database.ComparedTable,
    connection: psycopg.Connection,
    findings: Findings,
    place: str,
) -> int:
    logged: dict[Key, Row] = {}
    for key, row in state.rows.items():
        columns = _key_columns(key, row, table)
        if set(columns) != set(table.key) or not columns.items() <= row.items():
            findings.add(f"{table.name}: the record key {key_hash(key)} does not fit its row")
        logged[_key(columns)] = row
    if state.keyless:
        findings.add(f"{table.name}: {state.keyless.total()} rows are in {place} without a key")
    count = 0
    missing: list[str] = []
    differ: dict[str, list[str]] = {}
    for row in database.rows(connection, table):
        count += 1
        name = _key({column: row[column] for column in table.key})
        other = logged.pop(name, None)
        if other is None:
            missing.append(_named(name))
        elif canonical(other) != canonical(row):
            for column in _differing(table, row, other, full=state.complete):
                differ.setdefault(column, []).append(_named(name))
    if state.complete:
        _add_finding(findings, table, f"rows of the database are missing from {place}", missing)
    _add_finding(
        findings, table, f"rows of {place} are not in the database", [_named(k) for k in logged]
    )
    for column, keys in differ.items():
        _add_finding(findings, table, f"rows differ in column {column}", keys)
    return count


def _differing(table: database.ComparedTable, row: Row, other: Row, *, full: bool) -> list[str]:
    """Return the columns that differ; in a state that is not `full` some may be unknown."""
    known = [name for name in table.columns if full or name in other]
    return [name for name in known if not _same(row[name], other.get(name))]


def _key_columns(key: bytes, row: Row, table: database.ComparedTable) -> Row:
    """Return the columns that a record key names, also where a hash replaces a long key."""
    columns: Row = orjson.loads(key)
    if set(columns) == {"sha256"} != set(table.key):
        named = {name: row.get(name) for name in table.key}
        if hashlib.sha256(orjson.dumps(named)).hexdigest() == columns["sha256"]:
            return named
    return columns


def _add_finding(
    findings: Findings, table: database.ComparedTable, what: str, keys: list[str]
) -> None:
    if keys:
        more = ", …" if len(keys) > _NAMED else ""
        findings.add(f"{table.name}: {len(keys)} {what} ({', '.join(keys[:_NAMED])}{more})")


def _key(columns: Row) -> Key:
    return tuple(sorted((name, _hashable(value)) for name, value in columns.items()))


def _hashable(value: Any) -> Any:  # noqa: ANN401 - any type's
    """Return an array, which a key may be, as a tuple; anything else unchanged."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _named(key: Key) -> str:
    return key_hash(canonical(dict(key)))


def _same(one: object, other: object) -> bool:
    # 1 and 1.0 and true are equal in Python, but not the same JSON.
    return orjson.dumps(one) == orjson.dumps(other)
