"""What a follower passes to a sink, and what a sink guarantees. Read `sinks/__init__` first.

Pure values and protocols, independent of any store. Bytes of rows and keys are JSON as in the log
(docs/EVENTS.md, "Values" and "Keys and partitions"): a sink parses only what it needs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self, runtime_checkable

import msgspec

from cdc.errors import ConfigError, OvertakenError
from cdc.events import LSN, table_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


class Column(NamedTuple):
    """A column of a table version; `mask`, if set, replaces its values."""

    name: str
    type: str  # its name, as in the schema record: int4, _text, public.mood
    type_id: int
    modifier: int
    nullable: bool | None
    mask: str | None = None
    attnum: int | None = None  # its number in the table, if it is proven
    collation: str | None = None  # C, linguistic or nondeterministic, if it is known


class Version(NamedTuple):
    """One version of a table, with which its events of one `schema_id` are read."""

    schema_id: int
    schema: str
    table: str
    topic: str
    key: tuple[str, ...]  # empty: a table without a key
    columns: tuple[Column, ...]
    values: Mapping[str, object]  # the options of docs/EVENTS.md "Values", by name

    @property
    def name(self) -> str:
        """The table's name as the configuration writes it: `schema.table`."""
        return table_name(self.schema, self.table)


class Change(NamedTuple):
    """A cut's resulting change of one key; for a table with a history, one of its changes."""

    key: bytes | None  # JSON; None in a table without a key
    seq: int  # the version that stores compare
    row: bytes | None  # JSON object; None: the key no longer has a row
    schema_id: int
    commit_lsn: int
    committed_at_us: int
    unchanged: tuple[str, ...] = ()  # columns that have no value in `row`: keep the stored one
    # (for a sink of complete rows: columns that `row` lacks, since the store has no value either)
    before: bytes | None = None  # JSON, as much as the log has
    op: str = "c"


class Changes(NamedTuple):
    """A cut's changes to one table: each key at most once, unless the table keeps a history."""

    versions: tuple[Version, ...]  # those of `changes`, and last the newest
    changes: Sequence[Change]
    truncated: int | None = None  # rows with a lower seq are deleted

    @property
    def version(self) -> Version:
        """The newest version."""
        return self.versions[-1]


class AlteredColumn(NamedTuple):
    """What older rows have in a column of a table version."""

    name: str
    was: str | None  # its former name; None: it is a new column
    missing: bytes = b"null"  # the JSON of a new column's value
    as_text: bool = False  # whether numbers are texts now


