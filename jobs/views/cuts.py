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
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from cdc.errors import CDCError, GapError, NoAnswerError, OvertakenError
from cdc.log.follower_reports import ViewWork
from lockstep.jobs.copying.driving import is_ours, translated
from lockstep.jobs.documents.mirror import MirrorVersion
from lockstep.jobs.documents.mirror_cuts import MirrorCut, MirrorCuts
from lockstep.jobs.views import code, definitions, functions
from lockstep.jobs.views.answers import Answers
from lockstep.jobs.views.computing import Computation
from lockstep.jobs.views.costs import Costs, Stopwatch
from lockstep.jobs.views.definitions import DEFINITIONS, Definition
from lockstep.jobs.views.plans import ViewPlan, plan
from lockstep.jobs.views.states import TableStates
from lockstep.jobs.views.value_errors import no_answer
from lockstep.sinks.contract import Changes
from lockstep.sinks.delta import layout

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from cdc.events import LSN
    from lockstep.jobs.views.computing import Build
    from lockstep.jobs.views.costs import Decision
    from lockstep.sinks.contract import Applied, StoreState, Version


class _Skipped(NamedTuple):
    """A frontier that can't be reached: the next cut has to end after it."""

    seq: int
    error: NoAnswerError | None  # None: a cut to it was started with other definitions


