"""The Delta table that holds bases: a version of it is a base.

The commit that makes a base adds its files and removes those of the base before that it does not
share. So a reader of an older base reads an older version, whose files are kept until more than
`archive.bases_kept` bases were made since. The commits have digests of each other, as those of the
archive, in whose folder the table is.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyarrow.fs import FileSelector

from cdc.errors import ConfigError
from lockstep.jobs.archiving.table import ChainedTable, commit_facts
from lockstep.jobs.archiving.writing import FILE_SUFFIX
from lockstep.jobs.compacting import layout
from lockstep.sinks.delta import lake, log

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deltalake import DeltaTable

    from cdc.config import Config
    from lockstep.jobs.compacting.layout import BaseRecord
    from lockstep.sinks.delta.actions import Action

FOLDER: Final = "_bases"
# A reader may have opened a base just before it was replaced, and another compaction is writing.
_GRACE_HOURS: Final = 1


class Bases(ChainedTable):
    """The bases of one archive."""

    columns = layout.DELTA_COLUMNS
    about = "bases"

    def newest(self) -> BaseRecord | None:
        """Return the newest base of the loaded table; None if it has none."""
        text = self.stated().get("base")
        return None if text is None else layout.decode(text.encode())

    def kept(self, many: int) -> list[BaseRecord]:
        """Return the newest bases, at most so many, the newest first."""
        found: list[BaseRecord] = []
        for version in range(self.table.version(), 0, -1):
            if len(found) == many:
                break
            record = self._at(version)
            if record is None:
                break
            found.append(record)
        return found

    def _at(self, version: int) -> BaseRecord | None:
        """Return the base that a version is; None if its commit is not ours or is missing."""
        try:
            text = commit_facts(self.read(f"_delta_log/{version:020d}.json")).get("base")
            return None if text is None else layout.decode(text.encode())
        except (OSError, msgspec.MsgspecError):
            return None

    def version(self, number: int) -> DeltaTable:
        """Return the table as a base has it."""
        found = lake.opened(self.path, self.storage, number)
        if found is None:
            raise ConfigError(f"{self.path} has no base {number}", hint="`cdc archive compact`")
        return found

    def commit(self, record: BaseRecord, added: Iterable[Action], kept: set[str]) -> None:
        """Make a base visible: these files, and the `kept` ones of the base before."""
        old = [each for path, each in self.added().items() if path not in kept]
        stated = {"pipeline": record.pipeline, "base": layout.encode(record).decode()}
        self.commit_facts([*map(_removed, old), *added], stated, "WRITE")

    def vacuum(self, many: int) -> int:
        """Delete files that are in none of the newest bases; return how many."""
        needed = set[str]()
        for record in self.kept(many):
            needed |= log.added(self.version(record.number)).keys()
        oldest = datetime.now(UTC) - timedelta(hours=_GRACE_HOURS)
        files = log.files(self.table)
        old = [
            each.path
            for each in files.get_file_info(FileSelector(""))
            if each.base_name.endswith(FILE_SUFFIX)
            and each.base_name not in needed
            and each.mtime < oldest
        ]
        for path in old:
            files.delete_file(path)
        return len(old)


def bases_of(config: Config) -> Bases:
    """Return the bases of the configured archive."""
    assert config.archive.path is not None, "the caller has checked"
    path = f"{config.archive.path.rstrip('/')}/{FOLDER}"
    return Bases(path, config.archive.storage, config.pipeline)


def _removed(add: dict[str, Any]) -> Action:
    return {
        "remove": {
            "path": add["path"],
            "deletionTimestamp": int(time.time() * 1_000),
            "dataChange": True,
            "size": add["size"],
        }
    }
