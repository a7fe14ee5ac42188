"""What mirrors must hold of the past: every version of a row, and every deleted row.

Triggers write each change of the load into tables that are not followed. Transactions are numbered
by the row of `clock`, which each of them changes: versions in a mirror have commit LSNs, and the
clock's own history shows which transaction has which. Whether that is right the triggers show, too,
by the WAL's end and the time while the transaction was open.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, NamedTuple

import psycopg

from cdc.events import LSN
from lockstep.sinks.delta.layout import (
    COMMIT_LSN,
    COMMITTED_AT,
    CURRENT,
    VALID_TO,
    VALID_TO_LSN,
)
from tests.faults.follower_rows import KEYS, TABLES, Row, asked, plain, row_hash

# Of these all changes are noted; of `shapes`, whose columns change, the keys alone.
NOTED: Final = ("accounts", "savings", "orders", "lines", "events", "blobs", "shapes")
_SHOWN: Final = 3
_NO_TRANSACTION: Final = 0
_FUNCTION: Final = """
CREATE SCHEMA noted;
CREATE SEQUENCE noted.places;
CREATE TABLE noted.clock (
  place bigint PRIMARY KEY, n bigint, xid xid8, lsn pg_lsn, at timestamptz
);
CREATE FUNCTION noted.note() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  -- A change is a delete and an insert: its key may be another one.
  statement text := format(
    'INSERT INTO noted.%I SELECT nextval(''noted.places''), $2, pg_current_xact_id(), %s'
    ' FROM (SELECT ($1).*) AS r', TG_TABLE_NAME, TG_ARGV[0]);
BEGIN
  IF TG_OP = 'TRUNCATE' THEN
    EXECUTE format('INSERT INTO noted.%I (place, op, xid) VALUES'
                   ' (nextval(''noted.places''), ''t'', pg_current_xact_id())', TG_TABLE_NAME);
    RETURN NULL;
  END IF;
  IF TG_OP <> 'INSERT' THEN
    EXECUTE statement USING OLD, 'd';
  END IF;
  IF TG_OP <> 'DELETE' THEN
    EXECUTE statement USING NEW, 'i';
  END IF;
  RETURN NULL;
END $$;
CREATE FUNCTION noted.tick() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO noted.clock VALUES (nextval('noted.places'), NEW.n, pg_current_xact_id(),
                                  pg_current_wal_insert_lsn(), clock_timestamp());
  RETURN NULL;