class ViewCuts(MirrorCuts):
    """Computes the changes of a follower's views; keeps rows that it has computed, no position."""

    _replaces_lost = True  # no `cdc rebuild` takes views

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
        self._skipped: _Skipped | None = None  # the last one, until a later one is computed

    @property
    def names(self) -> tuple[str, ...]:
        """The views' names."""
        return self._views

    def forget(self, view: str) -> None:
        """Compute this view no longer."""
        self._views = tuple(each for each in self._views if each != view)
        self._answers.forget(view)
        self.work.pop(view, None)
        # It may have been the one without an answer; the others are computed again.
        self._planned = self._skipped = None

    def cut(
        self,
        state: StoreState | None,
        through: LSN | None = None,
        most_events: int | None = None,
    ) -> MirrorCut | None:
        """Return the next cut; it raises NoAnswerError until there is one that may have answers.

        An interrupted cut without an answer, or one that `refuse_others` refused, is not repeated:
        what the store has of it is replaced, as are all views, at a later frontier. A cut that
        replaces is repeated as one that does, because the store may still have rows of the cut
        before it. If the mirror no longer has the frontier that the store is at, or that it was
        being written up to, all views are replaced, too.
        """
        applied, reached = (state.applied.seq, state.reached) if state else (0, 0)
        last = self._skipped
        if last is not None and applied >= last.seq:  # another copy may have passed it
            last = None
        is_skipped = last is not None and applied < reached <= last.seq
        replaces = is_skipped or (state is not None and state.replaces)
        if is_skipped:
            state = None
        found = super().cut(state, through, most_events)
        if last is not None and (found is None or found.after.applied.seq <= last.seq):
            if last.error is not None:
                raise last.error
            return None
        if found is None:
            return None
        repeats = applied < reached == found.after.applied.seq
        return found._replace(replaces=replaces or found.replaces, repeats=repeats)

    def refuse_others(self, cut: MirrorCut, stored: Mapping[str, Definition]) -> None:
        """Raise OvertakenError if a repeated cut may have rows of definitions that are not ours.

        They have the seq of the cut, so our rows of it would not replace them. `stored` has the
        definitions in the store, which are written before the first row. The next cut ends later.
        """
        if not cut.repeats:
            return
        seq = cut.after.applied.seq
        others = [
            each.name
            for each in self.plans(cut.after.applied)
            if (found := stored.get(each.name)) is not None
            and not found.is_due
            and found.fingerprint != each.definition.fingerprint
            # One that replaces has deleted the rows of earlier ones.
            and (found.seq == seq or not cut.replaces)
        ]
        if others:
            self._skipped = _Skipped(seq, None)
            raise OvertakenError(
                f"a cut to seq {seq} was started with other definitions of {', '.join(others)}",
                hint="the follower continues with the first later frontier",
            )

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

        `build` writes a view that is computed completely, where it can. The changes of all others
        are computed before the first is yielded: if one has no answer, NoAnswerError is raised and
        nothing is written.
        """
        after = cut.after.applied
        self.decisions = []
        if not has_rows(cut) or not self._views:
            return
        plans = self.plans(after)
        with self._working(cut, plans) as (spark, tables):
            computed: list[Iterator[Changes]] = []
            builds: list[Iterator[Changes]] = []
            changed: dict[str, Definition] = {}
            for view in plans:
                work = Computation(spark, view, tables, cut, self._answers, self._costs, build)
                due = _due(view, stored, after.seq)
                found = self._answered(work, view, cut, due)
                if due:
                    changed[view.name] = view.definition.at(after.seq, stored.get(view.name))
                if work.builds(due):
                    builds.append(found)
                else:
                    computed.append(_with_first(found))
                    gc.collect(1)  # the JVM holds a view's DataFrames until cycles are collected
            # Before any row, so that a cut that is repeated shows by which these were computed.
            if changed:
                yield definitions.changes(changed, after)
            for each in [*computed, *builds]:
                yield from each
                gc.collect(1)
        self._skipped = None

    def announced(
        self,
        requests: Mapping[str, Collection[str]],
        stored: Mapping[str, Definition],
        applied: Applied,
    ) -> Iterator[Changes]:
        """Yield what records that views are to be computed again in the next cut, for requests.

        Nothing for one that the store names already, or that this cut computes completely.
        """
        due = {
            each.name: stored[each.name].as_due(requests[each.name])
            for each in self.plans(applied)
            if each.name in requests
            and not _due(each, stored, applied.seq)
            and not {*requests[each.name]} <= {*stored[each.name].requests}
        }
        if due:
            yield definitions.changes(due, applied)

    def _answered(
        self, work: Computation, view: ViewPlan, cut: MirrorCut, due: str
    ) -> Iterator[Changes]:
        """Yield a view's changes; raise NoAnswerError, with the frontier, if it has none."""
        clock, after = Stopwatch(), cut.after.applied
        try:
            with _translated(view.name):
                yield from clock.timed(work.changes(due))
        except NoAnswerError as error:
            found = _placed(error, cut, work.changed)
            self._skipped = _Skipped(after.seq, found)
            raise found from None  # what Spark reports quotes values of rows
        self._note(view, work.decision, clock.seconds, after.lsn)

    def _note(self, view: ViewPlan, decision: Decision, seconds: float, lsn: LSN) -> None:
        self.decisions.append(decision)
        self._costs.note(view, decision, seconds)
        if decision.how != "nothing":
            self.work[view.name] = ViewWork(decision.how, decision.why, round(seconds, 3), str(lsn))

    def every_row(self, name: str, applied: Applied) -> Iterator[bytes]:
        """Yield a view's rows at a frontier, all computed from the mirror as it was there."""
        cut = MirrorCut(None, self._at(applied))
        view = plan(name, self._config.views, self._versions_of(applied))
        with self._working(cut, [view]) as (spark, tables):
            work = Computation(spark, view, tables, cut, Answers(), Costs())
            with _translated(name):
                for found in work.changes():
                    yield from (change.row for change in found.changes if change.row is not None)

    @contextmanager
    def _working(
        self, cut: MirrorCut, plans: Sequence[ViewPlan]
    ) -> Iterator[tuple[SparkSession, dict[str, TableStates]]]:
        """Give a session, and the states of the views' tables; translate errors of Spark's."""
        versions = self._versions_of(cut.after.applied)
        names = _read_by(plans)
        names_of_views = ", ".join(each.name for each in plans)
        with self._session() as spark, _translated(names_of_views):
            spark.conf.set("spark.sql.ansi.enabled", "true")
            # Files are listed here: a job that does it takes longer.
            spark.conf.set("spark.sql.sources.parallelPartitionDiscovery.threshold", "1000")
            if any(functions.are_called(each.new) for each in plans):
                functions.register(spark)
            yield (
                spark,
                {
                    name: TableStates(
                        spark,
                        versions[name],
                        cut.before and self.place(cut.before.versions, versions[name]),
                        self.place(cut.after.versions, versions[name]),
                        self._opened,
                        self._files,
                        names,
                    )
                    for name in sorted({each for view in plans for each in view.tables})
                },
            )

    def _gap(self, frontier: str, how: str) -> GapError:
        return GapError(
            f"the mirror {self._mirror} no longer has the frontier {frontier}, which the"
            f" views of {self._name} {how}",
            hint="the follower computes all of its views again in its next cut: try again after it",
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


def _due(view: ViewPlan, stored: Mapping[str, Definition], seq: int) -> str:
    """Return why a view has to be computed completely in a cut to a seq; "" if it need not be."""
    found = stored.get(view.name)
    if found is not None and found.is_due:
        return "cdc view rebuild has asked for it"
    if found is None or found.fingerprint != view.definition.fingerprint:
        return "its definition has changed"
    # A store that writes tables one by one may have its definition and not all of its rows.
    return "its computation in this cut was interrupted" if found.seq == seq else ""


def _with_first(changes: Iterator[Changes]) -> Iterator[Changes]:
    """Return the same changes, of which the first is computed."""
    first = next(changes, None)
    return iter(()) if first is None else chain([first], changes)


def _placed(error: NoAnswerError, cut: MirrorCut, changed: Sequence[str]) -> NoAnswerError:
    """Return the error with the frontier, and what has changed since the last one."""
    at, since = f"at {cut.after.applied.lsn}", ""
    if cut.before is not None:
        tables = f", after changes of {', '.join(changed)}" if changed else ""
        at += f"{tables} since {cut.before.applied.lsn}"
        since = f" stays at {cut.before.applied.lsn} meanwhile, and"
    return NoAnswerError(
        f"{error.what}, {at}",
        hint=f"{error.hint}. The follower{since} continues by itself with the first later frontier"
        " at which the view has an answer",
    )


@contextmanager
def _translated(view: str) -> Iterator[None]:
    """Translate what Spark reports while it computes a view."""
    try:
        yield
    except CDCError:
        raise
    except Exception as error:
        if (of_code := code.reported(error)) is not None:
            raise of_code from None  # Spark's error could quote values of rows
        if (found := no_answer(view, str(error))) is not None:
            raise found from None  # as above
        if is_ours(error):
            raise translated(error) from error
        raise
