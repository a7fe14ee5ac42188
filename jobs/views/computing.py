"""The changes of one view in a cut: what has to be computed, and is, by Spark.

What the affected rows depend on is read in this process where that is little
(`jobs.views.reducing`); otherwise Spark reads the tables. What the view's rows were is known where
they fit in memory (`jobs.views.answers`); otherwise they are computed, too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.jobs.spark.map_in_arrow import streamed
from lockstep.jobs.views import code_frames, comparing
from lockstep.jobs.views.answers import MOST_BYTES, MOST_ROWS, GatheredRows
from lockstep.jobs.views.costs import Decision
from lockstep.jobs.views.firsts import first_rows
from lockstep.jobs.views.plans import NEW, OLD
from lockstep.jobs.views.reducing import joined, reduction
from lockstep.jobs.views.results import COUNT, change, checked, encoded, key_error, typed, wrong_key
from lockstep.jobs.views.states import SMALL_ROWS, StateRows, fields
from lockstep.jobs.views.value_errors import no_answer
from lockstep.jobs.views.values import quoted, string
from lockstep.sinks.contract import Changes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from lockstep.jobs.documents.mirror_cuts import MirrorCut
    from lockstep.jobs.views.answers import Answers
    from lockstep.jobs.views.costs import Costs
    from lockstep.jobs.views.plans import Ranked, ViewPlan
    from lockstep.jobs.views.states import TableStates
    from lockstep.jobs.views.types import PgType
    from lockstep.sinks.contract import Applied

# More anchors than these are no literals of a query any more: it takes longer to plan than to run.
MOST_ANCHORS: Final = 5_000
# Values that are known here cost nothing to join: of more than these a query is parsed longer.
MOST_LITERALS: Final = 500
# Of more rows, all rows of a view are not computed only to know them.
_MOST_READ: Final = 5_000_000
_MOST_REDUCED: Final = 100_000  # where few rows of them are needed for the cut
# How many changes are passed to the sink at a time.
_AT_ONCE: Final = 10_000
# Rows of a view of unknown size that are fetched at once; more are fetched a partition at a time.
_FEW_ROWS: Final = 20_000
# The stored bytes of the tables for each part of a view that is built, and those of a batch of it.
_PART_BYTES: Final = 32 << 20
_ARROW_BYTES: Final = 8 << 20
# Of a table that each task of a build joins completely.
_BROADCAST_BYTES: Final = 1 << 20
# Of so few rows: to compile a query for them takes longer than to compute it without.
_INTERPRETED: Final = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.shuffle.partitions": "1",
}


class Built(NamedTuple):
    """A view that executors have written."""

    few: pa.Table | None  # its rows, with `#new`; None if they are many


# Writes all rows of a view at a frontier, in place of those below a seq if one is given. None if it
# can't: then the rows are yielded.
Build: TypeAlias = "Callable[[ViewPlan, DataFrame, Applied, int | None], Built | None]"


class _Affected(NamedTuple):
    """The rows of a view that a cut can change."""

    test: str  # a predicate for rows `v`; "" for all
    anchors: Mapping[str, pa.Array] | None  # its values; None if they are not known here


_EVERY: Final = _Affected("", {})


class _Around(NamedTuple):
    """A view's rows around a cut."""

    was: pa.Table  # all of them, before it
    affected: pa.ChunkedArray  # which of these are affected
    now: pa.Table  # the affected ones, after it

    @property
    def after(self) -> pa.Table:
        """All rows after the cut."""
        return pa.concat_tables([self.was.filter(pc.invert(self.affected)), self.now])


