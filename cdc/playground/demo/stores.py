"""Prove that the followers' stores equal the database: read each as its own readers would.

As the log's proof, this one needs a quiet database: nothing writes. Redis and OpenSearch hold rows
as the log's JSON; a mirror's typed values are converted to the same form here, except for a few
that the database returns in the mirror's form. The sinks' code is not used: the stores are read as
docs/FOLLOWERS.md describes it.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from cdc.config.stores import follows
from cdc.errors import UnavailableError
from cdc.log import names
from cdc.log.follower_reports import FollowerRecord, Readings
from cdc.playground.demo import database
from cdc.playground.demo.proof import compare, copied_elsewhere
from cdc.playground.demo.views import compare_views
from cdc.verify.events import TableState, canonical
from cdc.verify.frontiers import Findings

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.config.followers import Follower
    from cdc.events import LSN
    from cdc.verify.events import Row

# How long to wait without a report of progress: Spark may just have been killed, and starts slowly.
WAIT_SECONDS: Final = 300.0
_READ_SECONDS: Final = 0.2
_PAGE: Final = 1_000
_NAIVE_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - of timestamps without a zone
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_EXACT: Final = "_exact"
# Below this, Postgres writes integers without a point, from it on with an exponent.
_EXACT_INTEGERS: Final = 1e15

Read = Callable[[database.ComparedTable], Iterator["Row"]]


class FollowersProof(NamedTuple):
    """The outcome: `findings` is empty if and only if every store equals the database."""

    equal: bool
    lsn: LSN
    rows: dict[str, int]  # by follower, how many the database has of its tables
    findings: tuple[str, ...]
    examples: tuple[str, ...] = ()  # a value of each view, as its store has it


def prove_followers(
    config: Config, reached: LSN, *, wait_seconds: float = WAIT_SECONDS
) -> FollowersProof:
    """Wait until every follower has applied `reached`, then compare its store with the database."""
    findings = Findings()
    rows: dict[str, int] = {}
    examples: list[str] = []
    late = _wait(config, reached, wait_seconds)
    for name, follower in config.followers.items():
        if name in late:
            findings.add(f"{name}: {late[name]}")
            continue
        rows[name], found = _compare(config, name, follower, findings)
        examples += found
    sentences = findings.sentences()
    return FollowersProof(not sentences, reached, rows, sentences, tuple(examples))


def _wait(config: Config, reached: LSN, seconds: float) -> dict[str, str]:
    """Return which followers have not applied it, with their last reports.

    They are given up when none of them has moved for `seconds`.
    """
    readings = Readings(config)
    deadline, last_progress = 0.0, None
    try:
        while True:
            with suppress(UnavailableError):  # a broker that was killed
                readings.wait(_READ_SECONDS)
            late = [
                name
                for name in config.followers
                if name not in readings.newest or readings.newest[name].lsn < reached
            ]
            reports = {name: readings.newest.get(name) for name in late}
            progress = {name: each.seq for name, each in reports.items() if each}
            if progress != last_progress:
                deadline, last_progress = time.monotonic() + seconds, progress
            if not late or time.monotonic() > deadline:
                return {
                    name: _progress_of(each, reached, seconds) for name, each in reports.items()
                }
    finally:
        readings.close()


def _progress_of(record: FollowerRecord | None, reached: LSN, seconds: float) -> str:
    text = f"not compared: it has not reached {reached}, and not moved for {seconds:.0f} s"
    if record is None:
        return f"{text}: it has never reported"
    return f"{text}: it is {record.state} at {record.lsn}. {record.what} {record.hint}".strip()


def _compare(
    config: Config, name: str, follower: Follower, findings: Findings
) -> tuple[int, tuple[str, ...]]:
    """Return how many rows the database has, and examples of views."""
    if follower.views:
        with database.snapshot(config) as connection:
            return compare_views(connection, name, follower, findings)
    if follower.delta is not None:
        read, forms = _mirrors(config, follower), database.MIRROR
    elif follower.redis is not None:
        read, forms = _redis(config, follower), {}
    else:
        read, forms = _opensearch(config, follower), {}
    count = 0
    with database.snapshot(config) as connection:
        for table in database.published(connection, config.publication, forms):
            if not follows(follower, table.schema, table.table):
                continue
            # Rows that are not in the log are in no other store than Delta Lake.
            complete_rows = (
                follower.delta is not None or copied_elsewhere(config, *table[:2]) is None
            )
            state = TableState(name, *table[:2], complete=complete_rows)
            for row in read(table):
                if table.key:
                    state.rows[orjson.dumps({each: row.get(each) for each in table.key})] = row
                else:
                    state.keyless[canonical(row)] += 1
            count += compare(state, table, connection, findings, name)
    return count, ()


def _redis(config: Config, follower: Follower) -> Read:
    """Read complete rows under `<prefix>:<schema>.<table>:<key>`."""
    import redis  # noqa: PLC0415 - a store's client, only where it is followed

    assert follower.redis is not None
    prefix = follower.redis.prefix or config.prefix
    client: redis.Redis = redis.Redis.from_url(follower.redis.url)

    def read(table: database.ComparedTable) -> Iterator[Row]:
        for key in client.scan_iter(match=f"{prefix}:{table.name}:*", count=_PAGE):
            yield orjson.loads(client.get(key) or b"null")

    return read


def _opensearch(config: Config, follower: Follower) -> Read:
    """Read the documents of the alias `<prefix>-<schema>.<table>`."""
    from opensearchpy import OpenSearch  # noqa: PLC0415 - as above
    from opensearchpy.helpers import scan  # noqa: PLC0415

    assert follower.opensearch is not None
    prefix = follower.opensearch.prefix or config.prefix
    client = OpenSearch(follower.opensearch.url)

    def read(table: database.ComparedTable) -> Iterator[Row]:
        for found in scan(client, index=f"{prefix}-{table.name}", size=_PAGE):
            yield found["_source"]

    return read


def _mirrors(config: Config, follower: Follower) -> Read:
    """Read each mirror at the version that the newest frontier names."""
    from deltalake import DeltaTable  # noqa: PLC0415 - as above

    assert follower.delta is not None
    root = follower.delta.path or config.delta.path
    frontiers = DeltaTable(f"{root}/_frontiers").to_pyarrow_table().to_pylist()
    newest = max(frontiers, key=lambda row: (row["generation"], row["seq"], row["lsn"]))
    full = newest
    if newest["versions"] is None:  # the row has what differs from a full one
        place = newest["generation"], newest["full_seq"], newest["full_lsn"]
        rows = (row for row in frontiers if row["versions"] is not None and row["is_whole"])
        full = next(row for row in rows if (row["generation"], row["seq"], row["lsn"]) == place)
    versions = {**dict(full["versions"]), **dict(newest["changed"] or ())}

    def read(table: database.ComparedTable) -> Iterator[Row]:
        topic = names.data_topic(config.prefix, table.schema, table.table)
        place = topic.removeprefix(f"{config.prefix}.")
        if place not in versions:  # no event of it has ever arrived
            return
        mirror = DeltaTable(f"{root}/{place}", version=versions[place]).to_pyarrow_table()
        for row in mirror.to_pylist():
            exact = dict(row[_EXACT] or ())
            yield {each: exact.get(each, form(row[each])) for each in table.columns}

    return read


def form(value: Any) -> Any:  # noqa: ANN401, PLR0911 - any type's; one line a type
    """Return a mirror's value in the log's form."""
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
        case float() if value.is_integer() and abs(value) < _EXACT_INTEGERS:
            return int(value)
        case Decimal():
            return format(value, "f")
        case bytes():
            return base64.b64encode(value).decode()
        case datetime():
            return (value - (_EPOCH if value.tzinfo else _NAIVE_EPOCH)) // _MICROSECOND
        case date():
            return (value - _EPOCH.date()).days
        case list():
            return [form(each) for each in value]
    return value
