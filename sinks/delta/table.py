"""One table's mirror: find or create it, adapt its columns, apply its batches.

A mirror's position is its newest Delta transaction of our app: the seq of the last written cut. A
batch is applied only if its cut ends above that, and of it only the changes above; so a commit
starts from a state with none of them, and ends with all of them. Row versions are compared in
addition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.errors import ConfigError, StoreLostError, SwitchedError, UnavailableError
from lockstep.sinks.contract import Changes
from lockstep.sinks.delta import actions as delta_actions
from lockstep.sinks.delta import altering, buckets, evolve, features, keys, lake, layout, targets
from lockstep.sinks.delta.actions import CHECKPOINT_EVERY, Files, TaggedVersion
from lockstep.sinks.delta.columns import ColumnReader, wanted
from lockstep.sinks.delta.keyless import dropped, old_rows
from lockstep.sinks.delta.lake import CommitInfo, ConflictError
from lockstep.sinks.delta.rows import batch
from lockstep.sinks.delta.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa
    from deltalake import DeltaTable

    from lockstep.sinks.contract import Altered, Applied, Change, Version
    from lockstep.sinks.delta.actions import Action
    from lockstep.sinks.delta.settings import Applier
    from lockstep.sinks.delta.targets import Target
    from lockstep.sinks.delta.types import DeltaType

_TRIES: Final = 5
_ALL: Final = 2**63 - 1


class Keeper(NamedTuple):
    """The owner of mirrors, and how they are kept."""

    pipeline: str
    follower: str
    generation: int
    storage: Mapping[str, str]
    soft: bool
    history: frozenset[str]
    partition: Mapping[str, Sequence[str]]
    is_direct: Callable[[str, str], bool] | None
    large: Applier | None

    @property
    def app(self) -> str:
        """The Delta transactions' name."""
        return lake.app_of(self.pipeline, self.follower)

    @property
    def writer(self) -> evolve.AlteringWriter:
        """Who alters mirrors."""
        return evolve.AlteringWriter(self.facts(), self.storage, self.large)

    def facts(self, applied: Applied | None = None) -> dict[str, object]:
        """Return a commit's facts: its writer, and the frontier that it reaches."""
        facts: dict[str, object] = {
            "pipeline": self.pipeline,
            "follower": self.follower,
            "generation": self.generation,
        }
        if applied is not None:
            facts |= {"epoch": applied.epoch, "frontier": str(applied.lsn), "seq": applied.seq}
        return facts


class OwnCommit(NamedTuple):
    """A commit of this process."""

    version: int
    upto: int  # its transaction's version


