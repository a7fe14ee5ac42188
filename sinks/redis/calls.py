"""A table's changes as calls of the scripts: their keys and arguments.

Pure: calls are built here and sent elsewhere. A change is an *operation* on its row's keys, which
are all in one bucket, in a cluster a hash slot; operations of one bucket are gathered into calls.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from cdc.errors import ConfigError
from lockstep.sinks.contract import Change, Changes, Version
from lockstep.sinks.redis.names import Names
from lockstep.sinks.shapes import Placer, RowShape, Shaper

# How many changes and how many bytes a call has at most: while a server runs one, for a few
# milliseconds, it does nothing else, and it accepts at most a million arguments.
CHANGES_IN_A_CALL: Final = 500
BYTES_IN_A_CALL: Final = 1 << 20

# The suffix after the seq in a version, the state of the row (sinks.redis.scripts): deleted,
# existing without a place, existing at a place.
DELETED, HIDDEN, PLACED = b"0", b"00", b"1"

# Bucket, keys, arguments.
Operation: TypeAlias = tuple[int, tuple[bytes, ...], tuple[bytes, ...]]


class Layout(NamedTuple):
    """How the rows of a table are stored in one build; recorded in the store itself."""

    shape: RowShape
    form: str  # the form in the scripts: `plain`, or the shape's form
    moves: str  # "", or the kind of holder of a place: `place`, or the `claims` of members
    # Whether the index has had every existing row since the build's first. Versions without an
    # index refuse such a build, because to them it has another layout.
    indexed: bool = False


_decode: Final = msgspec.json.Decoder(Layout).decode


class TargetBuild(NamedTuple):
    """The build to which a table's rows are written."""

    build: int
    seen: bool  # by readers
    indexed: bool = False


class StoredTable:
    """A version of a table, with its layout in one build."""

    def __init__(
        self, names: Names, prefix: str, shape: RowShape, version: Version, life_seconds: int
    ) -> None:
        self.names, self.version = names, version
        self.shaper = Shaper(shape, version, prefix)
        self.placer = Placer(shape, prefix, version.name)
        moves = "claims" if shape.collects else "place" if self.shaper.moves else ""
        self.layout = Layout(shape, "plain" if self.shaper.plain else shape.form, moves)
        self.life = b"%d" % life_seconds
        if names.cluster and not self.shaper.slot_is_fixed:
            raise ConfigError(
                f"{version.name} has a key template by which a row moves between hash slots",
                hint="put what determines its slot into double braces, in front of the other "
                "columns: text, as in `{{teams}}:{team_id}`, or columns of the primary key",
            )

    @property
    def why_not_evictable(self) -> str | None:
        """Return why the shape does not tolerate eviction of single keys; None if it does."""
        if self.layout.moves == "claims":
            return "a collection that was evicted would reappear with only some of its members"
        if self.layout.moves:
            return "a row that left its place could not be deleted there"
        return None

    def operations(self, target: TargetBuild, changes: Iterable[Change]) -> Iterator[Operation]:
        """Yield the operation of each change."""
        if self.layout.form == "plain" and not self.names.cluster and target.seen:
            yield from self._plainly(target, changes)
            return
        build, table = target.build, self.version.name
        plain, moves = self.layout.form == "plain", self.layout.moves
        for change in changes:
            assert change.key is not None
            slot = self.slot(change.key)
            values = self.before(target, slot)
            companion = self.names.companions(build, table, slot) + change.key
            shaped = self.shaper.shaped(change)
            version = b"%016x%b" % (
                change.seq,
                PLACED if shaped else HIDDEN if change.row else DELETED,
            )
            if plain:
                place = shaped.place if shaped else self.shaper.place(change.key)
                value = shaped.value[0] if shaped else b""
                yield slot, (values + place, companion), (version, value)
            elif shaped is None:
                yield slot, (companion,), (version,)
            else:
                keys = [companion, values + shaped.place]
                if moves:
                    keys.append(self.names.holders(build, table, slot) + shaped.place)
                parts = shaped.value
                head = (version, shaped.place, shaped.kept, b"%d" % len(parts))
                yield slot, tuple(keys), (*head, *parts)

    def _plainly(self, target: TargetBuild, changes: Iterable[Change]) -> Iterator[Operation]:
        """Do the same for complete rows at their keys in one server, the most common case."""
        place, bucket = self.shaper.place, self.names.bucket
        companions = self.names.companions(target.build, self.version.name, 0)
        for change in changes:
            key, row = change.key, change.row
            assert key is not None
            keys = (place(key), companions + key)
            if row is None or change.unchanged:
                yield (
                    bucket(key),
                    keys,
                    (b"%016x%b" % (change.seq, HIDDEN if row else DELETED), b""),
                )
            else:
                yield bucket(key), keys, (b"%016x%b" % (change.seq, PLACED), row)

    def slot(self, key: bytes) -> int:
        """Return the bucket of a row, in a cluster its hash slot."""
        if self.names.cluster:
            return self.names.slot(self.shaper.anchor(key))
        return self.names.bucket(key)

    def before(self, target: TargetBuild, slot: int) -> bytes:
        """Return what precedes the places of a build's values: nothing if readers see it."""
        return b"" if target.seen else self.names.shadow(target.build, slot)

    def indexing(self, target: TargetBuild, slot: int) -> tuple[bytes, bytes]:
        """Return a bucket's index, empty without one, and where a companion's key begins."""
        if not target.indexed:
            return b"", b""
        at = (target.build, self.version.name, slot)
        return self.names.index(*at), b"%d" % (len(self.names.companions(*at)) + 1)

    def group(self, target: TargetBuild, slot: int, floor: bytes, operations: int) -> list[bytes]:
        """Return the arguments that precede those of a group of operations of one bucket."""
        ttl = self.layout.shape.ttl_seconds
        return [
            self.layout.form.encode(),
            b"%d" % operations,
            floor,
            b"" if ttl is None else b"%d" % ttl,
            self.life,
            self.before(target, slot),
            self.names.holders(target.build, self.version.name, slot),
            self.layout.moves.encode(),
            *self.indexing(target, slot),
        ]


