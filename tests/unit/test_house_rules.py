"""The rules of ARCHITECTURE.md that a test can check."""

from __future__ import annotations

import ast
import gc
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PACKAGES = ("lockstep", "cdc", "sinks", "jobs", "migrations", "tests", "benchmarks", "scripts")
# By their names from the root on. One test a rule, which lists all that break it.
SOURCES = {
    str(path.relative_to(ROOT)): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}

LINES_IN_A_FUNCTION = 70

# The name on the left may be imported by the folders on the right, and by no others.
IMPORTED_BY = {
    "confluent_kafka": (
        *("cdc/log", "cdc/encode/partition.py", "cdc/operate", "cdc/playground/demo"),
        "sinks/topic/cluster.py",
        *("tests", "benchmarks"),
    ),
    "psycopg": (
        *("cdc/config/dsn.py", "cdc/publication", "cdc/source", "cdc/client.py", "cdc/operate"),
        *("cdc/playground/demo", "tests", "benchmarks"),
    ),
    "prometheus_client": ("cdc/operate", "tests", "benchmarks"),
    "requests": ("cdc/runtime/artifacts.py", "tests"),
    "rich": ("cdc/playground/demo", "cdc/cli", "tests"),
    "pyspark": ("jobs", "tests", "benchmarks"),
    "delta": ("jobs", "tests", "benchmarks"),
    "deltalake": ("sinks", "jobs", "cdc/playground/demo/stores.py", "tests", "benchmarks"),
    "opensearchpy": ("sinks/opensearch/client.py", "cdc/playground/demo", "tests", "benchmarks"),
    "redis": ("sinks/redis/client.py", "cdc/playground/demo", "tests", "benchmarks"),
    "pyarrow": ("sinks", "jobs", "tests", "benchmarks"),
    "adbc_driver_postgresql": ("jobs/copying/adbc.py",),
    "adbc_driver_manager": ("jobs/copying/adbc.py",),
    "sqlglot": ("jobs/views", "tests"),
    "lockstep.sinks": ("sinks", "jobs", "lockstep", "tests", "benchmarks"),
    "lockstep.jobs": ("jobs", "lockstep", "tests", "benchmarks"),
    # Names of anybody's: ours are `lockstep.sinks` and `lockstep.jobs`.
    **dict.fromkeys(("sinks", "jobs", "migrations"), ()),
}
PURE = ("cdc/decode/", "cdc/sequence/sequencer.py", "cdc/events.py", "cdc/errors.py")
IMPURE_IMPORTS = {"socket", "subprocess", "threading", "time", "os", "random"}

# These make a type for one use, or hold a lock.
PREPARES_TYPES = ("cdc/log/records.py", "sinks/shapes.py", "sinks/delta/columns.py")

NOT_OURS = {"self", "cls", "os", "KafkaError"}
NAMED_TUPLES_OWN = {"_asdict", "_fields", "_make", "_replace"}

# Catch-all modules collect what has no owner.
CATCH_ALLS = {"utils", "util", "common", "helpers", "helper", "base", "misc"}


@pytest.fixture(scope="module", autouse=True)
def _no_collection() -> Iterator[None]:
    """Collect no garbage while the trees are made, whose million nodes it visits each time."""
    gc.disable()
    yield
    tree.cache_clear()
    gc.enable()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> set[str]:
    """Return what a module imports, anywhere in it: by top-level name, of `lockstep` by two."""
    found = set[str]()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in found]
    return {".".join(each[: 2 if each[0] == "lockstep" else 1]) for each in parts}


def test_every_module_has_a_docstring() -> None:
    """It carries the module's strategy."""
    assert [name for name, path in SOURCES.items() if not ast.get_docstring(tree(path))] == []


def _defined(path: Path) -> set[str]:
    """Return the private names that a module defines."""
    found = set[str]()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def _touched(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the names that a module imports, takes from an object, or patches by their text."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            if not (node.module or "").startswith("tests."):
                yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in NOT_OURS):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in {"setattr", "object"}:
            texts = (each.value for each in node.args[:2] if isinstance(each, ast.Constant))
            yield from ((node.lineno, str(text).rpartition(".")[2]) for text in texts)


def test_tests_touch_no_private_name_of_the_program() -> None:
    """What a test needs to reach has a public name: the rest can be changed without the tests."""
    is_test = {name: name.startswith("tests/") for name in SOURCES}
    ours = set[str]().union(*(_defined(SOURCES[name]) for name in SOURCES if not is_test[name]))
    assert [
        f"{name}:{line}: {touched}"
        for name, path in SOURCES.items()
        if is_test[name]
        for private in [ours - _defined(path) - NAMED_TUPLES_OWN]
        for line, touched in _touched(path)
        if touched in private
    ] == []


def test_no_module_is_a_catch_all() -> None:
    assert [name for name, path in SOURCES.items() if path.stem in CATCH_ALLS] == []


def test_functions_stay_small() -> None:
    assert [
        f"{name}:{node.lineno} {node.name}"
        for name, path in SOURCES.items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= LINES_IN_A_FUNCTION
    ] == []


def test_imports_go_one_way() -> None:
    assert [
        f"{name} imports {imported}"
        for name, path in SOURCES.items()
        for imported in sorted(imports(path) & IMPORTED_BY.keys())
        if not name.startswith(IMPORTED_BY[imported])
    ] == []


def test_sinks_know_the_event_types_alone() -> None:
    """And the types of columns. The one whose store is Kafka uses the log's client, too."""
    assert [
        f"{name}:{node.lineno} {node.module}"
        for name, path in SOURCES.items()
        if name.startswith("sinks/") and not name.startswith("sinks/topic/")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("cdc")
        and node.module not in {"cdc.events", "cdc.errors", "cdc.decode.types"}
    ] == []


def test_types_are_prepared_while_their_modules_are_imported() -> None:
    """Msgspec crashes the process if two threads use a type for the first time at once."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert [
        f"{name}:{call.lineno}"
        for name, path in SOURCES.items()
        if name.startswith(("cdc/", "sinks/", "jobs/")) and name not in PREPARES_TYPES
        for function in ast.walk(tree(path))
        if isinstance(function, functions)
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("msgspec.")
        if ast.unparse(call.func).endswith(".Decoder")
        or any(each.arg == "type" and _may_need_form(each.value) for each in call.keywords)
    ] == []


def _may_need_form(type_: ast.expr) -> bool:
    names = {each.id for each in ast.walk(type_) if isinstance(each, ast.Name)}
    return not names <= {"dict", "list", "tuple", "str", "int", "bytes", "Any", "Raw", "msgspec"}


def test_the_core_is_pure() -> None:
    pure = [name for name in SOURCES if name.startswith(PURE)]
    assert pure
    assert [name for name in pure if imports(SOURCES[name]) & IMPURE_IMPORTS] == []


def test_the_event_types_import_nothing_of_ours() -> None:
    assert "cdc" not in imports(ROOT / "cdc" / "events.py")


def test_lock_files_name_no_index_and_pin_everything_by_sum() -> None:
    for path in ROOT.glob("requirements*.lock"):
        text = path.read_text(encoding="utf-8")
        assert "://" not in text
        for entry in re.split(r"\n(?=\S)", text.strip()):
            assert re.match(r"[a-z0-9.-]+(\[[a-z,]+\])?==\S+", entry), entry
            assert "--hash=sha256:" in entry, entry
