"""The tutorial of docs/SPARK.md, word for word: right at every end, whatever came before."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import pytest
from deltalake import DeltaTable

from cdc.cli.main import run
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest
from tests.fixtures.spark import need_java
from tests.fixtures.spark_cluster import HOME, Cluster, standalone
from tests.integration.test_changes_source import in_log

ROOT = Path(__file__).parents[2]
_SECONDS = 400
_TABLE = (
    "CREATE TABLE orders (id int PRIMARY KEY, customer text, amount numeric(12,2))",
    "ALTER TABLE orders REPLICA IDENTITY FULL",
)


# Folders that a user's own repository may have; ours must not be looked for there.
_OWN = ("jobs", "sinks", "migrations")


class Tutorial(NamedTuple):
    """Its programs, and the lines that start them: here, on a cluster, and for the proof."""

    program: str
    comparison: str
    here: str
    there: str
    proof: str


def tutorial() -> Tutorial:
    text = (ROOT / "docs" / "SPARK.md").read_text("utf-8").partition("## Tutorial")[2]
    blocks = re.findall(r"```(python|console)\n(.*?)```", text, re.DOTALL)
    programs = [body for kind, body in blocks if kind == "python"]
    lines = [
        "\n".join(re.findall(r"^\$ (.+)$", body, re.MULTILINE))
        for kind, body in blocks
        if kind == "console"
    ]
    assert all(len(each.strip().splitlines()) <= 40 for each in programs)
    assert blocks[-1][0] == "console", "it ends by proving itself"
    return Tutorial(*programs, *lines)


def submit(
    line: PipelineUnderTest, folder: Path, cluster: Cluster | None = None
) -> subprocess.CompletedProcess[str]:
    found = tutorial()
    command = found.here
    if cluster:
        assert "spark://host:7077" in found.there
        command = found.there.replace("spark://host:7077", cluster.master)
    (folder / "totals.py").write_text(found.program, "utf-8")
    for name in _OWN:
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "__init__.py").write_text("raise AssertionError('the user's own')\n")
    return typed(command, line, folder, cluster)


def prove(line: PipelineUnderTest, folder: Path) -> subprocess.CompletedProcess[str]:
    """Do the tutorial's last step."""
    found = tutorial()
    (folder / "compare.py").write_text(found.comparison, "utf-8")
    dsn = "host=db.internal dbname=shop"
    assert dsn in found.proof
    return typed(found.proof.replace(dsn, line.database.dsn), line, folder)


def typed(
    command: str, line: PipelineUnderTest, folder: Path, cluster: Cluster | None = None
) -> subprocess.CompletedProcess[str]:
    """Run lines of the tutorial as they are typed, where its folder is one of the test's."""
    config = Path(line.config_file)
    if not (folder / "lockstep.yaml").exists():
        (folder / "lockstep.yaml").write_text(config.read_text("utf-8"), "utf-8")
    cdc = f"cdc() {{ '{sys.executable}' -m cdc.cli.main \"$@\"; }}"
    python = f"python() {{ '{sys.executable}' \"$@\"; }}"
    own = command.replace("/lake/totals", str(folder / "totals"))
    return subprocess.run(
        ["bash", "-euc", f"{cdc}\n{python}\n{own}"],
        cwd=folder,
        env={
            **(cluster.env if cluster else os.environ),
            "PATH": f"{HOME / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )


def totals(folder: Path) -> dict[str, tuple[int, Decimal]]:
    rows = DeltaTable(str(folder / "totals")).to_pyarrow_table().to_pylist()
    return {row["customer"]: (row["orders"], row["total"]) for row in rows if row["orders"]}


def in_database(line: PipelineUnderTest) -> dict[str, tuple[int, Decimal]]:
    with line.database.connect() as connection:
        sums = "SELECT customer, count(*), sum(amount) FROM orders GROUP BY customer"
        return {name: (many, total) for name, many, total in connection.execute(sums)}


_CHANGES = (
    ("UPDATE orders SET customer = 'moved', amount = amount * 2 WHERE id % 7 = 0",),
    ("DELETE FROM orders WHERE customer = 'c1'", "INSERT INTO orders VALUES (500, 'n', 1)"),
    (),
)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.long("a cluster and two spark-submits")
def test_the_tutorial_runs_on_a_cluster_of_two_workers(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    need_java()
    line = pipeline(*_TABLE)
    line.start().wait_ready()
    line.database.execute(
        "INSERT INTO orders SELECT g, 'c' || g % 5, g FROM generate_series(1, 100) g"
    )
    for statements in ((), *_CHANGES[:1]):
        line.database.execute(*statements)
        in_log(line)
        with standalone(tmp_path, 1, 1) as cluster:
            done = submit(line, tmp_path, cluster)
        assert done.returncode == 0, done.stdout + done.stderr
        assert totals(tmp_path) == in_database(line)
    (*_, events) = sorted(tmp_path.glob("eventlog_v2_app-*/events_*"))
    started = re.findall(r'"SparkListenerExecutorAdded".*?"Host":"[^"]+"', events.read_text())
    assert len(started) == len(cluster.workers), "each worker has an executor"


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.long("minutes: a spark-submit for each step")
@pytest.mark.parametrize("steps", [pytest.param(1, id="once"), pytest.param(3, id="often")])
def test_the_view_of_the_tutorial_is_the_databases_and_counts_nothing_twice(
    steps: int, pipeline: NewPipeline, tmp_path: Path
) -> None:
    need_java()
    line = pipeline(*_TABLE)
    line.start().wait_ready()
    line.database.execute(
        "INSERT INTO orders SELECT g, 'c' || g % 5, g FROM generate_series(1, 100) g"
    )
    for statements in ((), *_CHANGES[:steps]):
        line.database.execute(*statements)
        in_log(line)
        _expect_counted(line, tmp_path)
        proved = prove(line, tmp_path)
        assert proved.returncode == 0, proved.stdout + proved.stderr
        assert "complete and unaltered" in proved.stdout
        many = len(in_database(line))
        assert proved.stdout.endswith(
            f"proved: the totals of {many} customers are what Postgres answers\n"
        )
    line.database.execute("UPDATE orders SET amount = 0 WHERE customer = 'c3'")
    refuted = prove(line, tmp_path)
    assert refuted.returncode == 1
    assert "not what Postgres answers, of these customers: ['c3']" in refuted.stderr
    if steps > 1:
        line.database.execute(
            "TRUNCATE orders", "INSERT INTO orders SELECT g, 'new', g FROM generate_series(1, 9) g"
        )
        in_log(line)
        _expect_counted(line, tmp_path)
        read_again = ["snapshot", "public.orders", "--wait", "-c", str(line.config_file)]
        assert run(read_again) == 0
        in_log(line)
        _expect_counted(line, tmp_path)


def _expect_counted(line: PipelineUnderTest, folder: Path) -> None:
    done = submit(line, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert totals(folder) == in_database(line)
