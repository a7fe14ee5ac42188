"""Which room imports which, and which module owns which foreign client.

Sizes, docstrings and imports between packages are checked in test_house_rules.
"""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The modules that may use a client. All others call these, which also translate the client's
# errors; adding a module to a line is a decision, with its reason.
OWNERS = {
    "psycopg": {
        "cdc/config/dsn.py",  # whether libpq can parse a connection string
        "cdc/publication",  # creates and compares what is captured
        "cdc/source",
        "cdc/client.py",  # names the type of the application's connection
        "cdc/operate/retention.py",  # prints SQL with names quoted as Postgres quotes them
        "cdc/playground/demo",  # an application: it writes to the source like any other
    },
    "confluent_kafka": {
        "cdc/encode/partition.py",  # librdkafka's own murmur2
        "cdc/log",
        "cdc/operate/commands/setup.py",  # names the admin client's type
        "cdc/playground/demo/tail.py",  # names the type of a record
    },
    "google_crc32c": {"cdc/log/direct"},
    "alembic": {"cdc/publication/migrations.py"},
    "sqlalchemy": {"cdc/publication/migrations.py"},
    "prometheus_client": {"cdc/operate/http.py", "cdc/operate/metrics.py"},
    "requests": {"cdc/runtime/artifacts.py"},
    "maven_artifact": {"cdc/runtime/artifacts.py"},
    "click": {"cdc/cli"},
    "jwt": {"cdc/console/tokens.py"},
    "starlette": {"cdc/console"},
    "uvicorn": {"cdc/console"},
    # The demo's proof reads the followers' stores directly, like any of their readers.
    "redis": {"cdc/playground/demo"},
    "opensearchpy": {"cdc/playground/demo"},
    "deltalake": {"cdc/playground/demo/stores.py"},
    "rich": {"cdc/cli/demo.py", "cdc/cli/initial.py", "cdc/playground/demo/view.py"},
    "yaml": {
        "cdc/config",
        "cdc/playground/demo/stage.py",
    },  # the demo writes a separate configuration
}

# The rooms of `cdc`, each above those that it may import.
ROOMS = (
    *("events", "errors", "failpoints", "runtime", "decode", "config", "keyring", "log", "encode"),
    *("source", "publication", "sequence", "snapshot.incremental", "snapshot.initial", "verify"),
    *("operate", "operate.doctor", "operate.commands", "daemon", "console", "deliver", "client"),
    *("playground", "cli"),
)
# The same of `sinks` and `jobs`; their modules in no room are below and above them.
SINK_ROOMS = ("delta", "opensearch", "redis", "sql", "topic")
JOB_ROOMS = (
    *("cuts", "spark", "copying", "documents", "views", "apply"),
    *("archiving", "compacting", "generations"),
)
# Pure modules, and what they may import at run time.
PURE = {
    "cdc.events": set[str](),
    "cdc.errors": set[str](),
    "cdc.failpoints": set[str](),
    "cdc.runtime.background": set[str](),
    "cdc.decode": {"cdc.decode", "cdc.errors", "cdc.events"},
    "cdc.log.completeness": set[str](),
    "cdc.log.expected": {"cdc.errors", "cdc.log.names"},
    "cdc.source.authority": set[str](),
    "cdc.publication.diff": {"cdc.errors", "cdc.log.records"},
    "cdc.publication.continuity": {"cdc.errors", "cdc.events", "cdc.publication.diff"},
    "cdc.publication.column_identity": {"cdc.encode.masks"},
    "cdc.sequence.spool": {"cdc.errors"},
    "cdc.sequence.state": {"cdc.decode", "cdc.errors", "cdc.events"},
    "cdc.sequence.replay": {"cdc.errors", "cdc.events"},
    "cdc.sequence.in_progress": {"cdc.decode", "cdc.errors", "cdc.sequence.state"},
    "cdc.sequence.sequencer": {
        *("cdc.decode", "cdc.encode", "cdc.errors", "cdc.events"),
        *("cdc.sequence.state", "cdc.sequence.replay"),
    },
    "cdc.sequence.relation_request": {"cdc.config"},
    "cdc.sequence.refusals": {"cdc.encode", "cdc.errors", "cdc.publication.column_identity"},
    "cdc.sequence.relations": {
        *("cdc.config", "cdc.decode", "cdc.encode", "cdc.log.names", "cdc.log.records"),
        *("cdc.publication.column_identity", "cdc.sequence.refusals"),
    },
}
PURE |= {
    f"cdc.snapshot.incremental.{module}": {
        *("cdc.decode", "cdc.log.records", "cdc.snapshot.incremental.records"),
        *("cdc.snapshot.incremental.reconcile", "cdc.snapshot.incremental.visibility"),
    }
    for module in ("chunk_state", "reconcile", "visibility")
}
# Tools around the daemon, which runs without them.
AROUND = ("cli", "playground", "client", "console", "deliver")


