"""Check the Delta log of the archive, or of its bases, byte by byte.

Each commit has its own digest and that of the one before, so an altered or missing commit shows by
the next one. The newest has none: that it is missing shows by what was written after it, which is a
checkpoint, the file that names it, or the report of the table's job in Kafka.
"""

from __future__ import annotations

import json
import re
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.errors import CDCError, ConfigError
from lockstep.jobs.archiving.table import CHECKPOINT, HINT, check_commits, stated_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.log.follower_reports import TableCommit
    from lockstep.jobs.archiving.table import ChainedTable
    from lockstep.sinks.delta.actions import Files

_LOG: Final = "_delta_log"
# What reading a table raises whose log was altered.
UNREADABLE: Final = (CDCError, ValueError, KeyError, TypeError, OSError)
_PATH: Final = re.compile(rb'"path":"([^"]+)"')


class LogCheck(NamedTuple):
    """What is wrong with the log, and the data files that its commits name."""

    findings: list[str]
    named: frozenset[str]


def check(table: ChainedTable, reported: TableCommit | None = None) -> LogCheck:
    """Check a table's commits and its newest checkpoint; `reported` is a commit of it, if known.

    Raises ConfigError if there is no table.
    """
    files, found = table.files, []
    names = files.names(_LOG)
    commits = {int(name[:20]): name for name in names if name.endswith(".json")}
    if not commits:
        raise ConfigError(
            f"there is no {table.about} at {table.path}",
            hint="`cdc archive run` creates it; archive.path may name another place",
        )
    checkpoints = [int(name[:20]) for name in names if CHECKPOINT.match(name)]
    # Delta deletes old commits, but never the first one after its last checkpoint.
    first = min(commits) if max(checkpoints, default=-1) >= min(commits) - 1 else 0
    newest = max(commits)
    missing = sorted(set(range(first, newest)) - commits.keys())
    found += [f"{_name(each)} is missing" for each in missing]
    read = {name: files.read(f"{_LOG}/{name}") for _, name in sorted(commits.items())}
    found += [f"{_LOG}/{name} {what}" for name, what in check_commits(iter(read.items()))]
    found += _after(newest, [*checkpoints, *_hinted(files)], reported)
    if reported is not None and reported.version in commits:
        text = read[commits[reported.version]]
        if sha256(text).hexdigest() != reported.digest:
            found.append(f"{_name(reported.version)} is not what its job has reported")
    for name, digest in stated_checkpoint(read[commits[newest]]).items():
        try:
            stored = sha256(files.read(f"{_LOG}/{name}")).hexdigest()
        except FileNotFoundError:
            found.append(f"{_LOG}/{name} is missing")
            continue
        # A newer checkpoint, which the next commit will state, has replaced the hint.
        if stored != digest and not (name == HINT and max(checkpoints) >= newest):
            found.append(f"{_LOG}/{name} is not what was written")
    paths = (path.decode() for text in read.values() for path in _PATH.findall(text))
    return LogCheck(found, frozenset(paths))


def _name(version: int) -> str:
    return f"{_LOG}/{version:020d}.json"


def _after(newest: int, checkpoints: list[int], reported: TableCommit | None) -> Iterator[str]:
    """Yield which commits after the newest are missing."""
    last = max(checkpoints, default=-1)
    why = f"there is a checkpoint of version {last}"
    if reported is not None and reported.version > last:
        last, why = reported.version, f"its job has reported version {reported.version}"
    if last > newest:
        many = f" to {_name(last)}" if last > newest + 1 else ""
        yield f"{_name(newest + 1)}{many} is missing: {why}"


def _hinted(files: Files) -> list[int]:
    """Return the version that the hint names, if it can be read."""
    try:
        return [int(json.loads(files.read(f"{_LOG}/{HINT}"))["version"])]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return []
