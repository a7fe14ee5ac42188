"""The changes of a follower's views in a cut of their mirror.

A cut goes from one frontier of the mirror to a later one. The keys that the changed rows can affect
are found by the view's own joins, in the old state and in the new one; the query restricted to them
is computed in both, and rows that differ are changes: a row that is there now, or a key that has
none any more. Where the keys can't be found, the complete query is computed in both.

The state before is the mirror's own, not the store's: the store holds the view at exactly that
frontier, and what it holds is not read. So every store of the contract can have views.
"""

from __future__ import annotations

import gc
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from cdc.errors import CDCError, ConfigError
from cdc.log.follower_reports import ViewWork
from lockstep.jobs.copying.driving import is_ours, translated
from lockstep.jobs.documents.mirror import MirrorVersion
from lockstep.jobs.documents.mirror_cuts import MirrorCut, MirrorCuts
from lockstep.jobs.views import code, definitions, jsonb_functions
from lockstep.jobs.views.answers import Answers
from lockstep.jobs.views.computing import Computation
from lockstep.jobs.views.costs import Costs, Stopwatch
from lockstep.jobs.views.definitions import DEFINITIONS, Definition
from lockstep.jobs.views.plans import ViewPlan, plan
from lockstep.jobs.views.quotients import NO_DIGITS
from lockstep.jobs.views.states import INEXACT_VALUE, TableStates
from lockstep.sinks.contract import Changes
from lockstep.sinks.delta import layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from cdc.events import LSN
    from lockstep.jobs.views.computing import Build
    from lockstep.jobs.views.costs import Decision
    from lockstep.sinks.contract import Applied, Version

# Of Spark's errors, those about a value that a type does not have.
_NO_VALUE: Final = re.compile(
    r"\[(ARITHMETIC_OVERFLOW|CAST_OVERFLOW|INTERVAL_ARITHMETIC_OVERFLOW|DATETIME_OVERFLOW"
    r"|NUMERIC_VALUE_OUT_OF_RANGE|NUMERIC_OUT_OF_SUPPORTED_RANGE|DATETIME_FIELD_OUT_OF_BOUNDS"
    r"|DIVIDE_BY_ZERO|REMAINDER_BY_ZERO)"
)
_VALUE_IN: Final = re.compile(re.escape(INEXACT_VALUE) + r" in (\S+)\.(?:\s|'|$)")


