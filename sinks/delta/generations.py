"""Generations of a lake: a shadow build replaces the generation that readers see.

A shadow build is a separate lake, below `<path>/_generations/<n>`. The switch overwrites the
mirrors at `<path>` with its mirrors, one commit each, and then writes one row of `_frontiers`,
which makes it the current generation for all tables at once; readers of a single table keep its
path. The previous generation stays in the Delta versions that its own rows name, until it is
dropped: until then nothing is vacuumed. Mirrors that are already switched reject late writes from a
follower of the old generation. If the switch is killed, the next process finishes it: the rebuild
when it is repeated, or a follower that finds a mirror above the current generation. Both may do so
concurrently.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSelector, FileType, PyFileSystem

from cdc.errors import ConfigError, StoreLostError, UnavailableError
from lockstep.sinks.delta import evolve, features, lake, layout
from lockstep.sinks.delta.frontier_rows import FrontierRow
from lockstep.sinks.delta.frontiers import FrontierTable
from lockstep.sinks.delta.lake import CommitInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deltalake import DeltaTable

    from lockstep.sinks.contract import Applied
    from lockstep.sinks.delta.settings import DeltaSettings

T = TypeVar("T")

log = logging.getLogger("lockstep.sinks.delta")

_SHADOWS: Final = "_generations"
# How often a step is repeated because another process committed first: a follower of the old
# generation, at most every two seconds by then, or one that finishes the same switch.
_TRIES: Final = 20
# How many mirrors are opened concurrently: on an object store they wait more than they compute.
_AT_ONCE: Final = 16


def place(settings: DeltaSettings, generation: int | None) -> tuple[str, FrontierRow | None]:
    """Return where a generation's mirrors are, and its newest frontier if it is read-only."""
    root = settings.path.rstrip("/")
    current = _frontiers(settings, root)
    if generation is None:
        return root, None
    if not current.find():
        # If a lake's `_frontiers` was lost, its mirrors stay until the next generation is complete.
        return (root if generation == 1 else _shadow_root(settings, generation)), None
    if current.generation == generation:
        return root, None
    if generation < current.generation:
        past = current.rows().get(generation)
        if past is not None:
            return root, past
    return _shadow_root(settings, generation), None


def holds_anything(settings: DeltaSettings) -> bool:
    """Return whether anything exists below the path; creates nothing, not even a folder."""
    path = settings.path.removeprefix("file://")
    if "://" in path:
        with lake.translated(path):
            listed = _files(settings).get_file_info(FileSelector("", allow_not_found=True))
        return bool(listed)
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is not None
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UnavailableError(
            f"{path} can't be read: {error.strerror}", hint="see the volume that it is on"
        ) from error


def found(settings: DeltaSettings) -> Mapping[int, Applied | None]:
    """Return every generation and its applied frontier."""
    current = _frontiers(settings, settings.path)
    every: dict[int, Applied | None] = {}
    if current.find():
        every = {number: row.applied for number, row in current.rows().items()}
        every.setdefault(current.generation, None)
    for number in _numbers(settings):
        built = _frontiers(settings, _shadow_root(settings, number))
        if number not in every:
            every[number] = built.newest.applied if built.find() and built.newest else None
    return every


def switch(settings: DeltaSettings, generation: int, former: Applied | None = None) -> None:
    """Switch readers to a generation from its shadow build; see `Generations.switch`."""
    current = _frontiers(settings, settings.path)
    current.open(1)
    if current.generation == generation:
        return
    try:
        _switch(settings, generation, current, former)
    except Exception:
        # Another process that has finished the switch has deleted the build.
        if current.find() and current.generation == generation:
            return
        raise
    clear(settings, generation, settings.path)


