"""The rules of ARCHITECTURE.md that a test can check."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cdc", "sinks", "jobs", "migrations", "tests", "benchmarks", "scripts")
SOURCES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in SOURCES]

LINES_IN_A_FUNCTION = 70

# The name on the left may be imported by the folders on the right, and by no others.
IMPORTED_BY = {
    "confluent_kafka": ("cdc/log", "cdc/operate", "cdc/playground/demo", "tests", "benchmarks"),
    "psycopg": ("cdc/source", "cdc/client.py", "cdc/operate", "cdc/playground/demo", "tests", "benchmarks"),
    "prometheus_client": ("cdc/operate", "tests", "benchmarks"),
    "requests": ("cdc/playground/servers", "tests"),
    "rich": ("cdc/playground/demo", "cdc/cli", "tests"),
    "pyspark": ("jobs", "tests", "benchmarks"),
    "delta": ("jobs", "tests", "benchmarks"),
    "deltalake": ("sinks", "jobs", "cdc/playground/demo/stores.py", "tests", "benchmarks"),
    "opensearchpy": ("sinks/opensearch/client.py", "cdc/playground/demo", "tests", "benchmarks"),
    "redis": ("sinks/redis/client.py", "cdc/playground/demo/stores.py", "tests", "benchmarks"),
    "pyarrow": ("sinks", "jobs", "tests", "benchmarks"),
    "adbc_driver_postgresql": ("jobs/copying/adbc.py",),
    "adbc_driver_manager": ("jobs/copying/adbc.py",),
    "sinks": ("sinks", "jobs", "tests", "benchmarks"),
    "jobs": ("jobs", "tests", "benchmarks"),
}
PURE = ("cdc/decode/", "cdc/sequence/sequencer.py", "cdc/events.py", "cdc/errors.py")
IMPURE_IMPORTS = {"socket", "subprocess", "threading", "time", "os", "random"}

# Catch-all modules collect what has no owner.
CATCH_ALLS = {"utils", "util", "common", "helpers", "helper", "base", "misc"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> set[str]:
    """Return the top-level names that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_a_module_says_what_it_is_and_its_functions_stay_small(path: Path) -> None:
    module = tree(path)
    assert ast.get_docstring(module), "a module's docstring carries its strategy"
    assert path.stem not in CATCH_ALLS
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < LINES_IN_A_FUNCTION, node.name


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_imports_go_one_way(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    for imported in imports(path) & IMPORTED_BY.keys():
        assert name.startswith(IMPORTED_BY[imported]), f"{name} imports {imported}"


def test_sinks_know_the_event_types_alone() -> None:
    for path in (ROOT / "sinks").rglob("*.py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cdc"):
                assert node.module in {"cdc.events", "cdc.errors"}, path.name


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(PURE)])
def test_the_core_is_pure(name: str) -> None:
    assert not imports(ROOT / name) & IMPURE_IMPORTS


def test_the_event_types_import_nothing_of_ours() -> None:
    assert "cdc" not in imports(ROOT / "cdc" / "events.py")


def test_lock_files_name_no_index_and_pin_everything_by_sum() -> None:
    for path in ROOT.glob("requirements*.lock"):
        text = path.read_text(encoding="utf-8")
        assert "://" not in text
        for entry in re.split(r"\n(?=\S)", text.strip()):
            assert re.match(r"[a-z0-9.-]+==\S+", entry), entry
            assert "--hash=sha256:" in entry, entry
