"""Read what followers have stored, as docs/FOLLOWERS.md describes it for readers: state by state.

A reading is a frontier with all rows of the load's tables at it, in the common form of
`follower_rows`; or None where the store shows that it is at no frontier at the moment.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import orjson
import psycopg
import pyarrow as pa
import redis
import requests
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import TableNotFoundError

from tests.faults.follower_rows import TABLES, TICKS, State, database_rows, plain

_PAGE: Final = 10_000
_FRONTIER: Final = "SELECT generation, seq FROM lockstep_frontiers"
_SECONDS: Final = 30.0
# All keys of the tables at one moment, with the follower's record.
SNAPSHOT: Final = """
local keys = redis.call('KEYS', ARGV[1])
local values = {}
for i, key in ipairs(keys) do values[i] = redis.call('GET', key) end
return {redis.call('HGETALL', KEYS[1]), keys, values}
"""


class Reading(NamedTuple):
    """One state that a store had."""

    generation: int
    seq: int
    state: State


def _empty() -> State:
    return {table: [] for table in TABLES}


def redis_state(
    client: Any,  # noqa: ANN401 - of redis
    main: str,
    pattern: str,
) -> tuple[dict[bytes, bytes], list[tuple[bytes, bytes]]] | None:
    """Return a follower's fields, and keys with their values, read in one moment.

    None where it is at no frontier, or the server is down.
    """
    try:
        fields, keys, values = client.eval(SNAPSHOT, 1, main, pattern)
    except redis.RedisError:
        return None
    reported = dict(zip(fields[::2], fields[1::2], strict=True))
    if reported.get(b"applying") or not reported.get(b"seq"):
        return None
    return reported, list(zip(keys, values, strict=True))


class Redis:
    """A follower's keys: complete rows under their default names."""

    def __init__(self, url: str, prefix: str, follower: str) -> None:
        self.client: Any = redis.Redis.from_url(url, socket_timeout=_SECONDS, retry=None)
        self._prefix, self._main = prefix, f"{prefix}:cdc:{follower}"

    def read(self) -> Reading | None:
        """Return the current state; None where it is at no frontier, or the server is down."""
        found = redis_state(self.client, self._main, f"{self._prefix}:public.*")
        if found is None:
            return None
        reported, rows = found
        state = _empty()
        for key, value in rows:
            table = key.decode().removeprefix(f"{self._prefix}:public.").partition(":")[0]
            state[table].append(plain(table, orjson.loads(value)))
        return Reading(int(reported[b"generation"]), int(reported[b"seq"]), state)


class OpenSearch:
    """A follower's documents, by the default aliases."""

    def __init__(self, url: str, prefix: str, follower: str) -> None:
        self.url = url
        self._prefix = prefix
        self._record = f"{url}/{prefix}-followers/_doc/{follower}"
        self._http = requests.Session()

    def read(self) -> Reading | None:
        """Return the current state, if the frontier is the same before and after the search."""
        try:
            before = self._applied()
            if before is None:
                return None
            state = self._search()
            return Reading(*before, state) if state and self._applied() == before else None
        except (requests.RequestException, ValueError):
            return None

    def _applied(self) -> tuple[int, int] | None:
        answer = self._http.get(self._record, timeout=_SECONDS)
        reported = answer.json().get("_source") or {}
        if answer.status_code != requests.codes.ok or reported["applying"] is not None:
            return None
        return None if reported["seq"] is None else (reported["generation"], reported["seq"])

    def _search(self) -> State | None:
        body = b""
        for table in TABLES:
            body += orjson.dumps({"index": f"{self._prefix}-public.{table}"}) + b"\n"
            body += orjson.dumps({"size": _PAGE, "query": {"match_all": {}}}) + b"\n"
        answer = self._http.post(
            f"{self.url}/_msearch",
            data=body,
            headers={"Content-Type": "application/x-ndjson"},
            timeout=_SECONDS,
        )
        answer.raise_for_status()
        state = _empty()
        for table, found in zip(TABLES, orjson.loads(answer.content)["responses"], strict=True):
            if "hits" not in found:  # the index is deleted: no state
                return None
            assert found["hits"]["total"]["value"] < _PAGE, "more documents than one page"
            rows = (hit["_source"] for hit in found["hits"]["hits"])
            state[table] = [plain(table, row) for row in rows]
        return state


