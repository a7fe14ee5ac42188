"""Rebuild a store of one generation in place: it is emptied, and filled again.

For a sink without `sinks.contract.Generations`. There is no shadow build, so nothing is compared or
proved, and readers see an empty store, then how it is filled. Only what may take long is done
before: rows that the log no longer has are read again (`cdc snapshot`), and then the store gets all
of them as one cut. Killed at any time, it starts from scratch when it is called again; until the
store is emptied, its follower may go on, and nothing is reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.errors import ConfigError
from lockstep.jobs.generations.rebuilding import RebuildOutcome
from lockstep.sinks.contract import Applied

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.events import LSN
    from lockstep.jobs.generations.builders import LogBuilder
    from lockstep.sinks.contract import Sink


class InPlace:
    """The rebuild of one follower; the parameters are those of `Rebuild`."""

    def __init__(
        self, sink: Sink, builder: LogBuilder, report: Callable[[Applied, str], None], reported: int
    ) -> None:
        self._sink, self._builder, self._report = sink, builder, report
        self._reported = reported

    def run(self, tables: frozenset[str] | None = None) -> RebuildOutcome:
        """Rebuild the store."""
        if tables is not None:
            raise _one_generation("`--table`", "rebuild all tables: leave out `--table`")
        number = max(self._sink.current() or 0, self._reported) + 1

        def empty() -> None:
            # Not before: with this report, those of a follower that still runs do not count.
            self._report(self._builder.beginning(number), "its store is emptied and filled again")
            self._sink.start_over(number)

        applied = self._builder.refill(self._sink, number, empty)
        self._report(applied, "")
        return RebuildOutcome(number, applied, None)

    def as_of(self, lsn: LSN) -> RebuildOutcome:
        """Refuse it."""
        hint = "configure another follower, and call `cdc follow --followers NAME --until LSN`"
        raise _one_generation(f"`--as-of {lsn}`", hint)

    def drop_old(self) -> list[int]:
        """Return nothing: there is no other generation."""
        return []


def _one_generation(option: str, hint: str) -> ConfigError:
    return ConfigError(
        f"{option} needs a store with several generations, and this has one", hint=hint
    )
