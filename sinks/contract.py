"""What a follower hands to a sink, and what a sink promises. Read `sinks/__init__` first.

Pure values and one protocol; no store is known here. Bytes of rows and keys are JSON as the log
has them (docs/EVENTS.md, "Values" and "Keys and partitions"): a sink parses only what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

from cdc.errors import ConfigError, OvertakenError
from cdc.events import LSN, table_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class Column(NamedTuple):
    """A column of a table version; `mask` is what stands in place of its values, if anything."""

    name: str
    type: str  # by its name, as the schema record has it: int4, _text, public.mood
    type_id: int
    modifier: int
    nullable: bool | None
    mask: str | None = None


class Version(NamedTuple):
    """One version of a table, by which its events of one `schema_id` are read."""

    schema_id: int
    schema: str
    table: str
    topic: str
    key: tuple[str, ...]  # empty: a table without a key
    columns: tuple[Column, ...]
    values: Mapping[str, object]  # the options of docs/EVENTS.md "Values", by their names

    @property
    def name(self) -> str:
        """The table's name as the configuration writes it: `schema.table`."""
        return table_name(self.schema, self.table)


class Change(NamedTuple):
    """What a cut has done to one key in the end; of a table with a history, one of its changes."""

    key: bytes | None  # JSON; None in a table without a key
    seq: int  # the version that stores compare
    row: bytes | None  # JSON object; None: the key has no row any more
    schema_id: int
    commit_lsn: int
    committed_at_us: int
    unchanged: tuple[str, ...] = ()  # columns whose place in `row` holds no value: keep the stored
    # (of a sink of whole rows: columns that `row` lacks, since not even the store has a value)
    before: bytes | None = None  # JSON, as far as the log has it
    op: str = "c"


class Changes(NamedTuple):
    """What a cut has done to one table: each key at most once, unless it keeps a history."""

    versions: tuple[Version, ...]  # those that `changes` name, and the newest, which is the last
    changes: Sequence[Change]
    truncated: int | None = None  # rows of a lower seq are gone

    @property
    def version(self) -> Version:
        """The newest version."""
        return self.versions[-1]


class Applied(NamedTuple):
    """The frontier that a follower stands at: where the next cut begins.

    `place` is the frontier topic's offset behind the record of that frontier, and `ends` gives the
    end offset of every partition at it, by topic; a partition that is missing stands at its
    beginning.
    """

    pipeline: str
    generation: int
    epoch: int
    lsn: LSN
    seq: int
    committed_at_us: int
    place: int
    ends: Mapping[str, Sequence[int]]

    @classmethod
    def beginning(cls, pipeline: str, generation: int) -> Self:
        """Return the frontier of a store that has nothing yet: the log's beginning."""
        return cls(pipeline, generation, 0, LSN(0), 0, 0, 0, {})

    @classmethod
    def told(cls, fields: Mapping[str, Any]) -> Self:
        """Return the frontier that a JSON object tells; its LSN may be a number or a text."""
        lsn = fields["lsn"]
        ends = {topic: tuple(offsets) for topic, offsets in fields["ends"].items()}
        parsed = LSN.parse(lsn) if isinstance(lsn, str) else LSN(lsn)
        return cls(**{**fields, "lsn": parsed, "ends": ends})


class Standing(NamedTuple):
    """What a store says of itself.

    `reached`, where it is above the applied frontier's seq: a cut was being written when its writer
    died, so rows may be there up to that seq. The next cut must reach it; before, the store is at
    no frontier. Where that was its first, `applied` is the beginning, of the pipeline "" in a store
    that does not know it.
    """

    applied: Applied
    reached: int


