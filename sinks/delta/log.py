"""Read from Delta's log what delta-rs does not expose: each file as its add action has it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSelector, PyFileSystem

from cdc.errors import ConfigError
from lockstep.sinks.delta.actions import VECTORS
from lockstep.sinks.delta.lake import ConflictError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltalake import DeltaTable

_LOG: Final = "_delta_log"
_LOCAL: Final = "file://"
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint(?:\.\d{10}\.\d{10})?\.parquet")
_COMMIT: Final = re.compile(r"(\d{20})\.json")

Vectors = dict[str, dict[str, Any]]
Added = dict[str, dict[str, Any]]


def files(table: DeltaTable) -> PyFileSystem:
    """Return the table's files with delta-rs' access to them."""
    return PyFileSystem(DeltaStorageHandler.from_table(table._table))  # noqa: SLF001 - as it says itself


def opened(table: DeltaTable, path: str) -> pa.NativeFile:
    """Open a data file to be read: a local one without calls into Python for each of its parts."""
    if table.table_uri.startswith(_LOCAL):
        return pa.OSFile(unquote(table.table_uri.removeprefix(_LOCAL) + path))
    return files(table).open_input_file(unquote(path))


def listed(table: DeltaTable) -> list[Mapping[str, Any]]:
    """Return path, size and deletion vector of each file, without the log where it has no vectors.

    Raises as `added`.
    """
    if VECTORS in (table.protocol().reader_features or ()):
        return list(added(table).values())
    found = pa.table(table.get_add_actions()).select(["path", "size_bytes"]).to_pylist()
    return [{"path": each["path"], "size": each["size_bytes"]} for each in found]


def vectors(table: DeltaTable) -> Vectors:
    """Return the deletion vector of each file that has one, as its add action names it."""
    found = added(table).items()
    return {path: add["deletionVector"] for path, add in found if add.get("deletionVector")}


def since(table: DeltaTable, version: int) -> tuple[Added, set[str]] | None:
    """Return the add actions after a version, and the paths of files that it had and are removed.

    None if the log no longer has every commit since, or the table is at an earlier version.
    """
    if version > table.version():
        return None
    storage, found, removed = files(table), Added(), set[str]()
    for each in range(version + 1, table.version() + 1):
        try:
            with storage.open_input_file(f"{_LOG}/{each:020d}.json") as file:
                removed |= _committed(file.read(), found)
        except FileNotFoundError:
            return None
    return found, removed


def added(table: DeltaTable) -> Added:
    """Return the add action of each file; raise ConflictError if only later versions are left."""
    storage, last = files(table), table.version()
    names = [each.base_name for each in storage.get_file_info(FileSelector(_LOG))]
    checkpoints = {name: int(at[1]) for name in names if (at := _CHECKPOINT.fullmatch(name))}
    first = max((each for each in checkpoints.values() if each <= last), default=-1)
    found: Added = {}
    for name, version in checkpoints.items():
        if version == first:
            with storage.open_input_file(f"{_LOG}/{name}") as file:
                _checkpointed(pq.read_table(file, columns=["add"]).to_pylist(), found)
    commits = {int(at[1]): name for name in names if (at := _COMMIT.fullmatch(name))}
    for version in range(first + 1, last + 1):
        if version not in commits and max(commits, default=-1) > last:
            raise ConflictError(f"{table.table_uri}: version {last} was deleted after a later one")
        if version not in commits:
            raise ConfigError(
                f"{table.table_uri}: version {version} is neither in the log nor in a checkpoint"
                " of the classic form",
                hint="set `delta.checkpointPolicy` to classic, or the applier to delta-rs",
            )
        with storage.open_input_file(f"{_LOG}/{commits[version]}") as file:
            _committed(file.read(), found)
    return found


def _checkpointed(rows: list[dict[str, Any]], found: Added) -> None:
    for row in rows:
        if add := row["add"]:
            vector = add.get("deletionVector") or {}
            known = {name: each for name, each in vector.items() if each is not None}
            found[add["path"]] = {**add, "deletionVector": known}


def _committed(text: bytes, found: Added) -> set[str]:
    """Apply a commit; return the paths of the files that it removes."""
    actions = [json.loads(line) for line in text.splitlines() if line.strip()]
    removed = {action["remove"]["path"] for action in actions if "remove" in action}
    for path in removed:
        found.pop(path, None)
    for action in actions:
        if add := action.get("add"):
            found[add["path"]] = add
    return removed
