"""view-timeline: home timelines in Redis, while tweets are written at a steady rate.

Ten thousand users follow twenty others each, few of whom have most of the followers. A view has
the newest hundred tweets of each follower; a follower keeps it in Redis. The figure is the p99 of
the time from the commit of a tweet until the frontier with it is in Redis, where every timeline
has it. `rows_per_change` is how many rows of timelines a tweet changes, and `of_full` the CPU time
of a cut by that of computing all timelines over the same mirrors.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import orjson

from benchmarks import follow_redis, result, servers, slots
from benchmarks.arrivals import percentiles
from benchmarks.failure import BenchmarkError
from benchmarks.follow_run import FOLLOWER
from benchmarks.follow_server import RUN
from benchmarks.latency import POSTGRES
from benchmarks.progress import say
from benchmarks.topics import Topics
from benchmarks.view_run import ViewRun
from benchmarks.watching import watching

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import psycopg

    from benchmarks.family import Family
    from benchmarks.follow_redis import RedisStore
    from benchmarks.options import Options
    from benchmarks.servers import Servers

NAME: Final = "view-timeline"
LIMIT_MS: Final = 5_000.0
_USERS: Final = 10_000
_FOLLOWED: Final = 20
_TWEETS: Final = 20_000
_RATE: Final = 200
_NEWEST: Final = 100
_TRANSACTION_ROWS: Final = 20_000
# A mirror that commits as often as it can, some twenty times a second, takes a third of a core.
_MIRROR_SECONDS: Final = 0.5
# A Kafka transaction for each tweet would take as much of two cores as the follower does.
_LINGER_MS: Final = 50
_LOOK_SECONDS: Final = 0.02
_CHECKED: Final = 20  # timelines that are compared with Postgres at the end
_TABLES: Final = {
    "tweets": "id bigint PRIMARY KEY, author_id int NOT NULL, body text, at timestamptz NOT NULL",
    "follows": "follower_id int, followee_id int, PRIMARY KEY (follower_id, followee_id)",
}
_TIMELINES: Final = f"""
    SELECT follower_id, tweet_id, body, at FROM (
      SELECT f.follower_id, t.id AS tweet_id, t.body, t.at,
        row_number() OVER (PARTITION BY f.follower_id ORDER BY t.at DESC, t.id DESC) AS place
      FROM tweets t JOIN follows f ON f.followee_id = t.author_id) AS x
    WHERE place <= {_NEWEST}"""
_VIEWS: Final = {"timeline": {"sql": _TIMELINES, "key": ["follower_id", "tweet_id"]}}
_SHAPE: Final = {
    "form": "zset",
    "key": "timeline:{follower_id}",
    "member": "{tweet_id}",
    "score": "at",
}
_TWEET: Final = "{i}, ({i}::bigint * 7919 % {users})::int, 'what ' || {i}, clock_timestamp()"
# The cube of an even distribution: a tenth of the users have half of the followers.
_FOLLOWS: Final = """
    INSERT INTO follows SELECT DISTINCT u, ({users} * power(random(), 3))::int % {users}
    FROM generate_series({first}, {last}) u, generate_series(1, {followed})"""


def run(options: Options) -> dict[str, Any]:
    """Run the workload and return its result."""
    users = options.rows or _USERS
    with (
        servers.running(NAME, POSTGRES, keep=options.keep) as up,
        up.connect() as connection,
        follow_redis.running(up.place.folder / "store") as store,
    ):
        store.section["redis"]["shapes"] = {"views.timeline": _SHAPE}
        shown = ViewRun(up, connection, _TABLES, _VIEWS, store, _MIRROR_SECONDS, _LINGER_MS)
        with slots.created(connection, RUN), shown.mirrored():
            _fill(shown, users)
            shown.wait_for_mirrors()
            with shown.viewed() as family:
                found = _Rate(up, shown, store, users, options).measured(family)
            full = shown.recomputed()["timeline"]
        _check(connection, store, users)
        return result.build(
            name=NAME,
            unit="ms (p99)",
            value=found["p99_ms"],
            limit=LIMIT_MS,
            floor=None,
            peer=None,
            cpu_s_per_million=found["cpu_s"] / found["tweets"] * 1e6,
            peak_rss_mb=max(shown.peaks_mb.values()),
            versions={**up.versions, "redis": store.version()},
            details={
                **found,
                "users": users,
                "rate": _RATE,
                "mirror_every_seconds": _MIRROR_SECONDS,
                "linger_ms": _LINGER_MS,
                "of_full": round(found["cpu_s"] / found["cuts"] / full["cpu_s"], 2),
                "full": full,
                "peaks_mb": shown.peaks_mb,
            },
        )


def _fill(shown: ViewRun, users: int) -> None:
    tweets = users * _TWEETS // _USERS
    say(f"{users:,} users, {tweets:,} tweets")
    for first in range(0, users, 1_000):
        last = min(first + 1_000, users) - 1
        shown.execute(
            [_FOLLOWS.format(users=users, first=first, last=last, followed=_FOLLOWED)],
        )
    for first in range(0, tweets, _TRANSACTION_ROWS):
        last = min(first + _TRANSACTION_ROWS, tweets) - 1
        values = _TWEET.format(i="i", users=users)
        series = f"generate_series({first}, {last}) i"
        shown.execute([f"INSERT INTO tweets SELECT {values} FROM {series}"])


class _Rate:
    """Tweets at a rate, and when Redis has them."""

    def __init__(
        self, up: Servers, shown: ViewRun, store: RedisStore, users: int, options: Options
    ) -> None:
        self._up, self._shown, self._store = up, shown, store
        self._users, self._options = users, options
        self._committed = list[tuple[int, float]]()  # seq, and when its commit began
        self._seen = list[tuple[int, float]]()

    def measured(self, family: Family) -> dict[str, Any]:
        """Write tweets; return the figures of those after the warm-up."""
        options = self._options
        warm_up = int(_RATE * options.warm_up_seconds)
        with self._looking():
            self._write(warm_up)
            events, used = self._events(), family_cpu(family)
            many, cuts = int(_RATE * options.seconds), len(self._seen)
            self._write(many)
            cpu_s = family_cpu(family) - used
            cuts = len(self._seen) - cuts
            last = self._committed[-1][0]
            while not self._seen or self._seen[-1][0] < last:
                time.sleep(_LOOK_SECONDS)
        changed = self._events() - events
        seqs = [seq for seq, _ in self._seen]
        waited = [
            (self._seen[bisect_left(seqs, seq)][1] - at) * 1e3
            for seq, at in self._committed[warm_up:]
        ]
        return {
            **asdict(percentiles(waited)),
            "tweets": many,
            "cuts": cuts,
            "cpu_s": round(cpu_s, 2),
            "rows_per_change": round(changed / many, 1),
        }

    def _write(self, count: int) -> None:
        """Insert tweets at the rate, in an open loop."""
        began, next_id = time.monotonic(), 10**9 + len(self._committed)
        for number in range(count):
            time.sleep(max(0.0, began + number / _RATE - time.monotonic()))
            at = time.monotonic()
            values = _TWEET.format(i=next_id + number, users=self._users)
            self._shown.execute([f"INSERT INTO tweets VALUES ({values})"])
            self._committed.append((self._shown.seq, at))

    def _looking(self) -> AbstractContextManager[None]:
        """Note when the store is at which seq, for the duration of the block."""
        return watching(
            self._store.seq,
            lambda seq: self._seen.append((seq, time.monotonic())),
            _LOOK_SECONDS,
        )

    def _events(self) -> int:
        """Return how many rows the follower has changed, by its newest report."""
        reports = [
            orjson.loads(each.value() or b"{}")
            for each in Topics(self._up.bootstrap).read(f"{RUN}.cdc.followers")
        ]
        of_ours = (each["events"] for each in reversed(reports) if each["follower"] == FOLLOWER)
        return int(next(of_ours))


def _check(connection: psycopg.Connection, store: RedisStore, users: int) -> None:
    """Raise BenchmarkError unless some timelines are Postgres' own."""
    for user in range(0, users, max(1, users // _CHECKED)):
        sql = f"SELECT tweet_id FROM ({_TIMELINES}) AS v WHERE follower_id = {user}"
        wanted = {str(row[0]) for row in connection.execute(sql.encode())}
        if store.members(f"timeline:{user}") != wanted:
            raise BenchmarkError(
                f"the timeline of {user} is not Postgres'", hint="no figure counts"
            )


def family_cpu(family: Family) -> float:
    family.look()
    return family.cpu_seconds