class Mirror:
    """The mirror of the table `name`, at `path`."""

    def __init__(self, name: str, path: str, keeper: Keeper) -> None:
        self.name, self.path, self._keeper = name, path, keeper
        self._table: DeltaTable | None = None
        # Our own newest commit, if `_table` has not loaded it.
        self._own: OwnCommit | None = None
        # The version whose tag was asked for or written last.
        self._tagged = TaggedVersion(-1, None)
        # A version, and our transaction's version at it: to ask the table takes 0.4 ms.
        self._known = (-1, 0)
        # The schema and key that the table was given last, if no one has changed it since.
        self._ensured: object = None
        self._schema: pa.Schema | None = None
        self._readers: dict[int, ColumnReader] = {}

    @property
    def table(self) -> DeltaTable:
        """The table, with our newest commit; available after `find` or `ensure`."""
        if self._own is not None:
            self._update()
        return self.loaded

    @property
    def table_id(self) -> str:
        """The table's id."""
        return str(self.loaded.metadata().id)

    @property
    def version(self) -> int:
        """The table's newest known version."""
        return self._own.version if self._own else self.loaded.version()

    @property
    def tagged(self) -> TaggedVersion:
        """The newest known version, and its tag: the storage is asked for another's commit only."""
        if self._tagged.number != self.version:
            self._tagged = self._files.tagged(self.version)
        return self._tagged

    @property
    def _files(self) -> Files:
        return Files(self.path, self._keeper.storage)

    @property
    def is_loaded(self) -> bool:
        """Whether `table` is at `version` without asking the storage."""
        return self._own is None

    @property
    def loaded(self) -> DeltaTable:
        """The table without our newest commits, which change no columns and no properties."""
        assert self._table is not None, "it was found or created"
        return self._table

    @property
    def facts(self) -> dict[str, object]:
        """A commit's facts about its writer."""
        return self._keeper.facts()

    @property
    def spark(self) -> Applier | None:
        """The writer of a table that only delta-spark may write; None if we may."""
        table = self.table
        return evolve.spark_of(table, self._keeper.large) if features.needs_spark(table) else None

    def set_properties(self, properties: Mapping[str, str]) -> None:
        """Set properties of the table."""
        with lake.translated(self.path):
            evolve.set_properties(self.table, properties, self._keeper.writer)

    @property
    def seq(self) -> int:
        """The seq up to which the table holds everything."""
        generation, seq = self._reached
        return seq if generation == self._keeper.generation else 0

    @property
    def _reached(self) -> tuple[int, int]:
        """The generation that has written the table, and its seq."""
        if self._table is None:
            return 0, 0
        if self._own is not None:
            return lake.generation_and_seq(self._own.upto)
        version = self._table.version()
        if self._known[0] != version:
            self._known = version, lake.newest_transaction(self._table, self._keeper.app) or 0
        return lake.generation_and_seq(self._known[1])

    @property
    def is_stale(self) -> bool:
        """Whether its rows are of an older generation: the first batch replaces them."""
        return 0 < self._reached[0] < self._keeper.generation

    def find(self) -> bool:
        """Load or refresh the table; return whether it exists. Raises if it is not ours.

        If our commit was the newest and is still there, a commit of another is seen once ours
        conflicts with it.
        """
        if self._table is None:
            table = lake.opened(self.path, self._keeper.storage)
            if table is None:
                return False
            facts = lake.newest_facts(table)
            # The log may have only others' commits; but it always keeps our transaction's version.
            if facts or lake.newest_transaction(table, self._keeper.app) is None:
                self._check(facts)
            self._table = table
        elif self._own is not None and self._files.has(self._tagged):
            return True
        self._refresh()
        return True

    def _refresh(self) -> None:
        """Load the newest version; raise SwitchedError if another generation has written it."""
        self._update()
        with lake.translated(self.path):
            generation, _ = self._reached
        if generation > self._keeper.generation:
            raise SwitchedError(
                f"{self.path} already has generation {generation}",
                hint="the follower opens its store again and finishes the switch; if that build was"
                f" deleted, `cdc rebuild {self._keeper.follower}` makes another",
            )
        features.expect_writable(self.loaded, self._keeper.large)

    def _update(self) -> None:
        """Load the newest version; raise StoreLostError if the table is missing or was restored."""
        table, own = self.loaded, self._own
        self._expect_tagged()
        try:
            with lake.translated(self.path):
                table.update_incremental()
        except UnavailableError as error:
            if lake.opened(self.path, self._keeper.storage) is None:
                raise StoreLostError(f"the Delta table {self.path} is missing") from error
            raise
        if own is not None and table.version() < own.version:
            raise self._replaced()
        if own is None or table.version() > own.version:
            self._ensured = self._schema = None
        else:
            self._known = own.version, own.upto
        self._own = None

    def _expect_tagged(self) -> None:
        """Raise StoreLostError if the log has another commit under a version's number."""
        known = self._tagged
        if known.tag is None:
            return
        there = self._files.tagged(known.number)
        # A missing one may have been deleted as an old version.
        if there.tag is not None and there != known:
            raise self._replaced()

    def _replaced(self) -> StoreLostError:
        return StoreLostError(
            f"the mirror {self.path} was replaced or restored to an older version",
            tables=frozenset({self.name}),
        )

    def _check(self, facts: Mapping[str, object]) -> None:
        """Raise if the table is not ours."""
        mine = self._keeper
        owner = facts.get("pipeline"), facts.get("follower", mine.follower)
        if owner != (mine.pipeline, mine.follower):
            raise ConfigError(
                f"{self.path} is no mirror of the follower {mine.follower} of the pipeline"
                f" {mine.pipeline}",
                hint="move it away, or give the follower another path",
            )
        if "follower" not in facts and facts.get("frontier") is None:
            raise UnavailableError(
                f"the snapshot that fills {self.path} is not complete yet",
                hint="the follower continues when it is",
            )

    def ensure(self, *versions: Version, changes: Sequence[Change] = ()) -> None:
        """Create the table if it is missing; give it the versions' columns.

        First the columns of the newest, which is the last, then those that only older ones had.
        """
        version = versions[-1]
        keeper = self._keeper
        history = self.name in keeper.history
        if history and not version.key:
            raise ConfigError(
                f"{self.name} is to have a history and has no key",
                hint="give it a primary key or `tables.<table>.key`, or remove it from `history`",
            )
        found: dict[str, DeltaType] = {}
        stored = self._stored.names if self._table else ()
        for each in reversed(versions):
            newer = {column.casefold() for column in found}
            found |= {
                column: kind
                for column, kind in wanted(each, changes, stored)
                if column.casefold() not in newer
            }
        columns = list(found.items())
        ours = layout.ours(history=history, soft=keeper.soft and bool(version.key))
        schema = layout.schema(columns, self.name, ours)
        if self._table is not None:
            if self._ensured == (schema, version.key):
                return
            if evolve.follow(self.table, schema, self.name, keeper.writer):
                self._readers.clear()
            evolve.keep_key(self.table, version.key, keeper.writer)
            self._ensured, self._schema = (schema, version.key), None
            return
        if keeper.is_direct and keeper.is_direct(version.schema, version.table):
            raise ConfigError(
                f"the rows of {self.name} were copied directly into Delta, and {self.path} is not a"
                " table",
                hint="give the follower the path `delta.path`; or read them into the log,"
                f" `cdc snapshot {self.name} --replace`, and remove `snapshot: direct`",
            )
        self._table = lake.made(
            self.path,
            schema,
            keeper.storage,
            properties=layout.properties(name for name, _ in columns),
            facts=keeper.facts(),
            partition=keeper.partition.get(self.name, ()),
        )
        evolve.map_columns(self._table, keeper.writer)
        evolve.keep_key(self._table, version.key, keeper.writer)

    @property
    def altered_seq(self) -> int:
        """The seq of the newest alteration that the table has."""
        if self._table is None:
            return 0
        app = altering.app(self._keeper.app)
        generation, seq = lake.generation_and_seq(lake.newest_transaction(self.table, app))
        return seq if generation == self._keeper.generation else 0

    def alter(self, every: Sequence[Altered]) -> None:
        """Change the rows as DDL has, in the order of the alterations, each once."""
        if not self.find() or self.is_stale:  # the first batch replaces stale rows
            return
        for altered in every:
            for version in (altered.before, altered.version):
                names = (column.name for column in version.columns)
                layout.expect_distinct([*names, *layout.ours()], self.name)
        for altered in every:
            self._alter(altered)
            if evolve.key_of(self.table) == altered.before.key != altered.version.key:
                key = altered.renamed(altered.before.key)
                if key == altered.version.key:
                    evolve.keep_key(self.table, key, self._keeper.writer)

    def _alter(self, altered: Altered) -> None:
        keeper = self._keeper
        upto = lake.transaction_version(keeper.generation, altered.seq)
        commit = CommitInfo(altering.app(keeper.app), upto, keeper.facts())
        for _ in range(_TRIES):
            if self.altered_seq >= altered.seq:
                return
            try:
                altering.alter(self.table, altered, commit, self.name)
            except ConflictError:
                self.find()
                continue
            self._readers.clear()
            self._ensured = self._schema = None
            return
        raise lake.busy(self.path)

    @property
    def _stored(self) -> pa.Schema:
        """The Arrow schema of the table."""
        if self._schema is None:
            self._schema = lake.arrow_schema(self.table)
        return self._schema

    def has_key(self, version: Version) -> bool:
        """Return whether the stored rows have the version's key."""
        return evolve.key_of(self.loaded) in {None, version.key}

    def expect_key(self, changes: Changes) -> None:
        """Raise ConfigError if rows would be mixed with rows that have another key."""
        key, keys = changes.version.key, {each.schema_id: each.key for each in changes.versions}
        found = {key}
        if len(set(keys.values())) > 1:
            found |= {keys[change.schema_id] for change in changes.changes}
        is_emptied = changes.truncated is not None or self.is_stale
        if len(found) > 1 or not (is_emptied or self.has_key(changes.version)):
            raise ConfigError(
                f"{self.name} has another key now ({', '.join(key) or 'none'}), and {self.path}"
                " has rows of the previous one",
                hint=f"`cdc rebuild {self._keeper.follower} --table {self.name}`: it reads the rows"
                " again, by the new key; then start the follower",
            )

    def target(
        self,
        place: str,
        versions: Sequence[Version],
        truncated: int | None,
        truncates: Sequence[Change],
    ) -> Target:
        """Return the table, with the versions' columns, as tasks need it.

        A history has `truncates`, which end its rows instead of removing them.
        """
        self.ensure(*versions)
        self.expect_key(Changes(tuple(versions), (), truncated))
        is_history = self.name in self._keeper.history
        is_emptied = not is_history and (truncated or 0) > self.seq
        return targets.target(
            self.table,
            place,
            self._keeper.storage,
            versions[-1].key,
            self.seq,
            replaces=self.is_stale or is_emptied,
            is_history=is_history,
            truncates=tuple(each for each in truncates if each.seq > self.seq),
        )._replace(dropped=dropped(self._stored.names, versions[-1]))

    def commit(self, target: Target, actions: Sequence[Action], applied: Applied) -> None:
        """Commit what tasks have written; raise ConflictError if the table has changed since."""
        table, facts = self.table, self._keeper.facts(applied)
        upto = lake.transaction_version(self._keeper.generation, applied.seq)
        commit, files = CommitInfo(self._keeper.app, upto, facts), Files(self.path, target.storage)
        with lake.translated(self.path):
            if table.version() != target.version:
                raise ConflictError(f"{self.path} has changed since the cut's files were written")
            buckets.expect_files(files, actions)
            if any("deletionVector" in each.get("add", ()) for each in actions):
                enabling = delta_actions.enabling(table)
                if enabling:
                    about = commit._replace(upto=None)
                    delta_actions.commit(files, table, enabling, "ADD FEATURE", about)
            delta_actions.commit(files, table, actions, "MERGE", commit)
            if table.version() // CHECKPOINT_EVERY > target.version // CHECKPOINT_EVERY:
                table.create_checkpoint()

    def work(self, changes: Changes) -> Work:
        """Return the work for changes that are all above `seq`."""
        schema, key, old = self._stored, changes.version.key, None
        history = self.name in self._keeper.history
        truncates: tuple[Change, ...] = ()
        if history:
            truncates = tuple(change for change in changes.changes if change.op == "t")
            left = [change for change in changes.changes if change.op != "t"]
            changes = changes._replace(changes=left, truncated=None)
        if not key and any(change.before for change in changes.changes):
            old = batch(old_rows(changes), schema, self._readers)
        new = batch(changes, schema, self._readers)
        return Work(
            batch=new if history else keys.newest(new, key),
            key=key,
            # `_ALL` is above every stored row's seq, of any generation.
            truncated=_ALL if self.is_stale else changes.truncated,
            soft=self._keeper.soft,
            history=history,
            before=old,
            truncates=truncates,
            dropped=frozenset() if key else dropped(schema.names, changes.version),
        )

    def apply(
        self, work: Work, applied: Applied, applier: Callable[[Mirror, Work, CommitInfo], None]
    ) -> None:
        """Commit the work, unless another copy has already reached its seq."""
        upto = lake.transaction_version(self._keeper.generation, applied.seq)
        commit = CommitInfo(self._keeper.app, upto, self._keeper.facts(applied))
        began = self.seq
        for _ in range(_TRIES):
            try:
                applier(self, work, commit)
            except ConflictError:
                self._refresh()
                if self.seq >= applied.seq:
                    return
                if self.seq > began:
                    # Another copy has applied part of it, which must not be applied again.
                    work = work.above(self.seq)
                continue
            return
        raise lake.busy(self.path)

    def put(
        self, files: Files, actions: Sequence[Action], operation: str, commit: CommitInfo
    ) -> int:
        """Commit actions that change only rows, and return their version; it is not loaded.

        Raises ConflictError if another commit came first.
        """
        assert commit.upto is not None, "it records how far the rows are"
        version, about = self.version + 1, {"operation": operation}
        with lake.translated(self.path):
            tag = delta_actions.put_version(files, version, actions, about, commit)
            self._own, self._tagged = OwnCommit(version, commit.upto), TaggedVersion(version, tag)
            # Other commits may take the round number.
            if version // CHECKPOINT_EVERY > self.loaded.version() // CHECKPOINT_EVERY:
                self.table.create_checkpoint()
        return version