class ViewCuts(MirrorCuts):
    """Computes the changes of a follower's views; keeps rows that it has computed, no position."""

    def __init__(
        self,
        config: Config,
        name: str,
        session: Callable[[], AbstractContextManager[SparkSession]],
        versions: Callable[[LSN], Mapping[str, Version]] | None = None,
    ) -> None:
        super().__init__(config, name, versions)
        self._views, self._session = config.followers[name].views, session
        self._answers, self._costs = Answers(), Costs()
        # Planning takes as long as computing a small view.
        self._planned: tuple[Mapping[str, Version], list[ViewPlan]] | None = None
        self.decisions: list[Decision] = []  # of the last cut
        self.work = dict[str, ViewWork]()  # how each view was computed the last time

    @property
    def names(self) -> tuple[str, ...]:
        """The views' names."""
        return self._views

    def plans(self, applied: Applied) -> list[ViewPlan]:
        """Return the plans of the views, for the table versions in force at a frontier."""
        versions = self._versions_of(applied)
        if self._planned is None or self._planned[0] != versions:
            plans = [plan(name, self._config.views, versions) for name in self._views]
            self._planned = dict(versions), plans
        return self._planned[1]

    def tables_of(self, applied: Applied) -> list[Version]:
        """Return what a sink's `begin` needs: the views as tables, and their definitions."""
        return [*(each.version for each in self.plans(applied)), DEFINITIONS]

    def view_changes(
        self, cut: MirrorCut, stored: Mapping[str, Definition], build: Build | None = None
    ) -> Iterator[Changes]:
        """Yield the cut's changes; `stored` has the definitions that the store was built by.

        `build` writes a view that is computed completely, where it can.
        """
        after = cut.after.applied
        self.decisions = []
        if not has_rows(cut):
            return
        plans = self.plans(after)
        with self._working(cut, plans) as (spark, tables):
            for view in plans:
                work = Computation(spark, view, tables, cut, self._answers, self._costs, build)
                clock = Stopwatch()
                yield from clock.timed(work.changes(is_built=_is_stored(view, stored)))
                self._note(view, work.decision, clock.seconds, after.lsn)
                gc.collect(1)  # the JVM holds a view's DataFrames until their cycles are collected
        changed = {each.name: each.definition for each in plans if not _is_stored(each, stored)}
        if changed:
            yield definitions.changes(changed, after)

    def _note(self, view: ViewPlan, decision: Decision, seconds: float, lsn: LSN) -> None:
        self.decisions.append(decision)
        self._costs.note(view, decision, seconds)
        if decision.how != "nothing":
            self.work[view.name] = ViewWork(decision.how, decision.why, round(seconds, 3), str(lsn))

    def every_row(self, name: str, applied: Applied) -> Iterator[bytes]:
        """Yield a view's rows at a frontier, all computed from the mirror as it was there."""
        frontiers = self._frontiers()
        assert frontiers is not None, "the store was made from one"
        cut = MirrorCut(None, self._at(frontiers, applied))
        view = plan(name, self._config.views, self._versions_of(applied))
        with self._working(cut, [view]) as (spark, tables):
            work = Computation(spark, view, tables, cut, Answers(), Costs())
            for found in work.changes(is_built=False):
                yield from (change.row for change in found.changes if change.row is not None)

    @contextmanager
    def _working(
        self, cut: MirrorCut, plans: Sequence[ViewPlan]
    ) -> Iterator[tuple[SparkSession, dict[str, TableStates]]]:
        """Give a session, and the states of the views' tables; translate errors of Spark's."""
        versions = self._versions_of(cut.after.applied)
        names = _read_by(plans)
        with self._session() as spark, _translated():
            spark.conf.set("spark.sql.ansi.enabled", "true")
            # Files are listed here: a job that does it takes longer.
            spark.conf.set("spark.sql.sources.parallelPartitionDiscovery.threshold", "1000")
            if any(jsonb_functions.are_called(each.new) for each in plans):
                jsonb_functions.register(spark)
            yield (
                spark,
                {
                    name: TableStates(
                        spark,
                        versions[name],
                        cut.before and self.place(cut.before.versions, versions[name]),
                        self.place(cut.after.versions, versions[name]),
                        self._storage,
                        self._files,
                        names,
                    )
                    for name in sorted({each for view in plans for each in view.tables})
                },
            )

    def place(self, versions: Mapping[str, int], table: Version) -> MirrorVersion | None:
        """Return where a table's mirror is, in one of these versions; None if it has none."""
        place = table.topic.removeprefix(f"{self._config.prefix}.")
        if place not in versions:
            return None
        path = layout.path(self._root, self._config.prefix, table.topic)
        return MirrorVersion(path, versions[place])


def _read_by(plans: Sequence[ViewPlan]) -> frozenset[str] | None:
    """Return the names of the columns that views read; None if these are not known."""
    if any(each.code is not None or each.made for each in plans):
        return None  # Python's inputs are other queries
    return frozenset[str]().union(*(each.column_names for each in plans))


def has_rows(cut: MirrorCut) -> bool:
    """Return whether rows can differ in a cut, and be written: only an LSN may be new."""
    return cut.before is None or cut.after.applied.seq > cut.before.applied.seq


def _is_stored(view: ViewPlan, stored: Mapping[str, Definition]) -> bool:
    found = stored.get(view.name)
    return found is not None and found.fingerprint == view.definition.fingerprint


@contextmanager
def _translated() -> Iterator[None]:
    """Translate what Spark reports about a value that the mirror's column can't hold."""
    try:
        yield
    except Exception as error:
        if (of_code := code.reported(error)) is not None:
            raise of_code from None  # Spark's error could quote values of rows
        if NO_DIGITS in str(error):
            raise ConfigError(
                "a view has a quotient of more digits than a store has (docs/VIEWS.md)",
                hint="leave such rows out of it, or round what it divides by round(…, n)",
            ) from error
        if (reason := _NO_VALUE.search(str(error))) is not None:
            raise ConfigError(
                "a view computes a value that its type does not have: "
                + reason[1].lower().replace("_", " "),
                hint="leave such rows out of it, cast to a wider type (a numeric has 38 digits at"
                " most), or divide by nullif(…, 0)",
            ) from None  # Spark's error quotes values of rows
        found = _VALUE_IN.search(str(error))
        if found is None and not isinstance(error, CDCError) and is_ours(error):
            raise translated(error) from error
        if found is None:
            raise
        raise ConfigError(
            f"{found[1]} has a value that is only text in its mirror (docs/DELTA.md, `_exact`)",
            hint="leave such rows out of the table, or the column out of the view",
        ) from error
