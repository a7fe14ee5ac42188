"""The changes of a follower's views in a cut of their mirror.

A cut goes from one frontier of the mirror to a later one. The keys that the changed rows can affect
are found by the view's own joins, in the old state and in the new one; the query restricted to them
is computed in both, and rows that differ are changes: a row that is there now, or a key that has
none any more. Where the keys can't be found, the complete query is computed in both.

The state before is the mirror's own, not the store's: the store holds the view at exactly that
frontier, and what it holds is not read. So every store of the contract can have views.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from cdc.errors import ConfigError
from lockstep.jobs.documents.mirror import MirrorVersion
from lockstep.jobs.documents.mirror_cuts import MirrorCut, MirrorCuts
from lockstep.jobs.views import code, code_frames, definitions, json_members
from lockstep.jobs.views.definitions import DEFINITIONS, Definition
from lockstep.jobs.views.plans import NEW, OLD, ViewPlan, plan
from lockstep.jobs.views.quotients import NO_DIGITS
from lockstep.jobs.views.states import INEXACT_VALUE, TableStates
from lockstep.jobs.views.values import quoted, string
from lockstep.sinks.contract import Change, Changes
from lockstep.sinks.delta import json as delta_json
from lockstep.sinks.delta import layout
from lockstep.sinks.delta.columns import arrow_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pyspark.sql import DataFrame, SparkSession

    from cdc.config import Config
    from cdc.events import LSN
    from lockstep.jobs.views.types import Type
    from lockstep.sinks.contract import Applied, Version

# More anchors than these are no literals of a query any more: it takes longer to plan than to run.
MOST_ANCHORS: Final = 5_000
# Where more anchors are affected than this share of the largest table's rows, finding their rows
# takes longer than computing all of them.
_MOST_SHARE: Final = 0.2
# How many changes are passed to the sink at a time.
_AT_ONCE: Final = 10_000
_VALUE_IN: Final = re.compile(re.escape(INEXACT_VALUE) + r" in (\S+)\.(?:\s|'|$)")


class Decision(NamedTuple):
    """How a view's changes in a cut were computed, and why."""

    view: str
    how: str  # nothing, keys, full or build
    why: str