@dataclasses.dataclass
class OpenCut:
    """The cut that is being written."""

    reached: int
    servers: list[str]  # the run id of each server, which changes with a restart
    # Operations not sent yet; None once the cut's changes are written as they arrive.
    gathered: list[tuple[StoredTable, list[Operation]]] | None
    changes: int = 0
    bytes: int = 0
    # By table, with which version it was truncated, and below which seq rows are to be deleted.
    truncated: dict[str, tuple[StoredTable, int]] = dataclasses.field(default_factory=dict)
    announced: bool = False
    is_copy: bool = False  # in a task
    refused: dict[str, ConfigError] = dataclasses.field(default_factory=dict)  # by table


def gathered(operations: Iterable[Operation]) -> Iterator[tuple[int, Sequence[Operation]]]:
    """Yield operations by bucket, grouped to fit into a call."""
    waiting: defaultdict[int, list[Operation]] = defaultdict(list)
    sizes: defaultdict[int, int] = defaultdict(int)
    for each in operations:
        slot = each[0]
        mine = waiting[slot]
        mine.append(each)
        sizes[slot] += sum(map(len, each[2]))
        if len(mine) >= CHANGES_IN_A_CALL or sizes[slot] >= BYTES_IN_A_CALL:
            yield slot, mine
            del waiting[slot], sizes[slot]
    yield from waiting.items()


def with_rows(operations: Iterable[Operation]) -> set[int]:
    """Return the buckets in which rows are written: not those in which rows are only deleted."""
    return {bucket for bucket, _, given in operations if given[0][16:] != DELETED}


def encoded_layout(layout: Layout) -> bytes:
    """Return a layout in its stored form."""
    return msgspec.json.encode(layout)


def decoded_layout(stored: bytes) -> Layout:
    """Return a stored layout."""
    return _decode(stored)


def encoded_key(key: tuple[str, ...] | None) -> bytes:
    """Return the columns of a key in their stored form."""
    return b"" if key is None else msgspec.json.encode(key)


def decoded_key(stored: bytes) -> tuple[str, ...] | None:
    """Return the stored columns of a key."""
    return msgspec.json.decode(stored, type=tuple[str, ...]) if stored else None


def key_of_rows(changes: Changes) -> tuple[str, ...] | None:
    """Return the key columns of the first row; None if there is no row."""
    if not changes.changes:
        return None
    first = changes.changes[0].schema_id
    return next(version.key for version in changes.versions if version.schema_id == first)
