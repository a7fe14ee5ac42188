"""`cdc rebuild` as a command, killed anywhere and run again, for each store, while readers read.

A test run executes the plans below. LOCKSTEP_REBUILDS=n adds n more, drawn from LOCKSTEP_SEED: any
store, any options, killed at any failpoint or at any time.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import psutil
import pytest
import redis
from opensearchpy import OpenSearch

from cdc import failpoints
from cdc.errors import UnavailableError
from cdc.log.follower_reports import read
from lockstep.jobs.generations.builders import LogBuilder
from lockstep.jobs.reading_as_of import read_as_of_arrow
from lockstep.sinks.opensearch.reader import OpenSearchReader
from lockstep.sinks.redis.reader import RedisReader
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.followed import Followed
from tests.fixtures.seeds import first_seed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROUNDS: Final = int(os.environ.get("LOCKSTEP_REBUILDS", "0"))
SEED: Final = first_seed("LOCKSTEP_REBUILDS")
TABLES: Final = ("accounts", "entries")
DDL: Final = (
    "CREATE TABLE accounts (id int PRIMARY KEY, name text)",
    "CREATE TABLE entries (id int PRIMARY KEY, account int, note text)",
)
_SECONDS: Final = 600.0
_LOOK_SECONDS: Final = 0.1
_SHOWN: Final = 4_000
_SEEN_FROM: Final = "rebuild_switched"

State = dict[str, dict[str, Any]]


class Plan(NamedTuple):
    """A rebuild: its follower and options, and where it is killed before it may complete."""

    follower: str
    options: tuple[str, ...]
    kills: tuple[str | float, ...]  # a failpoint and its number of passes, or seconds


SAMPLE: Final = (
    Plan("cache", (), ("rebuild_started", _SEEN_FROM)),
    Plan("search", ("--table", "public.entries"), ("follow_written:2",)),
    Plan("lake", (), ("rebuild_switching",)),
    Plan("cache", ("--as-of",), ("follow_started",)),
)


def drawn(chance: random.Random) -> Plan:
    """Return a random plan."""
    options = [(), (), ("--table", "public.entries"), ("--as-of",)]
    names = [*failpoints.FOLLOWER_NAMES[:-1], *failpoints.REBUILD_NAMES]
    kills = [
        f"{chance.choice(names)}:{chance.choice((1, 1, 2, 3))}"
        if chance.random() < 0.6
        else chance.uniform(1, 20)
        for _ in range(chance.randint(1, 3))
    ]
    return Plan(chance.choice(("cache", "search", "lake")), chance.choice(options), tuple(kills))


class Bank(Followed):
    """A pipeline, and a follower in each store, which do not run while they are rebuilt."""

    def __init__(
        self,
        pipeline: PipelineUnderTest,
        spark: SparkSession,
        client: redis.Redis,
        search: OpenSearch,
        folder: Path,
    ) -> None:
        super().__init__(pipeline, spark)
        self._client, self._search = client, search
        self._lake, self._folder = folder / "lake", folder
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self.views: dict[str, Callable[[], State]] = {
            "cache": self._in_redis,
            "search": self._in_opensearch,
            "lake": self._in_delta,
        }

    # -- what readers see -----------------------------------------------------------------------

    def source(self) -> State:
        """Return what the database holds."""
        query = " UNION ALL ".join(
            f"SELECT '{name}', id, row_to_json(t) FROM {name} t" for name in TABLES
        )
        with self.pipeline.database.connect() as connection:
            found = connection.execute(query.encode()).fetchall()
        return _state((table, row) for table, _, row in found)

    def _in_redis(self) -> State:
        def all_rows(client: redis.Redis) -> State:
            names = list(client.scan_iter(f"{self.prefix}:public.*", count=10_000))
            tables = [name.decode().split(":")[1].removeprefix("public.") for name in names]
            values = cast("list[bytes]", client.mget(names))
            # A key was deleted before its value was read: this is no state, and read again.
            return _state((t, json.loads(v)) for t, v in zip(tables, values, strict=True) if v)

        return RedisReader(self._client, self.prefix, "cache").read(all_rows).found

    def _in_opensearch(self) -> State:
        def all_rows(client: OpenSearch) -> State:
            found = []
            for table in TABLES:
                answer = client.search(index=f"{self.prefix}-public.{table}", size=10_000)
                found += [(table, hit["_source"]) for hit in answer["hits"]["hits"]]
            return _state(iter(found))

        return OpenSearchReader(self._search, self.prefix, "search").read(all_rows).found

    def _in_delta(self) -> State:
        names = [f"public.{table}" for table in TABLES]
        found = read_as_of_arrow(str(self._lake), names).tables
        return _state(
            (table, {name: value for name, value in row.items() if name[0] != "_"})
            for table in TABLES
            for row in found[f"public.{table}"].to_pylist()
        )

    @contextmanager
    def watched(self, name: str, *states: State) -> Iterator[None]:
        """Read a store during the block: whatever it shows is one of these states."""
        wrong: list[State] = []
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_LOOK_SECONDS):
                with suppress(UnavailableError):  # it is at no frontier just now
                    wrong.extend(each for each in [self.views[name]()] if each not in states)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()
        assert wrong == [], name

    # -- the command ----------------------------------------------------------------------------

    def rebuild(self, name: str, *options: str, kill: str | float | None = None) -> dict[str, Any]:
        """Run it; return its output, {} if it was killed. None of its processes stays."""
        command = [sys.executable, "-m", "cdc.cli.main", "rebuild", name, *options]
        # The tests' own session has set the executable of its workers.
        env = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"}
        env["TMPDIR"] = str(self.scratch)
        if isinstance(kill, str):
            env["LOCKSTEP_FAILPOINT"] = kill
        log = self._folder / "rebuild.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, "--json", "-c", str(self.pipeline.config_file)],
                stdout=subprocess.PIPE,
                stderr=out,
                env=env,
                start_new_session=True,
            )
        assert process.stdout is not None
        with process.stdout:
            limit = kill if isinstance(kill, float) else _SECONDS
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit)
            process.kill()
            output = process.stdout.read()
        code = process.wait()
        wait_until(lambda: not _of_session(process.pid), "Spark goes on", _SECONDS)
        if kill is None or code != -signal.SIGKILL:
            assert code == 0, log.read_text()[-_SHOWN:]
        return json.loads(output) if code == 0 else {}

    # -- what is left ---------------------------------------------------------------------------

    def left(self, name: str) -> list[str]:
        """Return what a store has other than its rows and the one generation that readers see."""
        if name == "cache":
            return self._left_in_redis()
        if name == "lake":
            wanted = {"_frontiers", *(f"public.{table}" for table in TABLES)}
            inner = self._lake / "_generations"
            return [
                *({each.name for each in self._lake.iterdir()} - wanted - {inner.name}),
                *(str(each) for each in inner.rglob("*")),
            ]
        shown = {f"{self.prefix}-{each}" for each in ("followers", "dead")}
        shown |= {f"{self.prefix}-public.{table}" for table in TABLES}
        found = self._search.indices.get_alias(index=f"{self.prefix}-*")
        return [
            index for index, reported in found.items() if not reported["aliases"].keys() & shown
        ]

    def _left_in_redis(self) -> list[str]:
        main = f"{self.prefix}:cdc:cache"
        fields = cast("dict[bytes, bytes]", self._client.hgetall(main))
        number = fields[b"generation"].decode()
        builds = set(json.loads(fields[f"{number}:builds".encode()]).values())
        found = [
            (each.decode(), re.match(rb".*:~cache[.](\d+)[:=]", each))
            for each in self._client.scan_iter(f"{self.prefix}:*", count=10_000)
        ]
        return [
            *(name for name, match in found if match and int(match[1]) not in builds),
            *(
                str(each)
                for each in fields
                if each[:1].isdigit() and number != each.decode().split(":")[0]
            ),
        ]

    def shadow(self, name: str, number: int) -> State:
        """Return the content of a generation that is not current."""
        applied = self.sink(name).generations()[number]
        assert applied is not None
        builder = LogBuilder(self.config, name, lambda: self.spark, print)
        sink = self.sink(name).at(number)
        sink.open()
        found = [
            (version.table, json.loads(row))
            for version in builder.versions(applied)
            for _, _, row in sink.contents(version)
        ]
        sink.close()
        return _state(iter(found))


def _state(rows: Iterator[tuple[str, dict[str, Any]]]) -> State:
    state: State = {table: {} for table in TABLES}
    for table, row in rows:
        state[table][str(row["id"])] = row
    return state


def _of_session(leader: int) -> list[int]:
    """Return the processes that a process has left in its session."""
    found = []
    for pid in psutil.pids():
        with suppress(psutil.Error, OSError):
            if os.getsid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


@pytest.fixture
def bank(
    pipeline: NewPipeline,
    spark: SparkSession,
    redis_client: redis.Redis,
    redis_url: str,
    opensearch_url: str,
    tmp_path: Path,
) -> Iterator[Bank]:
    # Cuts are small, so that a kill can hit the middle; no canaries, so that only tests write.
    followers: dict[str, object] = {
        "cache": {"redis": {"url": redis_url}, "max_events": 200},
        "search": {"opensearch": {"url": opensearch_url}, "max_events": 200},
        "lake": {"delta": {"path": str(tmp_path / "lake")}, "max_events": 200},
    }
    made = pipeline(*DDL, followers=followers, source={"canary_seconds": 0})
    made.start().wait_ready()
    with OpenSearch(opensearch_url, timeout=60) as search:
        yield Bank(made, spark, redis_client, search, tmp_path)
        search.indices.delete(index=f"{made.config.prefix}-*", ignore_unavailable=True)


def change(bank: Bank, first: int) -> None:
    """Write rows, change others and delete some, in several transactions."""
    for part in range(first, first + 90, 30):
        bank.pipeline.database.execute(
            f"INSERT INTO accounts SELECT n, 'a' || n FROM generate_series({part}, {part + 29}) n",
            f"INSERT INTO entries SELECT n, n, 'e' FROM generate_series({part}, {part + 29}) n",
            f"DELETE FROM entries WHERE id % 4 = 1 AND id < {part}",
            f"UPDATE accounts SET name = name || '{part}' WHERE id % 3 = 0",
        )


def check(bank: Bank, plan: Plan, old: State, asked: str) -> None:
    """Rebuild by a plan; `old` is what readers see, and what the database held at `asked`."""
    name, options, kills = plan
    before, new = bank.sink(name).current(), bank.source()
    is_still, given = "--as-of" in options, options
    if is_still:
        given = (*options, asked)
    with bank.watched(name, old, new):
        for kill in kills:
            outcome = bank.rebuild(name, *given, kill=kill)
            if kill in (
                "rebuild_started",
                "follow_started",
                "follow_written:2",
                "rebuild_switching",
            ):
                assert bank.views[name]() == old
        outcome = bank.rebuild(name, *given)
        assert outcome["former"] == before or not is_still
        # The old generation had no errors, whatever an earlier attempt left half-done.
        assert [each["differences"] for each in outcome["tables"] if each["differences"]] == []
    if is_still:
        assert bank.shadow(name, outcome["generation"]) == old
        assert bank.views[name]() == old
    else:
        reported = read(bank.config)[name]
        # Only the table is newer than the store's frontier: not yet a state that can be read.
        state = "rebuilding" if "--table" in options else "stopped"
        assert (reported.generation, reported.state) == (outcome["generation"], state)
        assert bank.sink(name).current() == outcome["generation"]
        if not options:
            assert bank.views[name]() == new
    bank.follow(name)
    assert bank.views[name]() == new
    others = set(bank.sink(name).generations()) - {bank.sink(name).current()}
    assert set(bank.rebuild(name, "--drop-old")["dropped"]) == others
    assert bank.views[name]() == new
    assert bank.left(name) == []
    assert list(bank.scratch.iterdir()) == []


@pytest.mark.long("five minutes; the contract kills each step of a switch")
@pytest.mark.slow
@pytest.mark.timeout(2_400 + 1_200 * ROUNDS)
def test_a_killed_rebuild_leaves_readers_the_old_state_and_its_successor_the_new_one(
    bank: Bank, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of the attempts is left either, once the old generations are dropped."""
    print(f"LOCKSTEP_SEED={SEED} LOCKSTEP_REBUILDS={ROUNDS}")  # noqa: T201 - on failure
    chance = random.Random(f"{SEED}/rebuilds")
    plans = [*SAMPLE, *(drawn(chance) for _ in range(ROUNDS))]
    change(bank, 0)
    bank.follow(*bank.views)
    first = 100
    for plan in plans:
        began = time.monotonic()
        old, asked = bank.source(), bank.lsn()
        bank.follow(plan.follower)
        assert bank.views[plan.follower]() == old
        change(bank, first)
        bank.lsn()
        check(bank, plan, old, str(asked))
        first += 100
        if ROUNDS:
            with capsys.disabled():
                print(f"\n{plan}: {time.monotonic() - began:.0f} s", flush=True)  # noqa: T201
