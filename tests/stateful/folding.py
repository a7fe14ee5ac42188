"""Events folded into rows, compared with what SELECT returned at an LSN without concurrent writes.

Rows are identified by relation oid and `rid`, which no operation changes; an event without a `rid`
finds its row by the columns that it has. Compared are the columns that a row's last event had and
that the table still has: values set by a default, or converted to a new type, are in no event.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from psycopg import Connection, sql

from cdc.events import LSN
from cdc.log import reader
from tests.fixtures.daemon import PipelineUnderTest
from tests.stateful.source import SCHEMAS

Row = dict[str, str | None]

_TABLES: Final = (
    "SELECT c.oid::int8, n.nspname, c.relname FROM pg_class c JOIN pg_namespace n"
    " ON n.oid = c.relnamespace WHERE n.nspname = ANY(%s) AND c.relkind IN ('r', 'p')"
    " AND NOT c.relispartition"
)


class Snapshot(NamedTuple):
    """The content of the tables at an LSN, by relation and rid."""

    lsn: LSN
    tables: dict[int, dict[str, Row]]


def snapshot(connection: Connection[Any]) -> Snapshot:
    """Return the current content; there must be no concurrent writes."""
    (lsn,) = connection.execute("SELECT pg_current_wal_lsn()").fetchone() or ("0/0",)
    tables = {}
    for oid, schema, name in connection.execute(_TABLES, (list(SCHEMAS),)).fetchall():
        rows = connection.execute(
            sql.SQL("SELECT to_jsonb(t) FROM {} t").format(sql.Identifier(schema, name))
        ).fetchall()
        tables[oid] = {str(row["rid"]): _texts(row) for (row,) in rows}
    return Snapshot(LSN.parse(lsn), tables)


def _texts(row: dict[str, Any] | None) -> Row:
    return {k: None if v is None else str(v) for k, v in (row or {}).items()}


class Folded:
    """The rows that result from the events so far."""

    def __init__(self, pipeline: PipelineUnderTest) -> None:
        self._relations = {s.schema_id: s.relation_id for s in reader.read_schemas(pipeline.config)}
        self._rows: dict[int, dict[str, Row]] = {}
        self._moved: Row = {}

    def take(self, event: dict[str, Any]) -> None:
        op = event["op"]
        if op == "m":
            return
        rows = self._rows.setdefault(self._relations[event["source"]["schema_id"]], {})
        unsent = event["source"].get("unchanged", ())
        after = {k: v for k, v in _texts(event["after"]).items() if k not in unsent}
        moved, self._moved = self._moved, {}
        if op == "t":
            rows.clear()
        elif op == "d":
            self._moved = rows.pop(self._find(rows, _texts(event["before"])))
        elif op == "c":
            assert after["rid"] not in rows, "created twice"
            kept = {k: moved[k] for k in unsent}
            rows[str(after["rid"])] = after | kept
        else:
            old = rows.get(str(after["rid"]))
            assert old is not None, "an update of a row that is not there"
            rows[str(after["rid"])] = after | {k: old[k] for k in unsent if k in old}

    @staticmethod
    def _find(rows: dict[str, Row], before: Row) -> str:
        if "rid" in before:
            return str(before["rid"])
        found = [
            rid
            for rid, row in rows.items()
            if all(row.get(name, value) == value for name, value in before.items())
        ]
        assert len(found) == 1, f"a delete affects {len(found)} rows"
        return found[0]

    def differences(self, at: Snapshot) -> list[str]:
        """Return where the rows differ from the snapshot's."""
        lines = []
        for oid, wanted in at.tables.items():
            rows = self._rows.get(oid, {})
            if wanted.keys() != rows.keys():
                odd = sorted(wanted.keys() ^ rows.keys())
                lines.append(f"at {at.lsn} relation {oid} differs in the rows {odd[:5]}")
                continue
            for rid, want in wanted.items():
                names = want.keys() & rows[rid].keys()
                odd = sorted(name for name in names if want[name] != rows[rid][name])
                if odd:
                    lines.append(f"at {at.lsn} relation {oid}, row {rid} differs in {odd}")
        return lines[:5]
