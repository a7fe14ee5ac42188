"""Erase rows from a lake: its mirrors are written again without them, and older versions deleted.

For rows that must be found nowhere. A deleted row is in files that have it in a deletion vector, in
replaced files, and in the bounds of values in old commits; a history, and soft deletes, have its
versions in the newest state.

A mirror is written again by one commit that changes nothing else, with the follower's own Delta
transaction: of it and a batch of a running follower the later one fails, and is repeated. It must
be at the lake's newest frontier, because a version that has more than that can't be read as of any.
Then `_frontiers` gets, in one commit, that frontier with the new versions, in place of all rows;
and everything that only older versions have is deleted. Killed anywhere, it may be run again.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileType

from cdc.errors import ConfigError, UnavailableError
from lockstep.sinks.contract import Change, Changes
from lockstep.sinks.delta import altering, features, lake, layout, log
from lockstep.sinks.delta import keys as delta_keys
from lockstep.sinks.delta.frontiers import FrontierTable
from lockstep.sinks.delta.lake import CommitInfo, ConflictError
from lockstep.sinks.delta.parquet_form import GROUP_ROWS
from lockstep.sinks.delta.rows import batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deltalake import DeltaTable
    from pyarrow.fs import PyFileSystem

    from lockstep.sinks.contract import Version
    from lockstep.sinks.delta.frontier_rows import FrontierRow
    from lockstep.sinks.delta.settings import DeltaSettings

_TRIES: Final = 20
# An unnamed file that is younger may be one that the follower has not committed yet.
_GRACE_HOURS: Final = 1
_LOG: Final = "_delta_log"
_COMMIT: Final = re.compile(r"(\d{20})\.json")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint\..*parquet")
# All of a version's files: Spark's checksums may list files with bounds of their values, too.
_NUMBERED: Final = re.compile(r"\.?(\d{20})\.")


class Erased(NamedTuple):
    """A table's erased rows: by the seqs of their events, or by key."""

    topic: str
    seqs: pa.Int64Array
    version: Version | None  # the table's newest, if there are keys
    keys: Sequence[bytes]  # for rows that are no event's, as a direct snapshot writes them

    def kept(self, rows: pa.Table) -> pa.Table:
        """Return the rows of a history, or with soft deletes, that are not erased."""
        lost = pc.is_in(rows[layout.SEQ], value_set=self.seqs)
        if self.version is not None and self.keys and len(self.seqs):
            schema_id = self.version.schema_id
            asked = [Change(key, 0, None, schema_id, 0, 0) for key in self.keys]
            wanted = batch(Changes((self.version,), asked), rows.schema, {}).rows
            mine, theirs = delta_keys.identities(rows, wanted, self.version.key)
            older = pc.less_equal(rows[layout.SEQ], pc.max(self.seqs))
            lost = pc.or_(lost, pc.and_(pc.is_in(mine, value_set=theirs), older))
        return rows.filter(pc.invert(lost))


def erase(
    settings: DeltaSettings, erased: Erased | None, applied_seq: int, step: Callable[[str], None]
) -> list[str]:
    """Erase a table's rows from its mirror; return the folders of the mirrors written again.

    None: from every mirror of a lake of views, which have no events; of a view's history only
    the current versions stay. `applied_seq` is what the lake must have applied: ConfigError if it
    has not, or has another generation; UnavailableError if a mirror is in the middle of a cut.
    `step` is called with the name of each step that is done.
    """
    frontiers = FrontierTable(settings.path, settings.storage, settings.owner)
    if not frontiers.find() or (newest := frontiers.newest) is None:
        return []
    for _ in range(_TRIES):
        _expect_applied(settings, newest, applied_seq)
        places = _places(settings, newest, erased)
        try:
            versions = {each: _written(settings, newest, each, erased) for each in places}
            step("erase_mirror")
            frontiers.forget(versions)
        except ConflictError:
            frontiers.find()
            assert frontiers.newest is not None, "frontiers only advance"
            newest = frontiers.newest
            continue
        step("erase_frontier")
        for place, version in versions.items():
            path = f"{_root(settings)}/{place}"
            _forget_before(path, settings.storage, version)
            _delete_unnamed(path, settings.storage, version)
        return places
    raise lake.busy(settings.path)


def _places(settings: DeltaSettings, newest: FrontierRow, erased: Erased | None) -> list[str]:
    if erased is None:
        return sorted(newest.versions)
    place = erased.topic.removeprefix(f"{settings.prefix}.")
    return [place] if place in newest.versions else []


