"""Delete the versions of a mirror that no frontier names: their files, and their commits.

For rows that must be found nowhere: old files have deleted rows, and the statistics in old commits
have bounds of their values. It follows a rebuild of the mirror, after which all files are new and
every frontier that is left names a version after it. Files that the writer has not committed yet
are not touched.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileType

from lockstep.sinks.delta import lake, log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyarrow.fs import PyFileSystem

_LOG: Final = "_delta_log"
_COMMIT: Final = re.compile(r"(\d{20})\.json")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint\..*parquet")


def forget_before(path: str, storage: Mapping[str, str], version: int) -> int:
    """Delete everything that only versions before this one have; return how many files it was."""
    table = lake.opened(path, storage, version)
    if table is None:
        return 0
    files = log.files(table)
    listed = [each.base_name for each in files.get_file_info(FileSelector(_LOG))]
    commits = {name: int(at[1]) for name in listed if (at := _COMMIT.fullmatch(name))}
    checkpoints = {name: int(at[1]) for name in listed if (at := _CHECKPOINT.fullmatch(name))}
    if min(commits.values(), default=version) >= version:
        return 0
    old = _removed(files, commits, checkpoints, version) - log.added(table).keys()
    with lake.translated(path):
        table.create_checkpoint()
    deleted = 0
    for name in sorted(old):
        if files.get_file_info(name).type != FileType.NotFound:
            files.delete_file(name)
            deleted += 1
    for name, number in sorted((commits | checkpoints).items(), key=lambda each: each[1]):
        if number < version:
            files.delete_file(f"{_LOG}/{name}")
    return deleted


def _removed(
    files: PyFileSystem, commits: Mapping[str, int], checkpoints: Mapping[str, int], version: int
) -> set[str]:
    """Return the files that were removed up to a version."""
    found = set[str]()
    for name, number in commits.items():
        if number <= version:
            with files.open_input_file(f"{_LOG}/{name}") as file:
                lines = file.read().splitlines()
            actions = (json.loads(line) for line in lines if line.strip())
            found |= {each["remove"]["path"] for each in actions if "remove" in each}
    for name, number in checkpoints.items():
        if number <= version:
            with files.open_input_file(f"{_LOG}/{name}") as file:
                rows = pq.read_table(file, columns=["remove"])["remove"].to_pylist()
            found |= {each["path"] for each in rows if each}
    return found