END $$;
CREATE TRIGGER tick AFTER INSERT OR UPDATE ON clock FOR EACH ROW EXECUTE FUNCTION noted.tick();
"""
_TABLE: Final = """
CREATE TABLE noted.{0} AS SELECT 0::bigint AS place, '' AS op, '0'::xid8 AS xid, {1} FROM {0}
WITH NO DATA;
ALTER TABLE noted.{0} ADD PRIMARY KEY (place);
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON {0}
FOR EACH ROW EXECUTE FUNCTION noted.note('{1}');
CREATE TRIGGER note_truncate AFTER TRUNCATE ON {0}
FOR EACH STATEMENT EXECUTE FUNCTION noted.note('{1}');
"""
_CHANGES: Final = """
SELECT place, op, transaction, {1} FROM noted.{0}
JOIN (SELECT xid, n AS transaction FROM noted.clock) AS transactions USING (xid)
WHERE place > %s ORDER BY place
"""
_MOMENTS: Final = "SELECT n, lsn::text, at FROM noted.clock WHERE place > %s ORDER BY place"


def _columns(table: str) -> dict[str, str]:
    return TABLES[table] or {"id": "int"}


def triggers() -> str:
    """Return the SQL that creates the triggers, and the tables that they write to."""
    return _FUNCTION + "".join(_TABLE.format(name, ", ".join(_columns(name))) for name in NOTED)


class Version(NamedTuple):
    """What a row was from one transaction on, up to before another; by their numbers."""

    since: int
    until: int
    value: int  # a hash of its columns


class _Moment(NamedTuple):
    """When a transaction was still open."""

    n: int
    lsn: LSN
    at: datetime


class Transactions(NamedTuple):
    """The transactions that a mirror has, in their order."""

    lsns: list[int]
    numbers: list[int]
    times: list[datetime]

    def number(self, lsn: int, at: datetime) -> int:
        """Return the number of the transaction that committed there; _NO_TRANSACTION: none."""
        place = bisect_left(self.lsns, lsn)
        if place == len(self.lsns) or (self.lsns[place], self.times[place]) != (lsn, at):
            return _NO_TRANSACTION
        return self.numbers[place]

    def newest(self, lsn: int) -> int:
        """Return the number of the newest one up to an LSN."""
        return self.numbers[max(0, bisect_right(self.lsns, lsn) - 1)]


class Past:
    """What the triggers have noted since the initial snapshot, read on with each check."""

    def __init__(self) -> None:
        self._place = 0
        self._first = 0  # the number of the snapshot's transaction
        self._moments: list[_Moment] = []
        # By table: the valid versions, how many of each that ended, and all since a truncate.
        self._valid: dict[str, dict[tuple[Any, ...], tuple[int, int]]] = defaultdict(dict)
        self._ended: dict[str, Counter[int]] = defaultdict(Counter)
        self._since: dict[str, dict[tuple[Any, ...], list[Version]]] = defaultdict(dict)

    def begin(self, connection: psycopg.Connection[Any]) -> None:
        """Take the rows that are there now as the first versions: of the initial snapshot."""
        self.read(connection)
        self._first = self._moments[-1].n
        self._moments = self._moments[-1:]
        self._ended.clear()
        self._since.clear()
        for rows in self._valid.values():
            rows.update({key: (self._first, value) for key, (_, value) in rows.items()})

    def read(self, connection: psycopg.Connection[Any]) -> None:
        """Read what was noted since."""
        (end,) = connection.execute("SELECT last_value FROM noted.places").fetchone() or (0,)
        found = connection.execute(_MOMENTS.encode(), (self._place,))
        self._moments += [_Moment(n, LSN.parse(lsn), at) for n, lsn, at in found]
        for table in NOTED:
            kinds = _columns(table)
            columns = ", ".join(asked(name, kind) for name, kind in kinds.items())
            query = _CHANGES.format(table, columns)
            for _, op, n, *values in connection.execute(query.encode(), (self._place,)):
                self._take(table, op, n, dict(zip(kinds, values, strict=True)))
        self._place = end

    def read_again(self, table: str) -> None:
        """Take note that a snapshot has replaced a table's rows, at an LSN of no transaction."""
        rows = dict(self._valid[table])
        self._take(table, "t", _NO_TRANSACTION, {})
        self._valid[table] = {key: (_NO_TRANSACTION, value) for key, (_, value) in rows.items()}

    def _take(self, table: str, op: str, n: int, row: Row) -> None:
        valid = self._valid[table]
        if op == "t":
            for key in list(valid):
                self._end(table, key, n)
            self._since[table].clear()
            return
        key = tuple(row[name] for name in KEYS[table])
        if op == "d":
            self._end(table, key, n)
        else:
            valid[key] = n, _value(table, row)

    def _end(self, table: str, key: tuple[Any, ...], n: int) -> None:
        since, value = self._valid[table].pop(key)
        self._ended[table][hash((key, since, n, value))] += 1
        self._since[table].setdefault(key, []).append(Version(since, n, value))

    # -- what is wrong with mirrors -------------------------------------------------------------

    def transactions(self, clock: Iterable[Row]) -> tuple[Transactions, list[str]]:
        """Return the transactions that the clock's history has, and what is wrong with them."""
        found = sorted((row[COMMIT_LSN], row["n"], row[COMMITTED_AT]) for row in clock)
        wanted = [each.n for each in self._moments]
        if [n for _, n, _ in found] != wanted:
            odd = Counter(n for _, n, _ in found)
            odd.subtract(wanted)
            several = sorted(n for n, count in odd.items() if count)[:_SHOWN]
            return Transactions([], [], []), [f"clock: missing or twice, or out of order {several}"]
        wrong = []
        for (lsn, n, at), moment, next_ in zip(
            found, self._moments, [*self._moments[1:], None], strict=True
        ):
            later = next_ is None or (lsn < next_.lsn and at <= next_.at)
            if not (moment.lsn <= lsn and moment.at <= at and later):
                wrong.append(f"clock: {n} is valid from {LSN(lsn)}, {at}")
        return Transactions(*map(list, zip(*found, strict=True))), wrong[:_SHOWN]

    def wrong_history(self, table: str, rows: Iterable[Row], known: Transactions) -> list[str]:
        """Return how a table's history differs: each version is there once, with its interval."""
        missing = self._ended[table] + Counter(
            hash((key, since, None, value)) for key, (since, value) in self._valid[table].items()
        )
        wrong = []
        for row in rows:
            key = _key(table, row)
            since = known.number(row[COMMIT_LSN], row[COMMITTED_AT])
            ends = row[VALID_TO_LSN] is not None
            until = known.number(row[VALID_TO_LSN], row[VALID_TO]) if ends else None
            version = hash((key, since, until, _value(table, plain(table, row))))
            if ends is row[CURRENT] or not missing[version]:
                wrong.append(f"{key} from {since or LSN(row[COMMIT_LSN])} to {until}")
            else:
                missing[version] -= 1
        lost = missing.total()
        if not wrong and not lost:
            return []
        shown = f"{len(wrong)} versions that were not, such as {wrong[:_SHOWN]}"
        return [f"{table}: {lost} versions are missing, {shown}"]

    def wrong_deleted(
        self, table: str, rows: Iterable[Row], known: Transactions, frontiers: Iterable[int]
    ) -> list[str]:
        """Return how the rows differ that are marked as deleted.

        Each that a frontier had since the last truncate is there, with the values that it had then
        or later: of changes between two frontiers only the last one of a key is written.
        """
        deleted = {
            key: versions
            for key, versions in self._since[table].items()
            if key not in self._valid[table]
        }
        shown = sorted({known.newest(lsn) for lsn in frontiers})
        wrong, found = [], set()
        for row in rows:
            key = _key(table, row)
            found.add(key)
            versions = deleted.get(key, [])
            at = known.number(row[COMMIT_LSN], row[COMMITTED_AT])
            last = _last_shown(versions, shown)
            values = {each.value for each in versions[last or 0 :]}
            if not versions or at != versions[-1].until:
                wrong.append(f"{key}, deleted in {at or LSN(row[COMMIT_LSN])}")
            elif _value(table, plain(table, row)) not in values:
                wrong.append(f"{key} with other values")
        wrong += [
            f"{key} is missing"
            for key, versions in deleted.items()
            if key not in found and _last_shown(versions, shown) is not None
        ]
        return [f"{table}: {len(wrong)} deleted rows, such as {wrong[:_SHOWN]}"] if wrong else []


def _last_shown(versions: list[Version], frontiers: list[int]) -> int | None:
    """Return the index of the newest version that one of the frontiers has."""
    for at in reversed(range(len(versions))):
        place = bisect_left(frontiers, versions[at].since)
        if place < len(frontiers) and frontiers[place] < versions[at].until:
            return at
    return None


def _key(table: str, row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEYS[table])


def _value(table: str, row: Row) -> int:
    return row_hash(table, row) if TABLES[table] else 0
