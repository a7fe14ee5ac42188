"""Apply a follower's views, frontier by frontier of their mirror, as documents are.

The store has the views' rows, and by which definitions these were computed: with another one a view
is replaced in the next cut.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING

from cdc import failpoints
from cdc.errors import ConfigError, NoAnswerError
from cdc.events import LSN
from cdc.log.view_requests import ViewRequests
from lockstep.jobs.apply.building_views import ViewBuilder
from lockstep.jobs.apply.following_documents import DocumentsFollowing
from lockstep.jobs.spark.session import work_session
from lockstep.jobs.views import definitions
from lockstep.jobs.views.cuts import ViewCuts, has_rows
from lockstep.jobs.views.definitions import SCHEMA
from lockstep.sinks.contract import Changes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from pyspark.sql import SparkSession

    from cdc.config import Config
    from lockstep.jobs.apply.running import FollowerRun
    from lockstep.jobs.documents.mirror_cuts import MirrorCut
    from lockstep.jobs.views.definitions import Definition
    from lockstep.sinks.contract import Applied, Sink

log = logging.getLogger("lockstep.jobs.follow")


class ViewDrop:
    """The deletion of a view's rows, in three cuts.

    First the store records that the rows are about to be deleted, then they are, then that record
    is: each in a cut of its own, since not every store writes a cut's tables in one commit. So an
    interrupted one can be repeated, and a view that is declared again meanwhile is computed again.
    """

    def __init__(self, view: str, definition: Definition) -> None:
        """`definition`: that in the store."""
        self.view, self._definition = view, definition
        self._steps = [self._rows, self._record]
        if not definition.is_dropped:
            self._steps.insert(0, self._announcement)

    @property
    def is_done(self) -> bool:
        """Whether nothing of the view is left to be deleted."""
        return not self._steps

    def changes(self, applied: Applied) -> Changes:
        """Return what a cut writes of it."""
        return self._steps[0](applied)

    def has_applied(self) -> None:
        """Note that the store is at the frontier of such a cut."""
        del self._steps[0]
        failpoints.reach("view_request_step")

    def _announcement(self, applied: Applied) -> Changes:
        return definitions.changes({self.view: self._definition.as_dropped()}, applied)

    def _rows(self, applied: Applied) -> Changes:
        return Changes((self._definition.version(self.view),), [], truncated=applied.seq)

    def _record(self, applied: Applied) -> Changes:
        return definitions.changes({self.view: None}, applied)


class ViewsFollowing(DocumentsFollowing):
    """One follower's views: what `FollowerRun` calls as its session.

    If `cdc view drop` asks for it, it deletes a view's rows, and computes the view no longer,
    whatever its configuration declares. If `cdc view rebuild` does, the store records that in the
    next cut, and in the one after it all rows are computed again, by whichever process writes it.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        sink: Sink,
        *,
        spark: Callable[[], SparkSession] | None = None,
        until: LSN | None = None,
        once: bool = False,
        rebuild: tuple[str, str] | None = None,
    ) -> None:
        """`once`: end after the next cut in which views can be computed again.

        `rebuild`: a view, and the request for which its rows are computed again before that.
        """
        self._once = once
        self._drops = list[ViewDrop]()  # one after another
        # The requests to compute each view again, in their order, until the store answers them.
        self._rebuilds = dict[str, dict[str, None]]()
        if rebuild is not None:
            self._rebuilds[rebuild[0]] = {rebuild[1]: None}
        self._requests = ViewRequests(config, name)  # kept from session to session
        super().__init__(config, name, sink, spark=spark, until=until)

    def __call__(self, run: FollowerRun) -> None:
        assert isinstance(self._mirror, ViewCuts), "it is made below"
        run.progress.views = self._mirror.work
        super().__call__(run)
        self._requests.close()

    def _cuts(self) -> ViewCuts:
        return ViewCuts(self._config, self._name, self._session)

    @property
    def _most_events(self) -> None:
        """No limit: the more a cut spans, the less is computed twice, and it is Spark that does."""

    def _before_cut(self) -> None:
        for each in self._requests.due():
            if each.drop:
                self._drop(each.drop)
            elif each.rebuild in self._mirror.names:
                known = self._rebuilds.setdefault(each.rebuild, {})
                known[each.request] = None

    def _drop(self, view: str) -> None:
        """Delete a view in the next cuts, if the store has it and it is not being deleted."""
        assert isinstance(self._mirror, ViewCuts), "it is made above"
        found = definitions.stored(self._sink, [view]).get(view)
        if found is None or any(each.view == view for each in self._drops):
            return
        self._mirror.forget(view)
        self._rebuilds.pop(view, None)
        self._drops.append(ViewDrop(view, found))
        log.warning("%s: deletes the view %s, as `cdc view drop` has asked", self._name, view)

    def _apply(self, cut: MirrorCut, generation: int) -> int:
        assert isinstance(self._mirror, ViewCuts), "it is made above"
        # An interrupted cut may have written a definition already, and no other of its seq counts.
        drops = [] if cut.repeats else self._drops[:1]
        more = [each.changes(cut.after.applied) for each in drops]
        try:
            new = apply(self._mirror, self._sink, cut, generation, self._rebuilds, more)
        except NoAnswerError as error:
            if self._until is None and not self._once:
                raise
            # Nobody may be there who corrects the row.
            raise ConfigError(error.what, hint=error.hint) from error
        if has_rows(cut):
            self._has_applied(cut.after.applied.seq, drops)
        return new

    def _has_applied(self, seq: int, drops: Sequence[ViewDrop]) -> None:
        """Note that a cut to a seq in which views can be computed again was applied.

        It had the next step of `drops`.
        """
        for each in drops:
            each.has_applied()
            if each.is_done:
                self._drops.remove(each)
        if self._rebuilds:
            failpoints.reach("view_request_step")
            self._forget_answered(seq)
        if self._once and not self._rebuilds:
            self._until = LSN(0)

    def _forget_answered(self, seq: int) -> None:
        """Forget requests that the store, which is at a seq, has answered."""
        for view, found in definitions.stored(self._sink, self._rebuilds).items():
            asked = self._rebuilds[view]
            for request in [each for each in asked if found.has_answered(each, seq)]:
                del asked[request]
            if not asked:
                del self._rebuilds[view]

    def _named(self) -> set[str]:
        return {f"{SCHEMA}.{name}" for name in self._mirror.names}

    @contextmanager
    def _session(self) -> Iterator[SparkSession]:
        assert self._spark is not None, "followers with views are given a session"
        title = f"{self._config.pipeline}: views of {self._name}"
        with work_session(self._spark(), title, threading.Event()) as spark:
            yield spark