def name_of(path: Path) -> str:
    """Return the module's dotted name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    package = () if parts[0] in {"cdc", "migrations"} else ("lockstep",)
    return ".".join((*package, *parts)).removesuffix(".__init__")


MODULES = {
    name_of(path): path
    for package in ("cdc", "sinks", "jobs", "migrations")
    for path in sorted((ROOT / package).rglob("*.py"))
}


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def room(module: str) -> str:
    """Return the room that a module is in."""
    path = module.split(".")[1:]
    inner = ".".join(path[:2])
    return inner if path[0] == "snapshot" or inner in ROOMS else path[0]


@cache
def imports(module: str, *, types_too: bool) -> set[str]:
    """Return the modules that a module imports, ours by full name; `types_too` also for types."""
    tree = parsed(module)
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types_too
        for inner in ast.walk(node)
    }
    found = set[str]()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
    return found


def test_a_foreign_client_has_few_owners() -> None:
    """And an owner that no longer uses the client is removed from the line."""
    wrong = []
    for client, owners in OWNERS.items():
        users = {
            name.replace(".", "/") + ".py"
            for name in MODULES
            if name.startswith("cdc")
            and client in {found.split(".")[0] for found in imports(name, types_too=True)}
        }
        wrong += [f"{name} uses {client}" for name in users if not name.startswith(tuple(owners))]
        wrong += [
            f"{owner} does not use {client}"
            for owner in owners
            if not any(name.startswith(owner) for name in users)
        ]
    assert wrong == []


def test_a_room_imports_only_the_rooms_below_it() -> None:
    inside = [name for name in MODULES if name.startswith("cdc.") and name != "cdc.snapshot"]
    assert {room(name) for name in inside} == set(ROOMS)
    assert [
        f"{name} imports {found}"
        for name in inside
        for found in sorted(imports(name, types_too=True))
        if found.startswith("cdc.") and ROOMS.index(room(found)) > ROOMS.index(room(name))
    ] == []


@pytest.mark.parametrize(
    ("package", "rooms"),
    [
        ("lockstep.sinks", ("", *SINK_ROOMS)),
        ("lockstep.jobs", (*JOB_ROOMS, "")),
    ],
)
def test_a_room_of_stores_or_jobs_imports_only_the_rooms_below_it(
    package: str, rooms: tuple[str, ...]
) -> None:
    def at(module: str) -> int:
        inside = module.removeprefix(f"{package}.").split(".")[0]
        return rooms.index(inside if (ROOT / package.split(".")[1] / inside).is_dir() else "")

    modules = [name for name in MODULES if name.startswith(f"{package}.")]
    assert {rooms[at(name)] for name in modules} == set(rooms)
    assert [
        f"{name} imports {found}"
        for name in modules
        for found in sorted(imports(name, types_too=True))
        if found.startswith(f"{package}.") and at(found) > at(name)
    ] == []


def test_a_pure_module_imports_only_what_is_listed() -> None:
    assert [
        f"{name} imports {found}"
        for part, allowed in PURE.items()
        for name in MODULES
        if name == part or name.startswith(f"{part}.")
        for found in sorted(imports(name, types_too=False))
        if found.startswith("cdc") and not found.startswith(tuple(allowed))
    ] == []


def test_the_daemon_runs_without_the_tools_around_it() -> None:
    assert [
        f"{name} imports {found}"
        for name in MODULES
        if name.startswith("cdc.") and room(name) not in AROUND
        for found in sorted(imports(name, types_too=True))
        if found.startswith("cdc.") and room(found) in AROUND
    ] == []


def test_nothing_but_its_commands_imports_the_playground() -> None:
    assert {
        name
        for name in MODULES
        for found in imports(name, types_too=True)
        if found.startswith("cdc.playground") and not name.startswith("cdc.playground")
    } == {"cdc.cli.demo", "cdc.cli.local"}


def test_no_modules_import_in_a_circle() -> None:
    """Neither for types: where two need each other's types, one of them has too much."""
    graph = {
        name: sorted((imports(name, types_too=True) & MODULES.keys()) - {name}) for name in MODULES
    }
    done = set[str]()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for found in graph[name]:
                walk(found, (*path, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def test_the_path_of_one_update_names_functions_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    steps = re.findall(r"^\d+\. `(?:(\w+)\.)?(\w+)` in `([\w/.]+)`", text, re.MULTILINE)
    assert 0 < len(steps) <= 25
    missing = []
    for kind, function, file in steps:
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        inside = [
            node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == kind
        ]
        found = inside[0] if inside else tree
        functions = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
        if bool(kind) != bool(inside) or function not in functions:
            missing.append(f"{kind}.{function} in {file}")
    assert missing == []


def test_no_file_names_a_persons_home() -> None:
    """Such a path exists on one machine only."""
    home = re.compile(rb"/(?:home|Users)/[a-z]|/root/")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and path != Path(__file__):
            assert not home.search(path.read_bytes()), name