def _switch(
    settings: DeltaSettings, generation: int, current: FrontierTable, former: Applied | None
) -> None:
    """Replace the mirrors, then append the row; repeatable."""
    built = _frontiers(settings, _shadow_root(settings, generation))
    new = built.newest if built.find() else None
    if new is None or not new.is_whole:
        raise ConfigError(
            f"generation {generation} of {settings.path} is at no frontier",
            hint="wait until it has caught up, or build it: `cdc rebuild`",
        )
    versions: dict[str, int] = {}
    for each, version in new.versions.items():
        versions[each] = _repeated(settings, partial(move, settings, generation, each, version))
    emptied: dict[str, int | None] = {}
    carried: dict[str, tuple[int, int]] = {}

    def show() -> None:
        """Append the row, from the newest frontier of the old generation's follower.

        That commits until its mirrors are replaced, and frontiers without changes after that.
        """
        if not current.find() or current.generation == generation:
            return
        before = current.newest
        places = before.versions.keys() if before else set()
        for each in places - versions.keys() - emptied.keys() - carried.keys():
            if built.tables is None:  # it is complete: mirrors that it lacks have no rows
                emptied[each] = _emptied(settings, generation, new.applied.seq, each)
            else:
                carried[each] = _carried(settings, generation, each)
        applied, reached = new.applied, max(new.applied.seq, built.reached)
        at_one_frontier = True
        if before is not None and built.tables is not None:
            older = before.applied.replaced_by(former)
            applied = min(older, applied, key=lambda each: (each.seq, each.lsn))
            # If the follower is in the middle of a cut, some of them are ahead of its frontier.
            ahead = max((seq for _, seq in carried.values()), default=0)
            reached = max(reached, before.applied.seq, current.reached, ahead)
            at_one_frontier = before.applied.seq == new.applied.seq and ahead <= applied.seq
        every = {
            **versions,
            **{each: version for each, version in emptied.items() if version is not None},
            **{each: version for each, (version, _) in carried.items()},
        }
        applied = applied._replace(generation=generation)
        current.switch(FrontierRow(generation, applied, every, at_one_frontier), reached)

    _repeated(settings, show)


def _repeated(settings: DeltaSettings, step: Callable[[], T]) -> T:
    """Return what a step returns; repeat it if another process committed first."""
    for _ in range(_TRIES):
        try:
            return step()
        except lake.ConflictError:
            continue
    raise lake.busy(settings.path)


def switching(settings: DeltaSettings) -> int | None:
    """Return the generation whose switch was interrupted: a mirror has it, `_frontiers` not yet.

    None if there is none, or its shadow build is missing.
    """
    current, root = _frontiers(settings, settings.path), settings.path.rstrip("/")
    current.find()
    app = lake.app_of(settings.pipeline, settings.follower)

    def at(mirror: str) -> int:
        table = lake.opened(f"{root}/{mirror}", settings.storage)
        if table is None:
            return 0
        with lake.translated(f"{root}/{mirror}"):
            return lake.generation_and_seq(lake.newest_transaction(table, app))[0]

    for number in reversed(_numbers(settings)):
        if number <= current.generation:
            return None
        built = _frontiers(settings, _shadow_root(settings, number))
        new = built.newest if built.find() else None
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            if new is not None and number in set(pool.map(at, new.versions)):
                return number
    return None


def finish_switch(settings: DeltaSettings) -> bool:
    """Finish a switch that was interrupted; return whether there was one."""
    number = switching(settings)
    if number is not None:
        log.warning("%s: finishing the switch to generation %d", settings.follower, number)
        switch(settings, number)
    return number is not None


def clear(settings: DeltaSettings, generation: int, root: str) -> None:
    """Delete the remains of a generation's shadow build, once it is current."""
    if root == settings.path.rstrip("/") and generation in _numbers(settings):
        _delete(settings, generation)


def still_read(settings: DeltaSettings) -> int | None:
    """Return the older generation that readers use until the current one is at a frontier."""
    current = _frontiers(settings, settings.path)
    if not current.find():
        return None
    rows = current.rows()
    newest = rows.get(current.generation)
    older = [number for number in rows if number < current.generation]
    return max(older, default=None) if newest is None or not newest.is_whole else None


def drop_unread(settings: DeltaSettings, generation: int) -> None:
    """Delete an older generation; if readers use it, leave that to upkeep."""
    if still_read(settings) is None:
        drop(settings, generation)
        return
    current = _frontiers(settings, settings.path)

    def note() -> None:
        current.open(1)
        current.drop_later(generation)

    _repeated(settings, note)


def drop(settings: DeltaSettings, generation: int) -> None:
    """Delete what only a generation has, which must not be the current one."""
    current = _frontiers(settings, settings.path)
    if current.find():
        if current.generation == generation:
            raise ConfigError(
                f"readers see generation {generation} of {settings.path}", hint="switch first"
            )
        if generation in current.rows():
            current.delete(generation)
    if generation in _numbers(settings):
        _delete(settings, generation)


