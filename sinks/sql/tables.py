"""Tables that follow their source's versions, and their rows.

A new column is added, with the value that the source shows in older rows, and a renamed one is
renamed. One that the source dropped stays, with its values, and NULL in every row written since,
until another column takes its name. A column whose type changes is converted by its values' text;
in Postgres, if a value is none of the new type, it becomes text, which holds both. Columns, indexes
and constraints of others are left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from sqlalchemy import inspect

from cdc.errors import CDCError, ConfigError, StoreLostError
from lockstep.sinks.contract import key_changed
from lockstep.sinks.floats import text8
from lockstep.sinks.sql.database import is_data_error, is_in_use, key_of
from lockstep.sinks.sql.types import DECODE, ColumnValues

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy import Connection

    from lockstep.sinks.contract import Altered, Change, Version
    from lockstep.sinks.sql.database import Database

SEQ: Final = "_lockstep_seq"
_MOVING: Final = "_lockstep_moving_"


class KnownTable(msgspec.Struct):
    """A table of the follower."""

    source: str
    columns: dict[str, str]  # each one's type, as it was last wanted


decode_tables: Final = msgspec.json.Decoder(dict[str, KnownTable]).decode


class SQLTables:
    """A follower's tables; `schema`, if given, has all of them."""

    def __init__(self, database: Database, schema: str) -> None:
        self._database, self._schema = database, schema
        self.known: dict[str, KnownTable] = {}  # by place
        self._values: dict[tuple[str, int], tuple[Version, dict[str, ColumnValues]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the conversions, which are functions: another process makes its own."""
        return self.__dict__ | {"_values": {}}

    def place(self, version: Version) -> str:
        """Return a table's name for statements."""
        return self._database.quoted(self._schema_of(version), version.table)

    def has(self, version: Version) -> bool:
        """Return whether the follower has a table for this one."""
        return self.place(version) in self.known

    def missing(self, connection: Connection) -> list[str]:
        return [at for at in self.known if not self._database.columns(connection, at)]

    def clear(self, connection: Connection) -> None:
        """Delete all rows; of SQLite's tables, whose keys can't be changed, the tables."""
        missing = self.missing(connection)
        for place in self.known.keys() - set(missing):
            empty = "DELETE FROM" if self._database.is_postgres else "DROP TABLE"
            connection.exec_driver_sql(f"{empty} {place}")
        self.known = {
            place: KnownTable(known.source, dict.fromkeys(known.columns, ""))
            for place, known in self.known.items()
            if self._database.is_postgres and place not in missing
        }

    # --- columns ---

    def key_of_rows(self, cut: Connection, version: Version) -> tuple[str, ...] | None:
        """Return the key of the stored rows; None if there are none."""
        place = self.place(version)
        if place not in self.known:
            return None
        if not self._database.columns(cut, place):
            raise StoreLostError(f"{place} is missing in the database")
        some = cut.exec_driver_sql(f"SELECT 1 FROM {place} LIMIT 1").first()  # noqa: S608 - a quoted name
        return key_of(cut, self._schema_of(version), version.table) if some else None

    def adapt(self, cut: Connection, versions: Sequence[Version], key: tuple[str, ...]) -> None:
        """Give the table the columns of all versions; without rows, another key."""
        version, place = versions[-1], self.place(versions[-1])
        wanted = dict[str, str]()
        for each in versions:
            for name, values in self._of(each).items():
                same = wanted.get(name, values.type) == values.type
                wanted[name] = values.type if same else "text"
        known = self.known.get(place)
        stored = self._database.columns(cut, place)
        if stored and (known is None or known.source != version.name):
            raise ConfigError(
                f"{version.name} can't be stored as {place}, which exists already",
                hint="give the follower a `schema` or a database of its own, drop that table, or"
                f" leave {version.name} out of the follower's `tables`, also once it is dropped in"
                " the source: its events stay in the log",
            )
        if stored and key_of(cut, self._schema_of(version), version.table) != key:
            cut.exec_driver_sql(f"DROP TABLE {place}")
            stored = {}
        if known is None or not stored:
            self.known[place] = known = KnownTable(version.name, {})
            self._create(cut, version, key, wanted)
            stored = wanted
        for name, kind in wanted.items():
            if name not in stored:
                self._alter(cut, place, f"ADD COLUMN {self._database.quoted(name)} {kind}")
            elif kind not in (stored[name], known.columns.get(name)):
                if name in key and not self._database.is_postgres:
                    raise key_changed(version)  # SQLite can't drop a key's column
                convert = self._convert if self._database.is_postgres else self._replace
                convert(cut, place, self._database.quoted(name), kind)
            known.columns[name] = kind

    def alter(self, cut: Connection, altered: Altered) -> None:
        """Rename columns, and add those that have a value in the existing rows."""
        place, sources, version = self.place(altered.version), altered.sources, altered.version
        known, stored = self.known.get(place), self._database.columns(cut, place)
        if known is None or not stored:
            return
        values, quoted = self._of(version), self._database.quoted
        moved = {name: was for name, was in sources.items() if name != was and was in stored}
        # Columns that were dropped, and whose names others take.
        taken = (moved.keys() | altered.missing.keys()) & stored.keys() - set(moved.values())
        steps = [f"DROP COLUMN {quoted(name)}" for name in sorted(taken)]
        # By way of other names, because two columns may exchange theirs.
        ways = {name: f"{_MOVING}{n}" for n, name in enumerate(moved)}
        steps += [f"RENAME COLUMN {quoted(moved[name])} TO {quoted(ways[name])}" for name in moved]
        steps += [f"RENAME COLUMN {quoted(ways[name])} TO {quoted(name)}" for name in moved]
        steps += [f"ADD COLUMN {quoted(name)} {values[name].type}" for name in altered.missing]
        for step in steps:
            self._alter_in_cut(cut, place, step)
        past = taken | {*moved.values()}
        known.columns = {
            **{name: kind for name, kind in known.columns.items() if name not in past},
            **{name: known.columns.get(was, stored[was]) for name, was in moved.items()},
            **{name: values[name].type for name in altered.missing},
        }
        given = {name: json for name, json in altered.missing.items() if json != b"null"}
        if given:
            marks = [f"{quoted(name)} = {self._bound(values[name].type)}" for name in given]
            row = {name: msgspec.Raw(json) for name, json in given.items()}
            decoded = DECODE(msgspec.json.encode(row))
            cut.exec_driver_sql(
                f"UPDATE {place} SET {', '.join(marks)}",  # noqa: S608 - quoted names
                tuple(values[name].stored(decoded.get(name)) for name in given),
            )

    def _alter_in_cut(self, cut: Connection, place: str, step: str) -> None:
        """Change a table's columns after rows of the cut were written.

        Postgres refuses that while it still has to check deferred constraints of the table.
        """
        try:
            with cut.begin_nested():
                self._alter(cut, place, step)
        except CDCError as error:
            if not is_in_use(error):
                raise
            cut.exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE")
            self._alter(cut, place, step)
            cut.exec_driver_sql("SET CONSTRAINTS ALL DEFERRED")

    def _create(
        self, cut: Connection, version: Version, key: tuple[str, ...], wanted: dict[str, str]
    ) -> None:
        self.create_schema(cut, self._schema_of(version))
        quoted = self._database.quoted
        columns = [f"{quoted(name)} {kind}" for name, kind in wanted.items()]
        columns += [f"{SEQ} bigint NOT NULL", f"PRIMARY KEY ({', '.join(map(quoted, key))})"]
        cut.exec_driver_sql(f"CREATE TABLE {self.place(version)} ({', '.join(columns)})")

    def create_schema(self, connection: Connection, schema: str) -> None:
        """Create a schema that is missing."""
        if schema and not inspect(connection).has_schema(schema):
            self._database.create_alone(connection)
            named = self._database.quoted(schema)
            connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {named}")

    def _convert(self, cut: Connection, place: str, column: str, kind: str) -> None:
        """Give a column of Postgres another type, or text if a value is none of that type."""
        try:
            with cut.begin_nested():
                self._alter(cut, place, f"ALTER {column} TYPE {kind} USING {column}::text::{kind}")
        except CDCError as error:
            if not is_data_error(error):
                raise
            self._alter(cut, place, f"ALTER {column} TYPE text USING {column}::text")

    def _replace(self, cut: Connection, place: str, column: str, kind: str) -> None:
        """Give a column of SQLite another type: another column takes its place."""
        driver: Any = cut.connection.driver_connection
        driver.create_function("exact", 1, _exact)
        new = f"{SEQ}_new"
        self._alter(cut, place, f"ADD COLUMN {new} {kind}")
        cut.exec_driver_sql(f"UPDATE {place} SET {new} = exact({column})")  # noqa: S608 - quoted names
        self._alter(cut, place, f"DROP COLUMN {column}")
        self._alter(cut, place, f"RENAME COLUMN {new} TO {column}")

    def _alter(self, cut: Connection, place: str, change: str) -> None:
        cut.exec_driver_sql(f"ALTER TABLE {place} {change}")

    # --- rows ---

    def truncate(self, cut: Connection, version: Version, seq: int) -> None:
        """Delete the rows below a seq."""
        if self.has(version):
            below = f"DELETE FROM {self.place(version)} WHERE {SEQ} < {self._database.mark}"  # noqa: S608 - a quoted name
            cut.exec_driver_sql(below, (seq,))

    def write(self, cut: Connection, version: Version, changes: Sequence[Change]) -> None:
        """Delete and write rows of one version, each only if it is newer than the stored one."""
        types = self._database.columns(cut, self.place(version))
        groups: dict[tuple[str, ...] | None, list[Change]] = {}
        for change in changes:
            groups.setdefault(None if change.row is None else change.unchanged, []).append(change)
        for unchanged, group in sorted(groups.items(), key=lambda each: each[0] is not None):
            if unchanged is not None:
                self._upsert(cut, version, types, unchanged, group)
                continue
            cut.exec_driver_sql(
                f"DELETE FROM {self.place(version)} WHERE {self._is_key(version, types)}"  # noqa: S608 - quoted names
                f" AND {SEQ} < {self._database.mark}",
                [(*self._key(version, each.key, each.before), each.seq) for each in group],
            )

    def _upsert(
        self,
        cut: Connection,
        version: Version,
        types: Mapping[str, str],
        unchanged: tuple[str, ...],
        changes: Sequence[Change],
    ) -> None:
        values = self._of(version)
        written = [name for name in values if name not in unchanged]
        marks = [*(self._bound(types[name]) for name in written), self._database.mark]
        rows = []
        for change in changes:
            row = DECODE(change.row or b"{}")
            rows.append((*(values[name].stored(row.get(name)) for name in written), change.seq))
        cut.exec_driver_sql(self._insert(version, written, marks), rows)

    def take(self, cut: Connection, version: Version, loaded: str) -> int:
        """Write the rows of another table of Postgres, its quoted name; return how many are new."""
        types, names = self._database.columns(cut, self.place(version)), [*self._of(version)]
        made = [f"CAST({self._database.quoted(name)} AS {types[name]})" for name in names]
        return cut.exec_driver_sql(self._insert(version, names, [*made, SEQ], loaded)).rowcount

    def _insert(
        self, version: Version, written: Sequence[str], made: Sequence[str], source: str = ""
    ) -> str:
        """Return the statement that writes rows: these columns and the seq, `made` of a `source`.

        A row that is not newer than the stored one has no effect. A column that the version lacks
        becomes NULL.
        """
        quoted, known, values = self._database.quoted, self.known, self._of(version)
        lost = [name for name in known[self.place(version)].columns if name not in values]
        columns = [*map(quoted, (*lost, *written)), SEQ]
        listed = ", ".join([*["NULL"] * len(lost), *made])
        rows = f"SELECT {listed} FROM {source}" if source else f"VALUES ({listed})"  # noqa: S608 - quoted names
        return (
            f"INSERT INTO {self.place(version)} AS t ({', '.join(columns)}) {rows}"
            f" ON CONFLICT ({', '.join(map(quoted, version.key))}) DO UPDATE SET"
            f" {', '.join(f'{each} = excluded.{each}' for each in columns)}"
            f" WHERE t.{SEQ} < excluded.{SEQ}"
        )

    def named(self, connection: Connection, like: Version, prefix: str) -> list[str]:
        """Return the tables of Postgres next to another one whose names start with `prefix`."""
        schema = self._schema_of(like)
        found = inspect(connection).get_table_names(schema)
        return [self._database.quoted(schema, each) for each in found if each.startswith(prefix)]

    def rows(
        self, connection: Connection, version: Version, keys: Sequence[bytes]
    ) -> dict[bytes, bytes]:
        """Return the stored rows of keys."""
        types, values = self._database.columns(connection, self.place(version)), self._of(version)
        names = self._names(version, types)
        if not names:
            return {}
        where = self._is_key(version, types)
        query = f"{self._select(version, names)} WHERE {where}"
        found = {}
        for key in keys:
            row = connection.exec_driver_sql(query, self._key(version, key)).first()
            if row is not None:
                pairs = zip(names, row, strict=True)
                found[key] = msgspec.json.encode({n: values[n].json(v) for n, v in pairs})
        return found

    def contents(
        self, connection: Connection, version: Version
    ) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield each row's key, its seq and the row."""
        values = self._of(version)
        names = self._names(version, self._database.columns(connection, self.place(version)))
        if not names:
            return
        for *row, seq in connection.exec_driver_sql(self._select(version, names, f", {SEQ}")):
            made = {n: values[n].json(v) for n, v in zip(names, row, strict=True)}
            key = msgspec.json.encode({name: made[name] for name in version.key})
            yield key, seq, msgspec.json.encode(made)

    def _names(self, version: Version, types: Mapping[str, str]) -> list[str]:
        """Return the stored columns of a version; none if its key is not among them."""
        names = [name for name in self._of(version) if name in types]
        return names if set(version.key) <= set(names) else []

    def _select(self, version: Version, names: Sequence[str], more: str = "") -> str:
        # A cast to text would trim char(n).
        text = "CASE WHEN {0} IS NOT NULL THEN concat({0}) END"
        shown = text if self._database.is_postgres else "{0}"
        columns = ", ".join(shown.format(self._database.quoted(name)) for name in names)
        return f"SELECT {columns}{more} FROM {self.place(version)}"  # noqa: S608 - quoted names

    def _key(
        self, version: Version, key: bytes | None, before: bytes | None = None
    ) -> tuple[object, ...]:
        """Return a key's values; of a key that is too long for the log, those of the old row."""
        found = DECODE(key or b"{}")
        if before and not found.keys() >= set(version.key):
            found = DECODE(before)
        return tuple(self._of(version)[name].stored(found.get(name)) for name in version.key)

    def _is_key(self, version: Version, types: Mapping[str, str]) -> str:
        bound = {self._database.quoted(name): self._bound(types[name]) for name in version.key}
        return " AND ".join(f"{name} = {mark}" for name, mark in bound.items())

    def _bound(self, kind: str) -> str:
        return f"CAST(%s AS {kind})" if self._database.is_postgres else "?"

    def _schema_of(self, version: Version) -> str:
        return self._schema or (version.schema if self._database.is_postgres else "")

    def _of(self, version: Version) -> dict[str, ColumnValues]:
        """Return the conversions of a version's columns."""
        at = version.name, version.schema_id
        known = self._values.get(at)
        # A view has other columns with another definition, and the same schema_id.
        if known is None or (known[0] is not version and known[0] != version):
            postgres, options = self._database.is_postgres, version.values
            made = {c.name: ColumnValues(c, options, postgres=postgres) for c in version.columns}
            self._values[at] = known = version, made
        return known[1]


def _exact(value: object) -> object:
    """Return a value of SQLite without a loss where it becomes text."""
    if isinstance(value, float):
        return text8(value).decode()
    return f"\\x{value.hex()}" if isinstance(value, bytes) else value
