"""The example of docs/CODE.md on real servers: daemon, mirror, Delta, Redis, killed processes."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import redis
import yaml
from click.testing import CliRunner
from pyspark.sql import SparkSession

from cdc.config.views import PythonView
from cdc.errors import Exit
from cdc.failpoints import VIEW_NAMES
from lockstep.jobs import view as job
from lockstep.jobs.reading_as_of import read_as_of_arrow
from tests.fixtures import code_example, code_views
from tests.fixtures.commands import completed
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest
from tests.fixtures.followed import Followed
from tests.fixtures.store_redis import RedisStore
from tests.fixtures.viewed import differing

_FOLLOWERS = ("lake", "answers", "cache")
# As the configuration masks it.
_NAMES = "SELECT id, name FROM visitors"
_VISITORS = "(SELECT id, left(name, 3) AS name FROM visitors) AS visitors"


class Coded(Followed):
    """A pipeline with the example's views."""

    client: redis.Redis
    root: Path

    def change(self, chosen: Random, count: int) -> None:
        """Commit random statements."""
        with self.pipeline.database.connect() as connection:
            for _ in range(count):
                connection.execute(code_views.change(chosen).encode())

    def expect_equal(self) -> None:
        """Fail unless both stores have what the code makes of Postgres' rows."""
        code = {
            name: each for name, each in self.config.views.items() if isinstance(each, PythonView)
        }
        wanted = code_views.answers(code, self._select)
        tags = Counter(row["tag"] for row in wanted["post_tags"])
        wanted["tag_counts"] = [{"tag": tag, "posts": count} for tag, count in tags.items()]
        wanted["names"] = self._select(_NAMES)
        names = [f"views.{name}" for name in wanted]
        read = read_as_of_arrow(str(self.root / "views"), names).tables
        for name, rows in wanted.items():
            stored = read[f"views.{name}"].select(list(self.columns(name))).to_pylist()
            assert differing(rows, stored) == "", name
        assert sorted(self._in_redis()) == sorted(
            (row["tag"], str(row["post_id"])) for row in wanted["post_tags"]
        )

    def columns(self, name: str) -> list[str]:
        view = self.config.views[name]
        if isinstance(view, PythonView):
            return list(view.columns)
        return {"tag_counts": ["tag", "posts"], "names": ["id", "name"]}[name]

    def _select(self, query: str) -> list[dict[str, Any]]:
        with self.pipeline.database.connect() as connection:
            found = connection.execute(query.replace("FROM visitors", f"FROM {_VISITORS}").encode())
            names = [each.name for each in found.description or ()]
            return [dict(zip(names, row, strict=True)) for row in found]

    def _in_redis(self) -> Iterator[tuple[str, str]]:
        for key in self.client.scan_iter(f"{self.prefix}-with:*"):
            members: Any = self.client.smembers(key)
            for member in members:
                yield key.decode().partition("-with:")[2], member.decode()

    def job(self, *arguments: str) -> tuple[int, str]:
        """Run `cdc view` in this process, with its session; return its exit code and output."""
        (command, *rest) = arguments
        given = [command, "--config", str(self.pipeline.config_file), *rest]
        done = CliRunner().invoke(job.main, given, standalone_mode=False)
        if done.exception is not None:
            raise done.exception
        return done.return_value or Exit.OK, done.output

    def killed(self, failpoint: str) -> int:
        """Run followers of views in a process that is killed; return its exit code."""
        config_file = self.pipeline.config_file
        return completed(config_file, "view", "run", "--once", failpoint=failpoint).returncode


@pytest.fixture
def coded(
    pipeline: NewPipeline, spark: SparkSession, redis_store: RedisStore, tmp_path: Path
) -> Coded:
    made: PipelineUnderTest = pipeline(
        *(f"CREATE TABLE {name} ({what})" for name, what in code_views.TABLES.items()),
        tables={"public.visitors": {"mask": {"name": {"truncate": 3}}}},
    )
    written = yaml.safe_load(made.config_file.read_text()) | code_example.configuration(
        **{
            "/srv": str(tmp_path),
            "redis://localhost:6379/0": redis_store.settings.url,
            "posts-with:": f"{made.config.prefix}-with:",
        }
    )
    # A view in SQL of a masked column, too.
    written["views"] = {"names": {"sql": _NAMES, "key": ["id"]}}
    written["followers"]["answers"]["views"].append("names")
    code_example.write(made.config_file.parent)
    made.config_file.write_text(yaml.safe_dump(written))
    found = Coded(made, spark)
    found.client, found.root = redis_store.client, tmp_path
    return found


@pytest.mark.long("three minutes of Spark; test_views_in_python has such views")
def test_the_example_is_what_its_code_makes_of_postgres_rows_in_each_store(coded: Coded) -> None:
    """With a masked column; an exception halts the follower at its frontier, until corrected."""
    chosen, file = Random(5), coded.pipeline.config_file.with_name("views") / "post_tags.py"
    coded.pipeline.start().wait_ready()
    coded.change(chosen, 60)
    coded.follow(*_FOLLOWERS)
    coded.expect_equal()
    assert coded.job("check")[0] == Exit.OK
    explained = json.loads(coded.job("explain", "sessions", "--json")[1])[0]["tables"]
    assert set(explained.values()) == {"the affected visitor"}

    right = file.read_text()
    coded.change(chosen, 8)
    coded.pipeline.database.execute("INSERT INTO posts VALUES (7000, 1, '{x}')")
    wrong = '    assert 7000 not in posts["post_id"].to_pylist()\n    return ['
    file.write_text(right.replace("    return [", wrong))
    coded.follow("lake")
    run = coded.run("answers", coded.lsn())
    assert run.run() == Exit.CONFIG
    assert "view post_tags: its code raised AssertionError in post_tags.py, line 14" in str(
        run.error
    )
    file.write_text(right)
    coded.follow(*_FOLLOWERS)
    coded.expect_equal()


@pytest.mark.long("three jobs with Spark, of which two are killed, and verify")
def test_killed_followers_go_on_and_verify_compares_with_the_code(coded: Coded) -> None:
    chosen, (name,) = Random(6), VIEW_NAMES
    coded.pipeline.start().wait_ready()
    coded.change(chosen, 60)
    coded.follow(*_FOLLOWERS)
    for count in (1, 2, 3):
        coded.change(chosen, 12)
        coded.pipeline.database.execute(
            f"INSERT INTO posts VALUES ({9000 + count}, 1, '{{a,new}}')",
            f"INSERT INTO clicks VALUES ({9000 + count}, 1, '2026-02-0{count}')",
        )
        coded.follow("lake")
        with coded.following("lake"):
            assert coded.killed(f"{name}:{count}") == -signal.SIGKILL
        coded.follow(*_FOLLOWERS)
        coded.expect_equal()
    with coded.following(*_FOLLOWERS):
        code, output = coded.job("verify", "--json", "--timeout", "120")
        found = {each["view"]: each["missing"] + each["extra"] for each in json.loads(output)}
    names = ["post_tags", "sessions", "tag_counts", "names"]
    assert (code, found) == (Exit.OK, dict.fromkeys(names, 0))