def move(settings: DeltaSettings, generation: int, mirror: str, version: int) -> int:
    """Replace the rows that readers see by a built mirror's; return the Delta version."""
    path = f"{settings.path.rstrip('/')}/{mirror}"
    built = lake.opened(f"{_shadow_root(settings, generation)}/{mirror}", settings.storage, version)
    if built is None:
        raise StoreLostError(f"{mirror} is missing in the shadow build {generation}")
    app = lake.app_of(settings.pipeline, settings.follower)
    upto = lake.newest_transaction(built, app) or lake.transaction_version(generation, 0)
    table = lake.opened(path, settings.storage)
    by = evolve.AlteringWriter(lake.newest_facts(built), settings.storage, settings.large)
    if table is not None:
        features.expect_ours(table, changes_rows=False)
    else:
        table = _made_as(built, path, by)
    if (lake.newest_transaction(table, app) or 0) < upto:
        # Fails if another process commits after the line above, perhaps later rows.
        table = lake.copied(built, table, path, settings.storage, CommitInfo(app, upto, by.facts))
    evolve.keep_key(table, evolve.key_of(built), by)
    return table.version()


def _made_as(built: DeltaTable, path: str, by: evolve.AlteringWriter) -> DeltaTable:
    """Create a mirror without rows that is partitioned, and has its columns mapped, as a built one.

    What is written to a path where nothing is would be neither.
    """
    fields = json.loads(built.schema().to_json())["fields"]
    columns = [(field["name"], field["type"]) for field in fields]
    table = lake.made(
        path,
        layout.struct(columns, path),
        by.storage,
        properties=layout.properties(name for name, _ in columns),
        facts=by.facts,
        partition=built.metadata().partition_columns,
    )
    evolve.map_columns(table, by)
    return table


def _carried(settings: DeltaSettings, generation: int, mirror: str) -> tuple[int, int]:
    """Assign an unchanged mirror to the new generation; return its Delta version and seq."""
    table = lake.opened(f"{settings.path.rstrip('/')}/{mirror}", settings.storage)
    assert table is not None, "a mirror that a frontier names is there"
    app = lake.app_of(settings.pipeline, settings.follower)
    number, seq = lake.generation_and_seq(lake.newest_transaction(table, app))
    if number < generation:
        facts = lake.newest_facts(table) | {"generation": generation}
        commit = CommitInfo(app, lake.transaction_version(generation, seq), facts)
        features.expect_ours(table, changes_rows=False)
        with lake.translated(table.table_uri):
            lake.append(table, lake.arrow_schema(table).empty_table(), commit)
    return table.version(), seq


def _emptied(settings: DeltaSettings, generation: int, seq: int, mirror: str) -> int | None:
    """Delete all rows of a mirror that a complete generation lacks; return its version."""
    table = lake.opened(f"{settings.path.rstrip('/')}/{mirror}", settings.storage)
    if table is None:
        return None
    app = lake.app_of(settings.pipeline, settings.follower)
    if lake.generation_and_seq(lake.newest_transaction(table, app))[0] < generation:
        facts = lake.newest_facts(table) | {"generation": generation}
        commit = CommitInfo(app, lake.transaction_version(generation, seq), facts)
        features.expect_ours(table, changes_rows=False)
        with lake.translated(table.table_uri):
            lake.replace(table, lake.arrow_schema(table).empty_table(), commit)
            table.update_incremental()
    return table.version()


def folders(settings: DeltaSettings, root: str) -> list[str]:
    """Return the folders below a root that are not internal by their name."""
    with lake.translated(root):
        files = PyFileSystem(DeltaStorageHandler(root, dict(settings.storage)))
        listed = files.get_file_info(FileSelector("", allow_not_found=True))
    return [
        each.base_name
        for each in listed
        if each.type == FileType.Directory and not each.base_name.startswith("_")
    ]


def _frontiers(settings: DeltaSettings, root: str) -> FrontierTable:
    return FrontierTable(root, settings.storage, settings.owner)


def _shadow_root(settings: DeltaSettings, generation: int) -> str:
    return f"{settings.path.rstrip('/')}/{_SHADOWS}/{generation}"


def _numbers(settings: DeltaSettings) -> list[int]:
    """Return the generations that have a shadow build."""
    if not holds_anything(settings):
        return []
    with lake.translated(settings.path):
        listed = _files(settings).get_file_info(FileSelector(_SHADOWS, allow_not_found=True))
    return sorted(
        int(each.base_name)
        for each in listed
        if each.type == FileType.Directory and each.base_name.isdigit()
    )


def _delete(settings: DeltaSettings, generation: int) -> None:
    with lake.translated(settings.path):
        _files(settings).delete_dir(f"{_SHADOWS}/{generation}")
    # On a file system that leaves empty folders, which would be listed forever.
    shutil.rmtree(_shadow_root(settings, generation).removeprefix("file://"), ignore_errors=True)


def _files(settings: DeltaSettings) -> PyFileSystem:
    """Return the lake's storage with delta-rs' access to it."""
    return PyFileSystem(DeltaStorageHandler(settings.path, dict(settings.storage)))