class Computation:
    """The work of one view in a cut."""

    def __init__(
        self,
        spark: SparkSession,
        view: ViewPlan,
        tables: Mapping[str, TableStates],
        cut: MirrorCut,
        answers: Answers,
        costs: Costs,
        build: Build | None = None,
    ) -> None:
        """`build` writes all rows of a view, if the store allows that."""
        self._spark, self._view, self._cut, self._answers = spark, view, cut, answers
        self._costs = costs
        self._applied = cut.after.applied
        self._tables = {name: tables[name] for name in sorted(view.tables)}
        self.decision = Decision(view.name, "nothing", "no table of it changed")
        self.changed: Sequence[str] = ()  # the tables that have changed
        self._build = build
        self._reduced = set[str]()  # tables of which only the needed rows are registered
        self._kept: DataFrame | None = None  # anchors that are read more than once

    def changes(self, due: str = "") -> Iterator[Changes]:
        """Yield the view's changes; `due`: why it has to be computed completely, if it has."""
        if self.builds(due):
            self._decide("build", self._why_built(due))
            yield from self._built(replace=self._cut.replaces or self._cut.before is not None)
            return
        changed = self.changed = [name for name, table in self._tables.items() if table.differ]
        was = self._answers.before(self._view, self._cut)
        if not changed:
            self._keep_same(was)
            return
        if was is not None and (around := self._added(changed, was)) is not None:
            yield from self._differing(around)
            return
        if (chosen := self._chosen(changed, was)) is not None:
            yield from chosen
            return
        with self._unpersisted():
            affected = self._affected(changed)
            if affected is None:
                self._keep_same(was)
            else:
                yield from self._differences(affected, was)

    def builds(self, due: str) -> bool:
        """Return whether all rows are computed, whatever has changed."""
        return self._cut.before is None or bool(due) or not self._same_columns

    @property
    def _same_columns(self) -> bool:
        return all(table.has_same_columns for table in self._tables.values())

    def _why_built(self, due: str) -> str:
        if self._cut.replaces:
            return "what the store has could not be continued"
        if not self._same_columns:
            return "columns of its tables have changed"
        return "its first cut" if self._cut.before is None else due

    def _keep_same(self, was: pa.Table | None) -> None:
        """Note that the view's rows are what they were, and those that they are chosen from."""
        self._answers.keep(self._view, self._cut, was)
        if self._view.ranked is not None:
            every = self._view.ranked.all
            self._answers.keep(every, self._cut, self._answers.before(every, self._cut))

    @contextmanager
    def _unpersisted(self) -> Iterator[None]:
        """Free the anchors that were kept, at the end of the block."""
        try:
            yield
        finally:
            if self._kept is not None:
                self._kept.unpersist()

    def _decide(self, how: str, why: str, joined: int = 0) -> None:
        self.decision = Decision(self._view.name, how, why, joined)

    # --- what Spark reads ---

    def _register(self, state: str) -> None:
        """Make a state's tables temporary views, and views in Python that the view reads."""
        for name, table in self._tables.items():
            if name in self._reduced:
                continue
            if (small := table.small) is not None:
                table.register_rows(small)
            else:
                table.register(state)
        for view in self._view.made:
            code_frames.register(self._spark, view, state)

    def _selected(self, state: str, test: str) -> str:
        """Return the query for a view's rows `v` in a state that pass a test; all can be read."""
        self._register(state)
        sql = self._view.new if state == NEW else self._view.old
        if self._view.code is not None:  # its rows are made of inputs that pass
            code_frames.register(self._spark, self._view, state, test)
            test = ""
        where = f" WHERE {test}" if test else ""
        return f"({sql}) AS v{where}"

    # --- which rows are affected ---

    def _affected(self, changed: Sequence[str]) -> _Affected | None:
        """Return the rows that changes of tables can change; None if there are none."""
        for name in changed:
            if name in self._view.full_for:
                self._decide("full", self._view.full_for[name])
                return _EVERY
        found = reduction(self._view, self._tables, changed)
        if found is None:
            try:
                return self._found_by_spark(changed)
            except Exception as error:
                if no_answer(self._view.name, str(error)) is None:
                    raise
            # A probe reads rows that the query may leave out: the query itself decides.
            self._decide("full", f"a changed row of {', '.join(changed)} has no affected values")
            return _EVERY
        counts = ", ".join(f"{len(each):,}" for each in found.anchors.values())
        rows = sum(each.new.num_rows for each in found.rows.values())
        self._decide("keys", f"{counts} by changes of {', '.join(changed)}, made of {rows:,} rows")
        if not all(len(each) for each in found.anchors.values()):
            return None
        for name, each in found.rows.items():
            self._tables[name].register_rows(each)
            self._reduced.add(name)
        test = " AND ".join(self._one_of(*each) for each in found.anchors.items())
        return _Affected(test, found.anchors)

    def _one_of(self, name: str, values: pa.Array) -> str:
        """Return the predicate for rows whose anchor is one of these values."""
        kind = self._view.columns[name]
        if len(values) <= MOST_LITERALS:
            return _among(name, kind, values.to_pylist())
        rows = self._spark.createDataFrame(pa.table({name: values}), f"{quoted(name)} {kind.spark}")
        rows.createOrReplaceTempView(quoted(f"affected {name}"))
        return _joined(f"affected {name}", [name])

    def _found_by_spark(self, changed: Sequence[str]) -> _Affected | None:
        for state in (OLD, NEW):
            self._register(state)
        found: DataFrame | None = None
        for each in self._view.affected:
            if each.table not in changed:
                continue
            self._tables[each.table].register(each.changed)
            anchors = self._spark.sql(each.sql)
            found = anchors if found is None else found.unionByName(anchors)
        assert found is not None, "each table has a probe, or needs a full recompute"
        anchors = found.distinct()
        rows = anchors.limit(MOST_ANCHORS + 1).toArrow()
        if rows.num_rows > MOST_ANCHORS:
            return self._found_many(anchors)
        self._decide("keys", f"{rows.num_rows} by changes of {', '.join(changed)}")
        values = {each: rows[each].unique() for each in self._view.anchor}
        test = " AND ".join(
            _among(each, self._view.columns[each], among.to_pylist())
            for each, among in values.items()
        )
        return _Affected(test, values) if rows.num_rows else None

    def _found_many(self, anchors: DataFrame) -> _Affected:
        """Return the rows of more anchors than a query has literals; all if most are affected."""
        anchors = anchors.persist()
        self._kept = anchors
        count, rows = anchors.count(), max(table.rows for table in self._tables.values())
        why = f"{count:,} values of {', '.join(self._view.anchor)}, and {rows:,} rows of a table"
        instead = "" if self._view.is_strict else self._costs.why_full(self._view, count, rows)
        if instead:
            self._decide("full", f"{instead}: {why}")
            return _EVERY
        anchors.createOrReplaceTempView("affected")
        self._decide("keys", f"joined: {why}", count)
        return _Affected(_joined("affected", self._view.anchor), None)

    # --- what they are ---

    def _built(self, *, replace: bool) -> Iterator[Changes]:
        """Yield all rows that executors have not written, in place of those that are there."""
        key = ", ".join(map(quoted, self._view.key))
        columns = ", ".join(f"first({quoted(each)}) AS {quoted(each)}" for each in self._others)
        text = f"SELECT count(*) AS `{COUNT}`, {key}{', ' * bool(columns)}{columns}"
        rows = self._spark.sql(f"{text} FROM {self._selected(NEW, '')} GROUP BY {key}")
        # Rows of earlier frontiers are deleted; those of this one have its seq.
        truncated = self._applied.seq if replace else None
        few = self._few(rows)
        if few is not None:
            yield from self._passed([few], truncated)
            return
        with self._divided():
            built = self._build and self._build(self._view, rows, self._applied, truncated)
            if built is None:
                yield from self._passed(streamed(rows), truncated)
            else:
                few = None if built.few is None else typed(self._view, built.few)
                self._answers.keep(self._view, self._cut, few)

    def _few(self, rows: DataFrame) -> pa.Table | None:
        """Return a view's rows if these are few, and so are those of its tables."""
        if any(table.rows > SMALL_ROWS for table in self._tables.values()):
            return None
        with self._set(_INTERPRETED):
            found = rows.limit(_FEW_ROWS + 1).toArrow()
        return found if found.num_rows <= _FEW_ROWS else None

    def _divided(self) -> AbstractContextManager[None]:
        """Divide rows into as many parts as the tables are large for the duration of the block."""
        size = sum(table.bytes for table in self._tables.values())
        least = self._spark.sparkContext.defaultParallelism
        return self._set(
            {
                "spark.sql.shuffle.partitions": str(max(least, -(-size // _PART_BYTES))),
                # A larger table passes the driver, and the groups of its key are shuffled again.
                "spark.sql.autoBroadcastJoinThreshold": str(_BROADCAST_BYTES),
                "spark.sql.execution.arrow.maxRecordsPerBatch": str(_AT_ONCE),
                "spark.sql.execution.arrow.maxBytesPerBatch": str(_ARROW_BYTES),
            }
        )

    @contextmanager
    def _set(self, settings: Mapping[str, str]) -> Iterator[None]:
        """Change the session's settings for the duration of the block."""
        before = {name: str(self._spark.conf.get(name)) for name in settings}
        for name, value in settings.items():
            self._spark.conf.set(name, value)
        try:
            yield
        finally:
            for name, was in before.items():
                self._spark.conf.set(name, was)

    def _passed(self, parts: Iterable[pa.Table], truncated: int | None) -> Iterator[Changes]:
        """Yield rows, some at a time; note them if they are few."""
        kept = GatheredRows()
        for part in parts:
            rows = self._grouped(part)
            for changes in self._changes(rows):
                yield changes._replace(truncated=truncated)
                truncated = None
            kept.add(rows)
        if truncated is not None:
            yield Changes((self._view.version,), [], truncated)
        self._answers.keep(self._view, self._cut, kept.rows)

    def _changes(self, rows: pa.Table, *, are_missing: bool = False) -> Iterator[Changes]:
        """Yield rows, or that they are missing, as changes of which some are made at a time."""
        if are_missing:
            rows = rows.select([*self._view.key])
        for start in range(0, rows.num_rows, _AT_ONCE):
            made = [
                change(self._view, self._applied, key, None if are_missing else row)
                for key, row in encoded(self._view, rows.slice(start, _AT_ONCE))
            ]
            yield Changes((self._view.version,), made)

    def _differences(self, affected: _Affected, was: pa.Table | None) -> Iterator[Changes]:
        """Yield how the affected rows differ from what they were."""
        around = self._around(affected, was, affected)
        if around is None:
            self._answers.keep(self._view, self._cut, None)
            yield from self._compared(affected.test)
        else:
            yield from self._differing(around)

    def _around(
        self,
        affected: _Affected,
        was: pa.Table | None,
        needed: _Affected,
        check: Callable[[ViewPlan, pa.Table], pa.Table] = checked,
    ) -> _Around | None:
        """Return the rows around the cut; None if they are many.

        All rows before it are computed where they are not known, if that is worth it for those that
        are `needed`. Rows pass `check`.
        """
        anchors = affected.anchors
        if was is None and anchors is not None and self._can_know(needed):
            self._reduced.clear()
            was = self._before(check)
        now = None if was is None or anchors is None else self._now(affected.test, was)
        if was is None or anchors is None or now is None:
            return None
        return _Around(was, comparing.among(was, anchors), check(self._view, now))

    def _differing(self, around: _Around) -> Iterator[Changes]:
        """Yield how the affected ones of the rows before differ from those after."""
        before = around.was.filter(around.affected)
        differ = comparing.differences(before, around.now, self._view.key)
        is_same = not (differ.missing.num_rows or differ.now.num_rows)
        self._answers.keep(self._view, self._cut, around.was if is_same else around.after)
        yield from self._changes(differ.missing, are_missing=True)
        yield from self._changes(differ.now)

    def _added(self, changed: Sequence[str], was: pa.Table) -> _Around | None:
        """Return the rows around a cut that only added rows to one table.

        None if anything else has changed, or if the view's rows are not the first ones of a key.
        """
        first, name = self._view.firsts, changed[0]
        rows = self._tables[name].changes
        if first is None or len(changed) > 1 or rows is None:
            return None
        if rows.old.num_rows or not 0 < rows.new.num_rows <= SMALL_ROWS:
            return None
        others = joined(self._view, self._tables, name)
        if others is None:
            return None
        for each, needed in {**others, name: rows._replace(old=rows.new)}.items():
            self._tables[each].register_rows(needed)
            self._reduced.add(each)
        added = self._now("", was)
        if added is not None:
            affected = comparing.among(was, {first.by: added[first.by].unique()})
            now = first_rows(pa.concat_tables([was.filter(affected), added]), first)
            if now is not None:
                found = ", ".join(f"{each.num_rows:,}" for each in (rows.new, added))
                self._decide("keys", f"the first rows of each with those added to {name}: {found}")
                return _Around(was, affected, checked(self._view, now))
        self._reduced.clear()
        return None

    def _chosen(self, changed: Sequence[str], was: pa.Table | None) -> Iterator[Changes] | None:
        """Return how the first ones of all rows differ; None if all are not kept, or not known."""
        ranked = self._view.ranked
        if ranked is None or not any(each in self._view.full_for for each in changed):
            return None
        every = Computation(
            self._spark, ranked.all, self._tables, self._cut, self._answers, self._costs
        )
        with every._unpersisted():
            affected = every._affected(changed)
            rows = affected and every._all_rows(affected)
        if affected is None:
            self._decide("keys", every.decision.why)
            self._keep_same(was)
            return iter(())
        if rows is None:
            return None
        self._decide("keys", f"the first ones of {rows.new.num_rows:,} rows: {every.decision.why}")
        was = self._first(ranked, rows.old) if was is None else was
        # Any of them may not be among the first ones now.
        every_one = comparing.among(was, {})
        return self._differing(_Around(was, every_one, self._first(ranked, rows.new)))

    def _all_rows(self, affected: _Affected) -> StateRows | None:
        """Return all rows before and after the cut, and note those after it; None if many.

        A key may occur more than once.
        """
        was = self._answers.before(self._view, self._cut)
        # Without them, they are all computed in each cut: it is worth it for any.
        around = self._around(affected, was, _EVERY, lambda _, rows: rows)
        if around is None:
            return None
        after = around.after
        self._answers.keep(self._view, self._cut, after)
        return StateRows(around.was, after)

    def _first(self, ranked: Ranked, rows: pa.Table) -> pa.Table:
        """Return the first ones of all rows."""
        # Spark 4.2 takes a table that starts with an empty chunk for an empty one.
        columns = fields(ranked.all.version.columns)
        frame = self._spark.createDataFrame(rows.combine_chunks(), columns)
        frame.createOrReplaceTempView(quoted(ranked.relation))
        return checked(self._view, typed(self._view, self._spark.sql(ranked.first).toArrow()))

    def _can_know(self, affected: _Affected) -> bool:
        """Return whether all rows of the view before the cut are worth computing once."""
        if self._answers.is_large(self._view):
            return False
        rows = sum(table.rows for table in self._tables.values())
        return affected is _EVERY or rows <= (_MOST_REDUCED if self._reduced else _MOST_READ)

    def _now(self, test: str, was: pa.Table) -> pa.Table | None:
        """Return the view's rows after the cut that pass a test; None if they may be many."""
        width = max(1, was.nbytes // max(1, was.num_rows))
        most = min(MOST_ROWS, max(_FEW_ROWS, MOST_BYTES // width))
        rows = self._spark.sql(f"{self._rows(NEW, test)} LIMIT {most + 1}").toArrow()
        return typed(self._view, rows) if rows.num_rows <= most else None

    def _before(self, check: Callable[[ViewPlan, pa.Table], pa.Table]) -> pa.Table | None:
        """Return all rows of the view before the cut, which pass a check; None if they are many."""
        query = self._rows(OLD, "")
        few = self._spark.sql(f"{query} LIMIT {_FEW_ROWS + 1}").toArrow()
        if few.num_rows <= _FEW_ROWS:
            return check(self._view, typed(self._view, few))
        found = GatheredRows()
        for part in streamed(self._spark.sql(query)):
            found.add(check(self._view, typed(self._view, part)))
            if found.is_over:
                self._answers.note_large(self._view)
                break
        return found.rows

    def _rows(self, state: str, test: str) -> str:
        names = ", ".join(map(quoted, self._view.columns))
        return f"SELECT {names} FROM {self._selected(state, test)}"  # noqa: S608 - quoted

    def _grouped(self, rows: pa.Table) -> pa.Table:
        """Return rows, grouped by their keys, with the view's types; or raise as `checked` does."""
        if wrong := wrong_key(self._view, rows):
            raise key_error(self._view, wrong)
        return typed(self._view, rows)

    def _compared(self, test: str) -> Iterator[Changes]:
        """Yield how rows in both states differ, which Spark compares."""
        key = ", ".join(map(quoted, self._view.key))
        row = f"struct({', '.join(map(quoted, self._view.columns))})"
        sides = " UNION ALL ".join(
            f"SELECT {word} AS `#is`, * FROM {self._selected(state, test)}"  # noqa: S608 - quoted
            for word, state in (("true", NEW), ("false", OLD))
        )
        both = (
            f"SELECT {key}, count_if(`#is`) AS `#new`, first({row}) FILTER (WHERE `#is`) AS `#n`,"  # noqa: S608 - quoted
            f" first({row}) FILTER (WHERE NOT `#is`) AS `#o` FROM ({sides}) GROUP BY {key}"
        )
        others = "".join(f", `#n`.{quoted(each)}" for each in self._others)
        rows = self._spark.sql(
            f"SELECT `#new`, {key}{others} FROM ({both}) WHERE `#new` > 1 OR NOT `#n` <=> `#o`"  # noqa: S608 - quoted
        ).toArrow()
        is_there, found = pc.greater(rows[COUNT], 0), self._grouped(rows)
        yield from self._changes(found.filter(pc.invert(is_there)), are_missing=True)
        yield from self._changes(found.filter(is_there))

    @property
    def _others(self) -> list[str]:
        return [each for each in self._view.columns if each not in self._view.key]


def _joined(relation: str, anchor: Sequence[str]) -> str:
    """Return the predicate for rows whose anchor is in a temporary view."""
    same = " AND ".join(f"a.{quoted(each)} <=> v.{quoted(each)}" for each in anchor)
    return f"EXISTS (SELECT 1 FROM {quoted(relation)} AS a WHERE {same})"  # noqa: S608 - quoted


def _among(name: str, kind: PgType, values: Collection[Any]) -> str:
    """Return the predicate for rows whose column is one of these values."""
    texts = [_literal(each, kind) for each in values if each is not None]
    test = f"v.{quoted(name)} IN ({', '.join(sorted(texts))})" if texts else "false"
    null = f" OR v.{quoted(name)} IS NULL" if None in values else ""
    return f"({test}{null})"


def _literal(value: Any, kind: PgType) -> str:  # noqa: ANN401 - of any type
    text = value.decode() if isinstance(value, bytes) else str(value)
    if kind.name == "bool":
        return text.lower()
    return f"CAST({string(text)} AS {kind.spark})"