class Sink(Protocol):
    """A store that follows the log.

    Whatever is applied twice, or late, changes nothing: a change counts if and only if its seq is
    above the stored one, deletes leave a versioned tombstone. One writer at a time for each
    generation is the rule; two must not do harm but only repeat each other's work.

    A sink is made from its configuration without touching the store, and pickles: executors call
    `write` in processes of their own, the driver everything else. Every method raises
    `cdc.errors.CDCError`: UnavailableError and the like for what passes, ConfigError for what
    needs a person.
    """

    # Whether `write` must be given whole rows: the follower then fills `unchanged` from `rows`, and
    # leaves there only what is unknown, which is not null.
    whole_rows: bool
    # Whether `write` may be called from many processes at once, each with some keys of a table.
    parallel: bool

    def open(self) -> Standing | None:
        """Make what is missing in the store; return where it stands, None where it is new.

        Raises StoreLostError where the store holds less than it must: flushed, or an index gone;
        the follower then calls `anew`. Called again after an error that passes.
        """
        ...

    def anew(self, generation: int) -> None:
        """Begin this generation in the place of one that was lost, whatever is left of it.

        The store then is at no frontier, and the next `open` returns None. Another copy that goes
        on with the one before gets StoreLostError from `begin` or `commit`.
        """
        ...

    def histories(self) -> frozenset[str]:
        """Return the tables (`schema.table`) of which every change is wanted, in seq order."""
        ...

    def begin(self, reached: int, versions: Sequence[Version], above: int | None = None) -> None:
        """Note that a cut up to seq `reached` is being written; follow the tables' versions.

        What was noted of a higher seq, by another copy, stays. But changes that tell what became of
        the rows at seq `above`, and not all that happened since, are right for no others: raises
        OvertakenError where the store does not stand there, or another copy has begun another cut.
        """
        ...

    def write(self, changes: Changes) -> int:
        """Apply a table's changes, or some of its keys; return how many were news.

        A large cut comes in parts, one after another: what a later one has of a key goes on from
        what earlier ones have left, and `rows` sees that. Those of a table without a key, or with a
        history, are all there and in seq order.
        """
        ...

    def commit(self, applied: Applied) -> None:
        """Note that everything up to `applied` is in the store, and can be read.

        It never goes back: a frontier below the one that another copy has noted changes nothing.
        """
        ...

    def rows(self, version: Version, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """Return the stored rows of `keys` as JSON objects, those that are there."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


class Generations(Sink, Protocol):
    """A sink whose store can hold several generations, one of which readers see.

    A sink as its configuration makes it is the current generation's: `open` binds it to that, or
    makes the first. When another has become current meanwhile, `begin` and `commit` raise
    SwitchedError, and `open` binds it anew; one that `at` has made stays with its own.
    """

    def generations(self) -> Mapping[int, Applied | None]:
        """Return every generation there is, and its applied frontier; writes nothing."""
        ...

    def current(self) -> int | None:
        """Return the generation that readers see; None where the store is new."""
        ...

    def at(self, generation: int, tables: frozenset[str] | None = None) -> Self:
        """Return a sink of that generation, current or aside; `open` makes it where it is missing.

        Of `tables` alone where given: the others are those of the current generation, and `write`
        leaves them alone. `open` raises ConfigError for one aside that was begun for other tables.
        """
        ...

    def switch(self, generation: int) -> None:
        """Let readers see that generation from here on, at once; nothing is deleted.

        Where it has some tables only, the applied frontier is the older of the two, and `reached`
        the newest that any table has, so that the next cut makes one state of them.
        """
        ...

    def drop(self, generation: int) -> None:
        """Delete what only that generation has; again after a kill. ConfigError for the current."""
        ...

    def contents(self, version: Version) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield each row's key, its seq and what is stored of it as JSON, in any order.

        Nothing is stored (b"") of a row that is known and that readers do not find.
        """
        ...


@runtime_checkable
class Forgetful(Protocol):
    """A sink whose store may lose single rows, so that no comparison can demand them."""

    def forgets(self, version: Version) -> bool:
        """Return whether rows of the table may have gone: evicted, or their time was over."""
        ...


@runtime_checkable
class Mountable(Protocol):
    """A sink whose store is a place that may not be there for a while, as a volume that is mounted.

    Such a place is never taken for a new store where more was reported.
    """

    def absent(self) -> str | None:
        """Return where the store is to be, if nothing at all is there; writes nothing."""
        ...


def expect_tables(
    generation: int, begun: Iterable[str] | None, asked: frozenset[str] | None
) -> None:
    """Raise unless a generation aside was begun for the tables that it is opened for; None: all."""
    if (None if begun is None else frozenset(begun)) != asked:
        told = "all tables" if begun is None else f"{', '.join(sorted(begun))} alone"
        raise ConfigError(
            f"generation {generation} was begun for {told}",
            hint="rebuild it as it was begun, or delete it: `cdc rebuild NAME --drop-old`",
        )


def expect_alone(above: int, reached: int, *, stands: int, begun: int) -> None:
    """Raise OvertakenError where a cut from `above` to `reached` would meet another copy's."""
    if stands != above or (begun > above and begun != reached):
        raise OvertakenError(
            f"another copy of the follower is at another cut: from seq {stands} to {begun}"
        )


def expect_key(changes: Changes, stored: tuple[str, ...] | None, floor: int = 0) -> None:
    """Raise ConfigError where rows would stand beside others that another key tells apart.

    Nobody could say which of them are one. `stored` is the key of the rows that are there, if any;
    a truncate takes these away. Up to `floor` nothing is written any more, whatever its key.
    """
    keys = {version.schema_id: version.key for version in changes.versions}
    found = {keys[each.schema_id] for each in changes.changes if each.seq > floor}
    if stored is not None and changes.truncated is None:
        found.add(stored)
    if len(found) > 1:
        name, key = changes.version.name, ", ".join(changes.version.key)
        raise ConfigError(
            f"{name} has another key now ({key}), and the store has rows of the one before",
            hint=f"`cdc rebuild NAME --table {name}`: it reads the rows again, by the new key; then"
            " start the follower",
        )