class ViewCuts(MirrorCuts):
    """Computes the changes of a follower's views; keeps no position."""

    def __init__(
        self,
        config: Config,
        name: str,
        session: Callable[[], AbstractContextManager[SparkSession]],
        versions: Callable[[LSN], Mapping[str, Version]] | None = None,
    ) -> None:
        super().__init__(config, name, versions)
        self._views, self._session = config.followers[name].views, session
        self.decisions: list[Decision] = []  # of the last cut

    @property
    def names(self) -> tuple[str, ...]:
        """The views' names."""
        return self._views

    def plans(self, applied: Applied) -> list[ViewPlan]:
        """Return the plans of the views, for the table versions in force at a frontier."""
        versions = self._versions(applied.lsn)
        return [plan(name, self._config.views, versions) for name in self._views]

    def tables_of(self, applied: Applied) -> list[Version]:
        """Return what a sink's `begin` needs: the views as tables, and their definitions."""
        return [*(each.version for each in self.plans(applied)), DEFINITIONS]

    def view_changes(self, cut: MirrorCut, stored: Mapping[str, Definition]) -> Iterator[Changes]:
        """Yield the cut's changes; `stored` has the definitions that the store was built by."""
        after = cut.after.applied
        self.decisions = []
        if not has_rows(cut):
            return
        plans = self.plans(after)
        with self._working(cut, plans) as (spark, tables):
            for view in plans:
                work = _Work(spark, view, tables, after)
                is_built = _is_stored(view, stored)
                yield from work.changes(is_first=cut.before is None, is_built=is_built)
                self.decisions.append(work.decision)
        changed = {each.name: each.definition for each in plans if not _is_stored(each, stored)}
        if changed:
            yield definitions.changes(changed, after)

    def every_row(self, name: str, applied: Applied) -> Iterator[bytes]:
        """Yield a view's rows at a frontier, all computed from the mirror as it was there."""
        frontiers = self._frontiers()
        assert frontiers is not None, "the store was made from one"
        cut = MirrorCut(None, self._at(frontiers, applied))
        view = plan(name, self._config.views, self._versions(applied.lsn))
        with self._working(cut, [view]) as (spark, tables):
            for found in _Work(spark, view, tables, applied).changes(is_first=True, is_built=False):
                yield from (change.row for change in found.changes if change.row is not None)

    @contextmanager
    def _working(
        self, cut: MirrorCut, plans: Sequence[ViewPlan]
    ) -> Iterator[tuple[SparkSession, dict[str, TableStates]]]:
        """Give a session, and the states of the views' tables; translate errors of Spark's."""
        versions = self._versions(cut.after.applied.lsn)
        with self._session() as spark, _translated():
            spark.conf.set("spark.sql.ansi.enabled", "true")
            json_members.register(spark)
            yield (
                spark,
                {
                    name: TableStates(
                        spark,
                        versions[name],
                        cut.before and self.place(cut.before.versions, versions[name]),
                        self.place(cut.after.versions, versions[name]),
                        self._storage,
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


def has_rows(cut: MirrorCut) -> bool:
    """Return whether rows can differ in a cut, and be written: only an LSN may be new."""
    return cut.before is None or cut.after.applied.seq > cut.before.applied.seq


class _Work:
    """The work of one view in a cut."""

    def __init__(
        self,
        spark: SparkSession,
        view: ViewPlan,
        tables: Mapping[str, TableStates],
        applied: Applied,
    ) -> None:
        self._spark, self._view, self._applied = spark, view, applied
        self._tables = {name: tables[name] for name in sorted(view.tables)}
        self.decision = Decision(view.name, "nothing", "no table of it changed")
        self._kept: DataFrame | None = None  # anchors that are read more than once

    def changes(self, *, is_first: bool, is_built: bool) -> Iterator[Changes]:
        """Yield the view's changes."""
        same = all(table.has_same_columns() for table in self._tables.values())
        if is_first or not is_built or not same:
            why = "its first cut" if is_first else "its definition has changed"
            self._decide("build", why if same else "columns of its tables have changed")
            self._register(NEW)
            self._make(NEW)
            yield from self._built(replace=not is_first)
            return
        changed = [name for name, table in self._tables.items() if table.differ]
        if not changed:
            return
        self._register(NEW)
        self._register(OLD)
        try:
            test = self._restriction(changed)
            if test is not None:
                self._make(OLD, test)
                self._make(NEW, test)
                yield from self._differences("" if self._view.code else test)
        finally:
            if self._kept is not None:
                self._kept.unpersist()

    def _decide(self, how: str, why: str) -> None:
        self.decision = Decision(self._view.name, how, why)

    def _register(self, state: str) -> None:
        for table in self._tables.values():
            table.register(state)
        for view in self._view.made:
            code_frames.register(self._spark, view, state)

    def _make(self, state: str, test: str = "") -> None:
        """Make the rows of a view in Python, of those of its inputs that the predicate allows."""
        if self._view.code is not None:
            code_frames.register(self._spark, self._view, state, test)

    def _restriction(self, changed: Sequence[str]) -> str | None:
        """Return the predicate for the affected rows; "" for all, None if there are none."""
        for name in changed:
            if name in self._view.full_for:
                self._decide("full", self._view.full_for[name])
                return ""
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
            return self._restriction_of_many(anchors)
        tables = ", ".join(changed)
        self._decide("keys", f"{rows.num_rows} by changes of {tables}")
        return _among(rows, self._view) if rows.num_rows else None

    def _restriction_of_many(self, anchors: DataFrame) -> str:
        """Return the predicate for more anchors than a query has literals; "" for all rows."""
        anchors = anchors.persist()
        self._kept = anchors
        count, rows = anchors.count(), max(table.rows for table in self._tables.values())
        why = f"{count:,} values of {', '.join(self._view.anchor)}, and {rows:,} rows of a table"
        if count > _MOST_SHARE * rows and not self._view.is_strict:
            self._decide("full", f"more than {_MOST_SHARE:.0%} are affected: {why}")
            return ""
        anchors.createOrReplaceTempView("affected")
        self._decide("keys", f"joined: {why}")
        return _joined(self._view.anchor)

    def _built(self, *, replace: bool) -> Iterator[Changes]:
        """Yield all rows, in place of those that are there."""
        key = ", ".join(map(quoted, self._view.key))
        columns = ", ".join(f"first({quoted(each)}) AS {quoted(each)}" for each in self._others)
        text = f"SELECT count(*) AS `#new`, {key}{', ' * bool(columns)}{columns}"
        rows = self._spark.sql(f"{text} FROM ({self._view.new}) GROUP BY {key}").toArrow()
        # Rows of earlier frontiers are deleted; those of this one have its seq.
        truncated = self._applied.seq - 1 if replace else None
        for start in range(0, max(rows.num_rows, 1), _AT_ONCE):
            made = self._made(rows.slice(start, _AT_ONCE))
            if made or truncated is not None:
                yield Changes((self._view.version,), made, truncated)
            truncated = None

    def _differences(self, test: str) -> Iterator[Changes]:
        """Yield what the affected rows were, and are."""
        where = f" WHERE {test}" if test else ""
        key = ", ".join(map(quoted, self._view.key))
        row = f"struct({', '.join(map(quoted, self._view.columns))})"
        sides = " UNION ALL ".join(
            f"SELECT {word} AS `#is`, * FROM ({sql}) AS v{where}"  # noqa: S608 - quoted
            for word, sql in (("true", self._view.new), ("false", self._view.old))
        )
        both = (
            f"SELECT {key}, count_if(`#is`) AS `#new`, first({row}) FILTER (WHERE `#is`) AS `#n`,"  # noqa: S608 - quoted
            f" first({row}) FILTER (WHERE NOT `#is`) AS `#o` FROM ({sides}) GROUP BY {key}"
        )
        others = "".join(f", `#n`.{quoted(each)}" for each in self._others)
        rows = self._spark.sql(
            f"SELECT `#new`, {key}{others} FROM ({both}) WHERE `#new` > 1 OR NOT `#n` <=> `#o`"  # noqa: S608 - quoted
        ).toArrow()
        for start in range(0, rows.num_rows, _AT_ONCE):
            yield Changes((self._view.version,), self._made(rows.slice(start, _AT_ONCE)))

    @property
    def _others(self) -> list[str]:
        return [each for each in self._view.columns if each not in self._view.key]

    def _made(self, rows: pa.Table) -> list[Change]:
        """Return changes: each row with `#new` 0 is a key without one."""
        counts = rows["#new"].to_pylist()
        types = self._view.columns
        arrays = [_one(rows[name]).cast(arrow_type(kind.delta)) for name, kind in types.items()]
        exact = pa.nulls(rows.num_rows, pa.map_(pa.string(), pa.string()))
        table = pa.table([*arrays, exact], names=[*types, layout.EXACT])
        made = []
        found = delta_json.rows(table, self._view.version)
        for number, (key, row) in zip(counts, found, strict=True):
            if number > 1:
                raise self._wrong_key(f"several rows with one {', '.join(self._view.key)}")
            made.append(self._change(key, row if number else None))
        for each in self._view.key:
            if rows[each].null_count:
                raise self._wrong_key(f"rows without {each}")
        return made

    def _wrong_key(self, what: str) -> ConfigError:
        return ConfigError(
            f"view {self._view.name} has {what}",
            hint="`key` must identify its rows: name more columns, or leave such rows out of it",
        )

    def _change(self, key: bytes, row: bytes | None) -> Change:
        at = self._applied
        return Change(
            key,
            at.seq,
            row,
            self._view.version.schema_id,
            at.lsn,
            at.committed_at_us,
            op="d" if row is None else "c",
        )


def _is_stored(view: ViewPlan, stored: Mapping[str, Definition]) -> bool:
    found = stored.get(view.name)
    return found is not None and found.fingerprint == view.definition.fingerprint


def _joined(anchor: Sequence[str]) -> str:
    """Return the predicate for rows whose anchor is in the temporary view `affected`."""
    same = " AND ".join(f"a.{quoted(each)} <=> v.{quoted(each)}" for each in anchor)
    return f"EXISTS (SELECT 1 FROM affected AS a WHERE {same})"  # noqa: S608 - quoted


def _among(rows: pa.Table, view: ViewPlan) -> str:
    """Return a predicate that every row passes whose anchor is among these."""
    tests = []
    for name in view.anchor:
        values = rows[name].unique().to_pylist()
        kind = view.columns[name]
        texts = [_literal(each, kind) for each in values if each is not None]
        test = f"v.{quoted(name)} IN ({', '.join(sorted(texts))})" if texts else "false"
        null = f" OR v.{quoted(name)} IS NULL" if None in values else ""
        tests.append(f"({test}{null})")
    return " AND ".join(tests)


def _literal(value: Any, kind: Type) -> str:  # noqa: ANN401 - of any type
    text = value.decode() if isinstance(value, bytes) else str(value)
    if kind.name == "bool":
        return text.lower()
    return f"CAST({string(text)} AS {kind.spark})"


def _one(values: pa.ChunkedArray) -> pa.Array:
    return values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)


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
        found = _VALUE_IN.search(str(error))
        if found is None:
            raise
        raise ConfigError(
            f"{found[1]} has a value that is only text in its mirror (docs/DELTA.md, `_exact`)",
            hint="leave such rows out of the table, or the column out of the view",
        ) from error
