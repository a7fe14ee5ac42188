"""The tutorial of docs/SPARK.md, word for word: right at every end, whatever came before."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pyspark
import pytest
from deltalake import DeltaTable

from tests.fixtures.daemon import NewPipeline, PipelineUnderTest
from tests.fixtures.spark import need_java
from tests.integration.test_changes_source import in_log

ROOT = Path(__file__).parents[2]
HOME = Path(pyspark.__file__).parent
_SECONDS = 400
_TABLE = (
    "CREATE TABLE orders (id int PRIMARY KEY, customer text, amount numeric(12,2))",
    "ALTER TABLE orders REPLICA IDENTITY FULL",
)


def tutorial() -> tuple[str, str]:
    """Return the tutorial's program and the line that submits it."""
    text = (ROOT / "docs" / "SPARK.md").read_text("utf-8").partition("## Tutorial")[2]
    blocks = re.findall(r"```(python|console)\n(.*?)```", text, re.DOTALL)
    (program, line) = (body for _, body in blocks)
    assert len(program.strip().splitlines()) <= 45
    return program, line.strip().removeprefix("$ ")


def submit(line: PipelineUnderTest, folder: Path) -> subprocess.CompletedProcess[str]:
    program, command = tutorial()
    (folder / "totals.py").write_text(program, "utf-8")
    config = Path(line.config_file)
    if not (folder / "lockstep.yaml").exists():
        (folder / "lockstep.yaml").write_text(config.read_text("utf-8"), "utf-8")
    cdc = f"cdc() {{ '{sys.executable}' -m cdc.cli.main \"$@\"; }}"
    own = command.replace("/lake/totals", str(folder / "totals"))
    return subprocess.run(
        ["bash", "-euc", f"{cdc}\n{own}"],
        cwd=folder,
        env={
            **os.environ,
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
@pytest.mark.long("a spark-submit for each step", sample=["once"])
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
        done = submit(line, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert totals(tmp_path) == in_database(line)
    if steps > 1:
        line.database.execute("TRUNCATE orders")
        in_log(line)
        refused = submit(line, tmp_path)
        assert refused.returncode != 0
        assert "delete the folder, and start again" in refused.stdout + refused.stderr