class Delta:
    """A follower's mirrors, at any of the frontiers that they have reached."""

    def __init__(self, path: Path, only: Mapping[str, str] = MappingProxyType({})) -> None:
        """`only` has conditions of those rows of a mirror that the table has, too."""
        self._path, self._only = path, only
        self._tables: dict[str, DeltaTable] = {}

    def read(self) -> Reading | None:
        """Return the newest state."""
        rows = self.frontiers()
        return self.at(max(rows, key=lambda row: (row["generation"], row["seq"]))) if rows else None

    def any(self, chance: random.Random) -> Reading | None:
        """Return the state at a random frontier."""
        rows = self.frontiers()
        return self.at(chance.choice(rows)) if rows else None

    def frontiers(self) -> list[dict[str, Any]]:
        try:
            table = self._opened("_frontiers")
        except TableNotFoundError:
            return []
        table.update_incremental()
        found: list[dict[str, Any]] = table.to_pyarrow_table().to_pylist()
        full = {
            (row["generation"], row["seq"], row["lsn"]): dict(row["versions"])
            for row in found
            if row["versions"] is not None and row["is_whole"]
        }
        for row in found:
            if row["versions"] is None:
                before = full[row["generation"], row["full_seq"], row["full_lsn"]]
                row["versions"] = [*{**before, **dict(row["changed"])}.items()]
        return found

    def at(self, row: dict[str, Any]) -> Reading:
        state = _empty()
        for name, version in row["versions"]:
            table = name.removeprefix("public.")
            if table not in state and name != TICKS:
                continue
            mirror = self._opened(name)
            mirror.load_as_version(version)
            # Mirrors that had a large cut have deletion vectors.
            found = (
                QueryBuilder()
                .register("t", mirror)
                .execute(
                    f"SELECT {', '.join(TABLES.get(table, ())) or '*'} FROM t"
                    f" WHERE {self._only.get(table, 'true')}"
                )
            )
            rows = pa.table(found.read_all()).to_pylist()
            state[table] = rows if name == TICKS else [plain(table, each) for each in rows]
        return Reading(row["generation"], row["seq"], state)

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Return all rows of a mirror at the newest frontier, with its own columns."""
        name = f"public.{table}"
        newest = max(self.frontiers(), key=lambda row: (row["generation"], row["seq"]))
        mirror = self._opened(name)
        mirror.load_as_version(dict(newest["versions"])[name])
        found = QueryBuilder().register("t", mirror).execute("SELECT * FROM t")
        rows: list[dict[str, Any]] = pa.table(found.read_all()).to_pylist()
        return rows

    def _opened(self, name: str) -> DeltaTable:
        if name not in self._tables:
            self._tables[name] = DeltaTable(str(self._path / name))
        return self._tables[name]

    def forget(self) -> None:
        """Open all tables again: they may have been replaced."""
        self._tables.clear()


class Postgres:
    """A follower's tables in a database of its own, read in one transaction."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def read(self) -> Reading | None:
        """Return the current state; None before the first cut, or if the server is down."""
        state = _empty()
        try:
            with psycopg.connect(self._dsn, connect_timeout=int(_SECONDS)) as connection:
                connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                # Before the snapshot: a catalog that has changed since would be that of other rows.
                connection.execute("LOCK TABLE shapes, summer, winter IN ACCESS SHARE MODE")
                applied = connection.execute(_FRONTIER).fetchone()
                if applied is None or applied[1] is None:
                    return None
                for table, row in database_rows(connection):
                    state[table].append(row)
        except (psycopg.OperationalError, psycopg.errors.UndefinedTable):
            return None
        return Reading(applied[0], applied[1], state)