class Altered(NamedTuple):
    """How DDL has changed the rows of a table at a seq, of which no event reports."""

    seq: int
    before: Version
    version: Version
    columns: tuple[AlteredColumn, ...]  # those of `version`

    @property
    def sources(self) -> dict[str, str]:
        """The former name of each column that is not new, by its name."""
        return {each.name: each.was for each in self.columns if each.was is not None}

    @property
    def missing(self) -> dict[str, bytes]:
        """The JSON of each new column's value in older rows, by its name."""
        return {each.name: each.missing for each in self.columns if each.was is None}

    def row(self, row: bytes) -> bytes:
        """Return an older row with the version's columns; what it lacks is still unknown."""
        old, new = _decode(row), dict[str, msgspec.Raw]()
        for name, was, missing, as_text in self.columns:
            if was is None:
                new[name] = msgspec.Raw(missing)
            elif was in old:
                new[name] = _as_text(old[was]) if as_text else old[was]
        return _encode(new)

    def key(self, key: bytes) -> bytes:
        """Return an older row's key as later events of it have it."""
        columns, new = {each.was: each for each in self.columns}, dict[str, msgspec.Raw]()
        for was, value in _decode(key).items():
            name, _, _, as_text = columns.get(was) or AlteredColumn(was, was)
            new[name] = _as_text(value) if as_text else value
        return _encode(new)

    def former_key(self, key: bytes) -> bytes | None:
        """Return a row's key as older events of it have it; None if no older row can have it."""
        columns, old = {each.name: each for each in self.columns}, dict[str, msgspec.Raw]()
        for name, value in _decode(key).items():
            _, was, _, as_text = columns.get(name) or AlteredColumn(name, name)
            number = _INTEGER.fullmatch(bytes(value)) if as_text else None
            if as_text and number is None:
                return None
            old[was or name] = value if number is None else msgspec.Raw(number[1])
        return _encode(old)

    def renamed(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the present names of columns, without those that were dropped."""
        present = {was: name for name, was in self.sources.items()}
        return tuple(present[name] for name in names if name in present)

    def change(self, change: Change) -> Change:
        """Return an older change as one of the version, with the seq that it has."""
        return change._replace(
            key=None if change.key is None else self.key(change.key),
            row=None if change.row is None else self.row(change.row),
            before=None if change.before is None else self.row(change.before),
            unchanged=self.renamed(change.unchanged),
            schema_id=self.version.schema_id,
        )


def renamed_key(version: Version, altered: Iterable[Altered]) -> tuple[str, ...]:
    """Return a version's key by the names that its columns have after later alterations."""
    key = version.key
    for each in altered:
        if each.version.schema_id > version.schema_id:
            key = each.renamed(key)
    return key


_decode: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode: Final = msgspec.json.Encoder().encode
# The text that `_as_text` makes of an integer.
_INTEGER: Final = re.compile(rb'"(0|-?[1-9][0-9]*)"')


def _as_text(number: msgspec.Raw) -> msgspec.Raw:
    plain = bytes(number)
    return number if plain == b"null" else msgspec.Raw(b'"%b"' % plain)


class Applied(NamedTuple):
    """The frontier that a follower is at: where the next cut starts.

    `place` is the frontier topic's offset after the record of that frontier, and `ends` has the end
    offset of every partition at it, by topic; a missing partition is at its beginning.
    """

    pipeline: str
    generation: int
    epoch: int
    lsn: LSN
    seq: int
    committed_at_us: int
    place: int
    ends: Mapping[str, Sequence[int]]
    # Of documents and views: the generation of the mirror that they are made from; 0: unknown.
    mirror_generation: int = 0

    @classmethod
    def beginning(cls, pipeline: str, generation: int) -> Self:
        """Return the frontier of an empty store: the log's beginning."""
        return cls(pipeline, generation, 0, LSN(0), 0, 0, 0, {})

    @property
    def end_of(self) -> dict[tuple[str, int], int]:
        """The end offset of each partition that has one, by topic and number."""
        return {
            (topic, number): end
            for topic, ends in self.ends.items()
            for number, end in enumerate(ends)
        }

    def replaced_by(self, former: Applied | None) -> Applied:
        """Return `former` if it is this frontier, with other ends; else this one unchanged."""
        if former is None or (former.seq, former.lsn) != (self.seq, self.lsn):
            return self
        return former

    @property
    def fields(self) -> dict[str, Any]:
        """The frontier as a JSON object, its LSN as a text."""
        return self._asdict() | {"lsn": str(self.lsn)}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Return the frontier in a JSON object; its LSN may be a number or a text."""
        lsn = fields["lsn"]
        ends = {topic: tuple(offsets) for topic, offsets in fields["ends"].items()}
        parsed = LSN.parse(lsn) if isinstance(lsn, str) else LSN(lsn)
        return cls(**{**fields, "lsn": parsed, "ends": ends})


class StoreState(NamedTuple):
    """A store's own state.

    If `reached` is above the applied frontier's seq, a cut was being written when its writer died,
    so rows may exist up to that seq. The next cut must reach it; before that, the store is at no
    frontier. If that was its first cut, `applied` is the beginning, with the pipeline "" in a store
    that does not know it.

    `replaces`: a cut above the applied frontier was started that is no difference from it (`begin`
    without `above`), so the next cut can't be one either. A store that writes nothing of a cut
    before its commit need not report it.
    """

    applied: Applied
    reached: int
    replaces: bool = False


class ShadowBuild(NamedTuple):
    """A generation alongside the one that readers see, of some tables only if given."""

    generation: int
    tables: frozenset[str] | None = None


class Sink(Protocol):
    """A store that follows the log.

    Applying a change twice, or late, has no effect: a change counts if and only if its seq is above
    the stored one, and deletes leave a versioned tombstone. Normally each generation has one writer
    at a time; two must do no harm, only repeat each other's work.

    A sink is created from its configuration without access to the store, and a parallel one
    pickles: executors call `write` in their own processes, the driver everything else. Every method
    raises
    `cdc.errors.CDCError`: UnavailableError and similar for temporary errors, ConfigError for those
    that need a person.
    """

    # Whether `write` needs complete rows: the follower then fills `unchanged` columns from `rows`,
    # and `unchanged` names only those that stay unknown, which is not null.
    complete_rows: bool
    # Whether `write` may be called from many processes concurrently, each with some keys of a
    # table.
    parallel: bool

    def current(self) -> int | None:
        """Return the generation that readers see; None if the store is new."""
        ...

    def open(self) -> StoreState | None:
        """Create what is missing in the store; return its state, None if it is new.

        Raises StoreLostError if the store holds less than it must, for example after a flush or
        with a deleted index; the follower then calls `start_over`. Called again after a temporary
        error.
        """
        ...

    def start_over(self, generation: int) -> None:
        """Start this generation in place of a lost one, regardless of what is left of that.

        The store is then at no frontier, and the next `open` returns None. Another copy that
        continues with the previous one gets StoreLostError from `begin` or `commit`.
        """
        ...

    def histories(self) -> frozenset[str]:
        """Return the tables (`schema.table`) that need every change, in seq order."""
        ...

    def begin(self, reached: int, versions: Sequence[Version], above: int | None = None) -> None:
        """Record that a cut up to seq `reached` is being written; adopt the tables' versions.

        A higher seq that another copy recorded stays. `above` is for changes that are computed as
        the difference from the state at that seq, and are valid only for a store in that state:
        raises OvertakenError if the store is not at `above`, or another copy has started another
        cut, or one that is no difference.
        """
        ...

    def write(self, changes: Changes) -> int:
        """Apply a table's changes, or those of some keys; return how many were new to the store.

        A large cut is passed in parts, one after another: a later part's change of a key applies to
        the result of earlier parts, which `rows` also returns. For a table without a key, or with a
        history, no change is missing and they are in seq order.
        """
        ...

    def commit(self, applied: Applied) -> None:
        """Record that everything up to `applied` is in the store, and make it readable.

        It never moves back: a frontier below the one that another copy recorded has no effect.
        """
        ...

    def rows(self, version: Version, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """Return the stored rows of `keys` as JSON objects, without missing ones."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


@runtime_checkable
class Listable(Protocol):
    """A sink that reads all rows of a table."""

    def contents(self, version: Version) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield each row's key, its seq and its stored value as JSON, in any order.

        The value is b"" for a row that is known but not visible to readers.
        """
        ...


@runtime_checkable
class KeepsFrontiers(Listable, Protocol):
    """A sink whose store keeps the rows of a frontier while later ones are written."""

    def contents_at(
        self, version: Version, applied: Applied
    ) -> Iterator[tuple[bytes, int, bytes]] | None:
        """Return what `contents` yields at the frontier that `open` has returned.

        None if it is at another one.
        """
        ...


@runtime_checkable
class Generations(Listable, Sink, Protocol):
    """A sink whose store can hold several generations, of which readers see one.

    Optional: the store of another sink is rebuilt in place, empty at first.

    A sink created from its configuration belongs to the current generation: `open` binds it to
    that, or creates the first. If another has become current, `begin` and `commit` raise
    SwitchedError, and `open` binds it again; a sink created by `at` keeps its generation.
    """

    def generations(self) -> Mapping[int, Applied | None]:
        """Return every existing generation and its applied frontier; writes nothing."""
        ...

    def at(self, generation: int, tables: frozenset[str] | None = None) -> Self:
        """Return a sink of that generation, current or shadow build; `open` creates a missing one.

        If `tables` is given, it has only these: the others stay those of the current generation,
        and `write` ignores them. `open` raises ConfigError for a shadow build that was started for
        other tables.
        """
        ...

    def switch(self, generation: int, former: Applied | None = None) -> None:
        """Switch readers to that generation at once; nothing is deleted.

        If it has some tables only, the applied frontier is the older of both generations', the
        previous one's if they are equal, and `reached` the newest that any table has, so that the
        next cut brings all to one state. `former`, if given, is the previous generation's frontier
        with the `ends` of these tables' topics, which that generation may have lacked: it replaces
        the stored one, unless that has changed since.
        """
        ...

    def drop(self, generation: int) -> None:
        """Delete what only that generation has; repeatable. ConfigError for the current one."""
        ...


@runtime_checkable
class ReadByGenerations(Protocol):
    """A sink whose readers choose a generation that is at a frontier.

    After a switch of some tables these may be newer than the others until the next cut: the current
    generation is at no frontier then.
    """

    def still_read(self) -> int | None:
        """Return the older generation that readers use meanwhile; None if it is the current one."""
        ...

    def drop_unread(self, generation: int) -> None:
        """Delete an older generation once readers no longer use it: at once, or in upkeep."""
        ...

    def switching(self) -> int | None:
        """Return the generation whose switch was interrupted, which its build can finish."""
        ...


@runtime_checkable
class Alterable(Protocol):
    """A sink that changes the stored rows of a table itself, as DDL has changed the table's.

    For any other sink with `Generations` the follower reads and writes each row.
    """

    def alter(self, altered: Altered) -> None:
        """Change the rows that are older than `altered.seq`; called between `begin` and `commit`.

        Every change with a lower seq was passed to `write`, and none with a higher one. In a store
        that was interrupted after it, it has no effect.
        """
        ...


@runtime_checkable
class Forgetful(Protocol):
    """A sink whose store may lose single rows, so that a comparison can't require them."""

    def forgets(self, version: Version) -> bool:
        """Return whether rows of the table may be missing: evicted or expired."""
        ...


@runtime_checkable
class WrittenByTasks(Protocol):
    """A sink for which executors can write tables' files; its `commit` makes them visible."""

    def target(
        self,
        versions: Sequence[Version],
        reached: int,
        truncated: int | None,
        truncates: Sequence[Change] = (),
        altered: Sequence[Altered] = (),
    ) -> Any | None:  # noqa: ANN401 - the store's own
        """Return what tasks need to write a table's part of a cut up to `reached`.

        `truncates` are all of a table with a history, of which `truncated` is the last one's seq.
        The stored rows are changed as `altered` describes; tasks get the changes as the last of
        these leaves them. None, with nothing changed, if the changes must be passed to `write` and
        `alter` instead.
        """
        ...

    def stage(self, target: Any, actions: Sequence[Any]) -> None:  # noqa: ANN401 - the store's own
        """Take what tasks have written to a target, for `commit`."""
        ...


class Loader(Protocol):
    """Loads rows of a table from executors. Pickles."""

    def write(self, changes: Changes) -> int:
        """Load rows; return how many. A row that is loaded again stays as it is."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


@runtime_checkable
class LoadedByTasks(Protocol):
    """A sink for which executors can load all rows of a table: next to it, for a cut to take."""

    def loader(self, version: Version) -> Any | None:  # noqa: ANN401 - the store's own `Loader`
        """Return what tasks load rows with; None if they must be passed to `write` instead."""
        ...

    def take(self, loader: Any, seq: int) -> int:  # noqa: ANN401 - the store's own
        """Add what is loaded, rows of this seq, to the cut; return how many were new to the store.

        Raises OvertakenError if another copy has built the table.
        """
        ...


@runtime_checkable
class Mountable(Protocol):
    """A sink whose store may be temporarily absent, for example a volume that is not mounted.

    An absent store is never treated as a new one if the follower has reported a position.
    """

    def absent(self) -> str | None:
        """Return the store's place if nothing at all exists there; writes nothing."""
        ...


class FollowerOf(NamedTuple):
    """The follower that a sink is made for."""

    name: str
    pipeline: str
    prefix: str  # the pipeline's, for names in a store that others use, too
    config: Any  # the complete configuration, which may change with each release


class SinkKind(NamedTuple):
    """A kind of store: what an entry point of the group `lockstep.sinks` names.

    A follower's options are converted to `settings`, a dataclass or a msgspec.Struct, before `make`
    is called with them.
    """

    settings: type
    make: Callable[[Any, FollowerOf], Sink]


def expect_tables(
    generation: int, started: Iterable[str] | None, wanted: frozenset[str] | None
) -> None:
    """Raise unless a shadow build was started for the tables that it is opened for; None: all."""
    if (None if started is None else frozenset(started)) != wanted:
        tables = "all tables" if started is None else f"only {', '.join(sorted(started))}"
        raise ConfigError(
            f"generation {generation} was started for {tables}",
            hint="rebuild the same tables again, or delete it: `cdc rebuild NAME --drop-old`",
        )


def expect_alone(
    above: int, reached: int, *, applied: int, started: int, replacing: int = 0
) -> None:
    """Raise OvertakenError if a cut from `above` to `reached` conflicts with another copy's.

    `replacing`: the newest seq up to which a cut was started that is no difference.
    """
    if applied != above or (started > above and started != reached) or replacing > above:
        raise OvertakenError(
            f"another copy of the follower is at another cut: from seq {applied} to {started}"
        )


def discard(sink: Sink, generation: int) -> None:
    """Delete what was written of a generation: it is started over if readers see no other."""
    if isinstance(sink, Generations) and sink.current() not in {None, generation}:
        sink.drop(generation)
    else:
        sink.start_over(generation)


def expect_keyed(versions: Iterable[Version], why: str) -> None:
    """Raise ConfigError for a table without a key, in a store that finds rows by it."""
    for version in versions:
        if not version.key:
            raise ConfigError(
                f"{version.name} has no key, and {why}",
                hint="give it a primary key or `tables.<table>.key`, or leave it out of the"
                " follower's `tables`",
            )


def expect_key(changes: Changes, stored: tuple[str, ...] | None, floor: int = 0) -> None:
    """Raise ConfigError if rows would be mixed with rows that have another key.

    It would be undefined which of them are the same row. `stored` is the key of the existing rows,
    if any; a truncate removes those. Up to `floor` nothing is written any more, with any key.
    """
    keys = {version.schema_id: version.key for version in changes.versions}
    found = {keys[each.schema_id] for each in changes.changes if each.seq > floor}
    if stored is not None and changes.truncated is None:
        found.add(stored)
    if len(found) > 1:
        raise key_changed(changes.version)


def key_changed(version: Version) -> ConfigError:
    """Return the error of a store whose rows have the key of an earlier table version."""
    name, key = version.name, ", ".join(version.key)
    return ConfigError(
        f"{name} has another key now ({key}), and the store has rows of the previous one",
        hint=f"`cdc rebuild NAME --table {name}`, or without `--table` where the store has one"
        " generation (SQL): it reads the rows again, by the new key; then start the follower",
    )
