"""The Delta table that holds bases: a version of it is a base.

The commit that makes a base adds its files and removes those of the base before that it does not
share. So a reader of an older base reads an older version, whose files are kept until more than
`archive.bases_kept` bases were made since, and an hour longer. Each base states from which one on
files are kept, since the setting may change. The commits have digests of each other, as those of
the archive, in whose folder the table is.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import msgspec

from cdc.errors import CDCError, CompactedError, ConfigError
from lockstep.jobs.archiving.table import ChainedTable, commit_facts
from lockstep.jobs.archiving.writing import removed
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
GRACE_HOURS: Final = 1
_HOUR_US: Final = 3_600_000_000


class Bases(ChainedTable):
    """The bases of one archive."""

    columns = layout.DELTA_COLUMNS
    about = "bases"

    def newest(self) -> BaseRecord | None:
        """Return the newest base of the loaded table; None if it has none."""
        text = self.stated().get("base")
        return None if text is None else layout.decode(text.encode())

    def kept(self, many: int) -> list[BaseRecord]:
        """Return the newest bases, at most so many, the newest first.

        None of which files were deleted, though Delta's log has it: `many` may have been fewer.
        """
        found: list[BaseRecord] = []
        for version in range(self.table.version(), 0, -1):
            if len(found) == many or (found and version < found[0].oldest):
                break
            record = self._at(version)
            if record is None:
                break
            found.append(record)
        return found

    def _at(self, version: int) -> BaseRecord | None:
        """Return the base that a version is; None if its commit is not ours or is missing.

        Raises UnavailableError if it can't be read.
        """
        try:
            text = commit_facts(self.read(f"_delta_log/{version:020d}.json")).get("base")
            return None if text is None else layout.decode(text.encode())
        except (FileNotFoundError, msgspec.MsgspecError):
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
        removals = (removed(each, changes_rows=True) for each in old)
        self.commit_facts([*removals, *added], stated, "WRITE")

    def outdate(self) -> None:
        """Commit a version without a base: a first compaction that runs meanwhile conflicts."""
        self.commit_facts([], {"pipeline": self._pipeline}, "ERASE")

    def oldest_needed(self, many: int) -> int:
        """Return from which base on files stay when another one is made.

        A reader opens one of the newest `many`, and has at least the hour of grace to read it.
        """
        newest, since = self.newest(), time.time_ns() // 1_000 - GRACE_HOURS * _HOUR_US
        if newest is None:
            return 1
        for record in self.kept(newest.number):
            if record.made_at_us <= since:  # the newest of an hour ago
                return max(newest.oldest, record.number - many + 1)
        return newest.oldest

    def vacuum(self) -> int:
        """Delete files that are in no base from the newest one's `kept_from` on; return how many.

        Those of the loaded version stay, also if its commit is not ours.
        """
        kept, needed = self.kept(self.table.version()), set(self.added())
        for record in kept:
            needed |= log.added(self.version(record.number)).keys()
        return self.delete_unnamed(needed, datetime.now(UTC) - timedelta(hours=GRACE_HOURS))


def bases_of(config: Config) -> Bases:
    """Return the bases of the configured archive."""
    assert config.archive.path is not None, "the caller has checked"
    path = f"{config.archive.path.rstrip('/')}/{FOLDER}"
    return Bases(path, config.archive.storage, config.pipeline)


def with_base(config: Config, error: CDCError) -> CDCError:
    """Return an error of a compacted range with the base that its reader may start from."""
    if not isinstance(error, CompactedError):
        return error
    return CompactedError(error.what, hint=f"{error.hint}. {_newest(config)}")


def _newest(config: Config) -> str:
    if config.archive.path is None:
        return "There is no archive, so there is no base"
    try:
        bases = bases_of(config)
        record = bases.newest() if bases.find() else None
    except CDCError as error:
        return f"Which bases there are is not known: {error.what}"
    if record is None:
        return "There is no base: `cdc archive compact` makes one"
    return f"The newest base is {record.number}, at {record.lsn} (seq {record.seq})"