class Sqlite:
    """A follower's tables in a file, read in one transaction."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self) -> Reading | None:
        """Return the current state; None before the first cut, or while a cut is written."""
        if not self._file.exists():
            return None
        state = _empty()
        try:
            with closing(sqlite3.connect(self._file, timeout=_SECONDS)) as connection:
                connection.execute("BEGIN")
                applied = connection.execute(_FRONTIER).fetchone()
                if applied is None or applied[1] is None:
                    return None
                for table, kinds in TABLES.items():
                    found = connection.execute(f"SELECT {', '.join(kinds) or '*'} FROM {table}")
                    names = [each[0] for each in found.description]
                    rows = (dict(zip(names, values, strict=True)) for values in found)
                    state[table] = [plain(table, row) for row in rows]
        except sqlite3.OperationalError:
            return None
        return Reading(applied[0], applied[1], state)


class Topics:
    """A follower's topics, read on and on by a consumer of committed records."""

    def __init__(self, bootstrap: str, prefix: str) -> None:
        self._settings = {
            "bootstrap.servers": bootstrap,
            "group.id": "a-reader",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
        self._own, self._prefix = f"{prefix}.cdc.follower", prefix
        self._consumer: Consumer | None = None
        self._waiting: dict[tuple[str, int], list[Message]] = {}
        self._rows: dict[str, dict[bytes, Any]] = {}
        self._frontier: dict[str, Any] = {}
        self._reached: dict[tuple[str, int], int] = {}  # up to which offset all has arrived

    def read(self) -> Reading | None:
        """Return the state at the newest frontier whose records are here; None before the first."""
        try:
            self._take()
        except KafkaException:
            return None
        if not self._frontier.get("seq"):
            return None
        state = _empty()
        for table, rows in self._rows.items():
            if (name := table.removeprefix("public.")) in state:
                state[name] = [plain(name, row) for row in rows.values()]
        return Reading(self._frontier["generation"], self._frontier["seq"], state)

    def rows(self, table: str) -> list[Any]:
        """Return a table's rows at that frontier."""
        return list(self._rows.get(table, {}).values())

    def _take(self) -> None:
        consumer = self._consumer = self._consumer or Consumer(self._settings)
        assigned = {(each.topic, each.partition) for each in consumer.assignment()}
        known = consumer.list_topics(timeout=_SECONDS).topics
        new = [
            TopicPartition(topic, number, 0)
            for topic, its in known.items()
            if topic.startswith(f"{self._prefix}.")
            for number in its.partitions
            if (topic, number) not in assigned
        ]
        consumer.incremental_assign(new)
        for message in consumer.consume(10_000, timeout=0.5):
            error, place = message.error(), (str(message.topic()), int(message.partition() or 0))
            if error is None:
                self._reached[place] = int(message.offset() or 0) + 1
            elif error.code() == KafkaError._PARTITION_EOF:
                self._reached[place] = int(message.offset() or 0)
            if error is None:
                self._waiting.setdefault(place, []).append(message)
        frontiers = self._waiting.get((self._own, 0), [])
        while frontiers:
            record = frontiers[0]
            if record.key() == b"frontier" and not self._apply(orjson.loads(record.value() or b"")):
                return  # the rest of it has not arrived
            del frontiers[0]

    def _apply(self, frontier: dict[str, Any]) -> bool:
        """Take the records below a frontier's ends, unless some have not arrived."""
        found = []
        for name, table in frontier["tables"].items():
            for number, end in enumerate(table["ends"]):
                place = (table["topic"], number)
                if end > self._reached.get(place, 0):
                    return False
                found.append((name, place, end))
        for name, place, end in found:
            waiting = self._waiting.get(place, [])
            count = sum((each.offset() or 0) < end for each in waiting)
            taken, waiting[:count] = waiting[:count], []
            for message in taken:
                key, value = message.key() or b"", message.value()
                rows = self._rows.setdefault(name, {})
                rows.pop(bytes(key), None)
                if value is not None:
                    rows[bytes(key)] = orjson.loads(value)
        self._frontier = frontier
        return True