class ViewDropping(ViewsFollowing):
    """Deletes the rows of a view that the follower does not name, in its next cuts; and ends."""

    def __init__(
        self,
        config: Config,
        name: str,
        sink: Sink,
        dropped: tuple[str, Definition],
        *,
        spark: Callable[[], SparkSession],
    ) -> None:
        """`dropped`: the view, and its definition in the store."""
        super().__init__(config, name, sink, spark=spark)
        self._drops.append(ViewDrop(*dropped))

    def _has_applied(self, seq: int, drops: Sequence[ViewDrop]) -> None:
        super()._has_applied(seq, drops)
        if not self._drops:
            self._until = LSN(0)


def apply(
    views: ViewCuts,
    sink: Sink,
    cut: MirrorCut,
    generation: int,
    requests: Mapping[str, Collection[str]] = {},
    more: Sequence[Changes] = (),
) -> int:
    """Apply the cut to a store; return how many changes of rows were new to it.

    It also records `requests` to compute views again in the next one, and writes `more`.

    The store records that a cut is being written once the first changes are known: of a frontier at
    which a view has no answer it then knows nothing. Raises NoAnswerError for such a one, and
    OvertakenError for an interrupted cut that may have rows of other definitions.
    """
    applied = cut.after.applied
    tables = [*views.tables_of(applied), *(each.version for each in more)]
    above = None if cut.replaces else cut.before.applied.seq if cut.before else 0
    begin = cache(partial(sink.begin, applied.seq, tables, above))  # once
    built = definitions.stored(sink, views.names)
    views.refuse_others(cut, built)
    if cut.replaces:
        built = {}
    more = [*more, *(views.announced(requests, built, applied) if has_rows(cut) else ())]
    new, build = 0, ViewBuilder(sink, begin)
    for changes in views.view_changes(cut, built, build):
        begin()
        new += sink.write(changes)
        failpoints.reach("view_written")
    begin()
    for changes in more:
        sink.write(changes)
        failpoints.reach("view_request_written")
    sink.commit(applied._replace(generation=generation))
    return new + build.new