def _expect_applied(settings: DeltaSettings, newest: FrontierRow, seq: int) -> None:
    if newest.applied.seq < seq:
        raise ConfigError(
            f"{settings.follower} has not applied seq {seq} yet: its mirrors still have the row",
            hint="let it catch up, and erase again; archive and bases are done",
        )


def _root(settings: DeltaSettings) -> str:
    return settings.path.rstrip("/")


# -- a mirror --------------------------------------------------------------------------------------


def _written(
    settings: DeltaSettings, newest: FrontierRow, place: str, erased: Erased | None
) -> int:
    """Write a mirror again, unless none of its files has a deleted row; return its version."""
    path = f"{_root(settings)}/{place}"
    table = lake.opened(path, settings.storage)
    if table is None:
        raise UnavailableError(f"the mirror {path} is missing", hint="see its follower")
    app = lake.app_of(settings.pipeline, settings.follower)
    generation, seq = lake.generation_and_seq(lake.newest_transaction(table, app))
    altered = lake.generation_and_seq(lake.newest_transaction(table, altering.app(app)))
    reached = max((generation, seq), altered)
    if reached > (newest.generation, newest.applied.seq) or not newest.is_whole:
        raise UnavailableError(
            f"{path} is in the middle of a cut",
            hint="stop its follower, which ends at a frontier, and erase again",
        )
    keeps = layout.CURRENT in _names(table) or layout.DELETED in _names(table)
    if not keeps and not log.vectors(table):
        return table.version()
    features.expect_ours(table)
    upto = lake.transaction_version(generation or newest.generation, seq)
    commit = CommitInfo(app, upto, lake.newest_facts(table))
    groups = GROUP_ROWS if layout.CURRENT in _names(table) else None
    with lake.translated(path):
        schema = lake.arrow_schema(table)
        lake.rewrite(table, schema, _kept(table, erased), commit.properties, groups)
        table.update_incremental()
    return table.version()


def _names(table: DeltaTable) -> list[str]:
    return list(lake.arrow_schema(table).names)


def _kept(table: DeltaTable, erased: Erased | None) -> Iterator[pa.RecordBatch]:
    """Yield the rows that stay."""
    names = _names(table)
    for rows in lake.streamed(table):
        kept = rows
        if erased is not None and (layout.CURRENT in names or layout.DELETED in names):
            kept = erased.kept(rows)
        elif layout.CURRENT in names:
            kept = rows.filter(rows[layout.CURRENT])
        yield from kept.to_batches()


# -- older versions --------------------------------------------------------------------------------


def _forget_before(path: str, storage: Mapping[str, str], version: int) -> None:
    """Delete everything that only versions before this one have."""
    table = lake.opened(path, storage, version)
    assert table is not None, "it was just written"
    files = log.files(table)
    listed = [each.base_name for each in files.get_file_info(FileSelector(_LOG))]
    commits = {name: int(at[1]) for name in listed if (at := _COMMIT.fullmatch(name))}
    checkpoints = {name: int(at[1]) for name in listed if (at := _CHECKPOINT.fullmatch(name))}
    older = {
        name: number
        for name in listed
        if (at := _NUMBERED.match(name)) and (number := int(at[1])) < version
    }
    if not older:
        return
    old = _removed(files, commits, checkpoints, version) - log.added(table).keys()
    with lake.translated(path):
        table.create_checkpoint()
    for name in map(unquote, sorted(old)):
        if files.get_file_info(name).type != FileType.NotFound:
            files.delete_file(name)
    for name in sorted(older, key=older.__getitem__):
        files.delete_file(f"{_LOG}/{name}")


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


def _delete_unnamed(path: str, storage: Mapping[str, str], version: int) -> None:
    """Delete files that no version since this one names: those of a commit that never came."""
    then, table = lake.opened(path, storage, version), lake.opened(path, storage)
    assert then is not None, "it was just read"
    assert table is not None, "it was just read"
    since = log.since(table, version)
    if since is None:
        return  # its log was cleaned up meanwhile
    added, removed = since
    named = {unquote(each) for each in (*log.added(then), *added, *removed)}
    oldest = datetime.now(UTC) - timedelta(hours=_GRACE_HOURS)
    files = log.files(table)
    for each in files.get_file_info(FileSelector("", recursive=True)):
        is_data = each.path.endswith(".parquet") and not each.path.startswith(f"{_LOG}/")
        if is_data and each.path not in named and each.mtime < oldest:
            files.delete_file(each.path)
