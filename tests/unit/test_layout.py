"""Which layer imports which, and which module owns which foreign client.

Sizes, docstrings and imports between packages are checked in test_house_rules; this test is about
the modules of `cdc`.
"""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "cdc").rglob("*.py"))
}

# The modules that may use a client. All others call these, which also translate the client's
# errors; adding a module to a line is a decision, with its reason.
OWNERS = {
    "psycopg": {
        "cdc/source",
        "cdc/client.py",  # names the type of the application's connection
        "cdc/operate/doctor/source.py",  # prints SQL with names quoted as Postgres quotes them
        "cdc/operate/doctor/requirements.py",  # likewise
        "cdc/operate/retention.py",  # likewise
        "cdc/operate/start_checks.py",  # names the connection's type
        "cdc/operate/commands/setup.py",  # names the connection's type
        "cdc/operate/commands/setup_publication.py",  # the same
        "cdc/playground/demo",  # an application: it writes to the source like any other
    },
    "confluent_kafka": {
        "cdc/log",
        "cdc/operate/commands/setup.py",  # names the admin client's type
        "cdc/playground/demo/tail.py",  # a separate reader, so that the view does not share the writer's
    },
    "google_crc32c": {"cdc/log/direct"},
    "alembic": {"cdc/publication/migrations.py"},
    "sqlalchemy": {"cdc/publication/migrations.py"},
    "prometheus_client": {"cdc/operate/http.py", "cdc/operate/metrics.py"},
    "requests": {"cdc/playground/servers/artifacts.py"},
    "maven_artifact": {"cdc/playground/servers/artifacts.py"},
    "click": {"cdc/cli"},
    # The demo's proof reads the followers' stores directly, like any of their readers.
    "redis": {"cdc/playground/demo/stores.py"},
    "opensearchpy": {"cdc/playground/demo/stores.py"},
    "deltalake": {"cdc/playground/demo/stores.py"},
    "rich": {"cdc/cli/demo.py", "cdc/cli/initial.py", "cdc/playground/demo/view.py"},
    "yaml": {
        "cdc/config",
        "cdc/playground/demo/stage.py",
    },  # the demo writes a separate configuration
}

# What each part may import from `cdc` at run time; imports for types alone are free.
LAYERS = {
    "cdc/events.py": set[str](),
    "cdc/errors.py": set[str](),
    "cdc/failpoints.py": set[str](),
    "cdc/runtime/background.py": set[str](),
    "cdc/decode/frames.py": set[str](),
    "cdc/sequence/spool.py": {"cdc.errors"},
    "cdc/decode": {"cdc.decode", "cdc.errors", "cdc.events"},
    "cdc/log/trace.py": set[str](),
    "cdc/log": {
        "cdc.runtime.waiting",
        *("cdc", "cdc.log", "cdc.decode", "cdc.errors", "cdc.events", "cdc.failpoints"),
        "cdc.log.trace",
    },
    "cdc/source/authority.py": set[str](),
    "cdc/source": {
        "cdc.runtime.waiting",
        *(
            "cdc.source",
            "cdc.log",
            "cdc.errors",
            "cdc.events",
            "cdc.decode.frames",
            "cdc.source.authority",
        ),
    },
    "cdc/sequence/state.py": {"cdc.decode", "cdc.errors", "cdc.events"},
    "cdc/sequence/sequencer.py": {
        *(
            "cdc.decode",
            "cdc.log",
            "cdc.errors",
            "cdc.events",
            "cdc.decode.frames",
            "cdc.sequence.state",
        ),
        "cdc.sequence.replay",
    },
    "cdc/sequence/in_progress.py": {
        "cdc.decode",
        "cdc.sequence.state",
        "cdc.errors",
        "cdc.decode.frames",
    },
    "cdc/publication/column_identity.py": {"cdc.log"},
    "cdc/sequence/relations.py": {
        *("cdc.publication.column_identity", "cdc.config", "cdc.decode", "cdc.errors", "cdc.log")
    },
    "cdc/publication/continuity.py": {"cdc.errors", "cdc.events", "cdc.publication.diff"},
    "cdc/publication/diff.py": {"cdc.errors", "cdc.log"},
    "cdc/sequence/replay.py": {"cdc.errors", "cdc.events"},
}
# The daemon runs without these: tools around it, not parts of it.
AROUND = {"cdc.cli", "cdc.playground.demo", "cdc.playground.servers"}
CORE = ("cdc/daemon/pipeline.py", "cdc/daemon/process.py", "cdc/operate", *LAYERS)


def modules(node: ast.AST) -> set[str]:
    """Return the modules that an import statement names, as `cdc.part` if they are ours."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        if node.module == "cdc":  # `from cdc import continuity` names a part or attribute of cdc
            named = {alias.name for alias in node.names}
            return {f"cdc.{name}" if not name.startswith("__") else "cdc" for name in named}
        return {".".join(node.module.split(".")[:2])}
    return set()


@cache
def imports(name: str, *, types_too: bool) -> set[str]:
    """Return what a module imports; `types_too` also under TYPE_CHECKING."""
    tree = SOURCES[name]
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types_too
        for inner in ast.walk(node)
    }
    return {name for node in ast.walk(tree) if id(node) not in skipped for name in modules(node)}


@pytest.mark.parametrize("client", OWNERS)
def test_a_foreign_client_has_few_owners(client: str) -> None:
    owners = tuple(OWNERS[client])
    users = {
        name
        for name in SOURCES
        if client in {found.split(".")[0] for found in imports(name, types_too=True)}
    }
    assert {name for name in users if not name.startswith(owners)} == set()
    # An owner that no longer uses the client must be removed from the line.
    assert {owner for owner in owners if not any(name.startswith(owner) for name in users)} == set()


@pytest.mark.parametrize("part", LAYERS)
def test_a_layer_knows_only_those_below(part: str) -> None:
    for name in SOURCES:
        if name.startswith(part):
            ours = {found for found in imports(name, types_too=False) if found.startswith("cdc")}
            assert ours <= LAYERS[part], name


def test_the_daemon_runs_without_the_tools_around_it() -> None:
    for name in SOURCES:
        if name.startswith(CORE):
            assert not imports(name, types_too=True) & AROUND, name


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
