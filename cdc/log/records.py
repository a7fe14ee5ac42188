"""The records that carry the pipeline's own state: resume, frontier, schema.

Exact JSON both ways (docs/EVENTS.md is the contract). A record of a newer format than this code
knows is refused: continuing would ignore what the newer writer added.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from cdc.config.tables import Cleanup
from cdc.config.value_options import Values
from cdc.errors import (
    ConfigError,
    unquoted,
)
from cdc.events import LSN, Frontier, PartitionEnd

if TYPE_CHECKING:
    from collections.abc import Callable

# What a publication can publish, in the order of Postgres' manual.
OPERATIONS = ("insert", "update", "delete", "truncate")
# The prefix of the messages that hold an `Alteration`.
ALTERED: Final = "cdc.altered"
# Raised when a field changes its meaning or a field is added that a reader must not ignore; each
# kind of record has its own, the default of its field `format`.
FORMAT = 1
DIGESTS_FORMAT = 4  # of the records that carry digests
BLAKE3_FORMAT = 3  # of those whose frontiers cover neither snapshot rows nor the schema topic
SHA256_FORMAT = 2  # of those whose chunks were hashed by SHA-256


class PublicationOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """The options of a publication, and the version of its catalog row.

    `version` is the row's `xmin`, which each ALTER PUBLICATION … SET changes, even one that reverts
    another. `schemas` has the oid of the membership of each schema that is published completely.
    """

    version: int
    owner: str
    operations: tuple[str, ...]
    via_root: bool = False
    generated: str = "none"
    all_tables: bool = False
    schemas: dict[str, int] = {}


class PinnedPublication(msgspec.Struct, frozen=True, omit_defaults=True):
    """The publication the stream is read through, as it was when the log was written.

    Another oid or membership may hide a gap.

    `tables` has the oid of each table's membership (`pg_publication_rel`), which changes if the
    table is taken out and put back; 0 if it is a member by schema or by ALL TABLES.
    """

    name: str
    oid: int
    tables: dict[str, int]
    removed: tuple[int, ...] = ()  # memberships that `cdc table remove` has ended
    # None in records from before it was pinned.
    options: PublicationOptions | None = msgspec.field(default=None, name="sends")
    # By table, its column list by attnum and a hash of its row filter, `#` first; the filter's
    # text in records of older versions. Tables without either are left out.
    narrowed: dict[str, tuple[tuple[int, ...] | None, str | None]] = {}
    # Each table's own oid, which a rename keeps; empty in records from before it was pinned.
    relations: dict[str, int] = {}


class ResumeIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Which pipeline writes this log, from which source, and the pinned partition counts."""

    format: int = FORMAT
    pipeline: str
    epoch: int
    system_identifier: str
    timeline: int
    database: str
    slot: str
    publication: PinnedPublication
    partitions: dict[str, int]
    topic_ids: dict[str, str] = {}  # Kafka's own, which change if a topic is deleted and recreated
    # Whether the initial snapshot must be handed over before anything is streamed; empty in records
    # of older versions, for which only the snapshot's own state shows it.
    snapshot: Literal["", "none", "due", "done"] = ""
    # What Kafka removes from a data topic (`log.cleanup`), as it was set last; absent: always
    # `delete`. So a topic that is here may lack older events of its keys.
    cleanup: dict[str, Cleanup] = {}


class ResumePosition(msgspec.Struct, frozen=True, kw_only=True):
    """Up to where the log holds the stream, written with every Kafka transaction.

    `chunks` and `digests` are those of the records that no frontier covers yet, as the next
    frontier will have them (`FrontierRecord`), and `chain` is that of the newest frontier.
    """

    format: int = DIGESTS_FORMAT
    end_lsn: LSN
    commit_lsn: LSN
    ordinal: int
    open: bool
    seq: int
    committed_at_us: int
    schema_id: int
    pending: tuple[tuple[str, int, int], ...] = ()
    # Of the transaction at `commit_lsn`: 0 for a message outside any, None if it is not known.
    xid: int | None = None
    origin: str = ""  # source.origin, which selects the transactions that are sent
    owner: str
    at_us: int
    chunks: tuple[int, ...] = ()
    digests: tuple[str, ...] | None = None
    chain: str = ""
    # Records of the schema topic that the next frontier will state, and the offset from which on
    # the next session states what it finds there.
    schemas: tuple[tuple[str, str], ...] = ()
    schemas_end: int = 0


class FrontierRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A `Frontier` as it is written to the log, with the digests of `cdc.log.digests`.

    `chunks` has the number of seqs in each Kafka transaction since the frontier before, `digests`
    the digest of each of `partitions`, None where the records were not hashed as they were written.
    Instead of `chunks` the frontier of an initial snapshot has `blocks`: first seq, how many seqs a
    Kafka transaction may have, and how many such transactions follow one another. `schemas` has key
    and digest of records of the schema topic.
    """

    format: int = DIGESTS_FORMAT
    pipeline: str
    epoch: int
    lsn: LSN
    seq: int
    committed_at_us: int
    partitions: tuple[tuple[str, int, int, int], ...]
    holes: int = 0
    chunks: tuple[int, ...] = ()
    digests: tuple[str, ...] | None = None
    blocks: tuple[tuple[int, int, int], ...] = ()
    schemas: tuple[tuple[str, str], ...] = ()
    previous: str = ""  # the chain of the frontier before; empty if that had none
    chain: str = ""  # empty in records from before there were digests

    @property
    def above(self) -> int:
        """The seq of the frontier before; 0 if no event of the log is before those it covers."""
        return self.seq - self.holes - sum(events for *_, events in self.partitions)

    def frontier(self) -> Frontier:
        """Return the value without its wrapping."""
        ends = tuple(PartitionEnd(*end) for end in self.partitions)
        return Frontier(self.epoch, self.lsn, self.seq, self.committed_at_us, ends, self.holes)


# What `SchemaColumn.collation` is where different texts may be equal.
NONDETERMINISTIC: Final = "nondeterministic"


class SchemaColumn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One column of a table version; `mask` names what replaces its values."""

    name: str
    type_id: int
    type: str
    type_modifier: int
    nullable: bool | None
    mask: str | None = None
    attnum: int | None = None  # if it is proven which column this was; absent in older records
    # The value of the rows that are older than the column, which no event has: as a row has it in
    # JSON, in a text; masked if the column is. None: no such value.
    missing: str | None = None
    # The transaction (xid) that rewrote the table and changed this column, as far as the catalog
    # still shows it; 0: it shows none, or the column's number is not proven.
    rewritten_by: int = 0
    # How Postgres compares the column's texts: `C`, by their bytes; `linguistic`; or
    # `nondeterministic`, where different texts may be equal. None: not known, or no text.
    collation: str | None = None


class SchemaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One version of one table, valid from `from_lsn` on.

    `where` is its row filter, and `where_mark` shows the daemon that it is unchanged; empty in
    records of older versions.
    """

    format: int = FORMAT
    schema_id: int
    relation_id: int
    schema: str
    table: str
    topic: str
    replica_identity: str
    from_lsn: LSN
    key: tuple[str, ...]
    columns: tuple[SchemaColumn, ...]
    values: Values | None = None  # how they are written; None in records older than the options
    where: str | None = None
    where_mark: str = ""
    # The highest number that any of its columns ever had; 0 in older records.
    attributes: int = 0
    # Which files the rows were in (by the catalog's filenode), so that a rewrite of the table is
    # seen; empty in older records.
    storage: str = ""
    # Why the rows of earlier versions may have values that are in no event; empty: they have not.
    stale: str = ""


class ColumnAlteration(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the rows of the version before have in a column."""

    name: str
    was: str | None = None  # its name in the version before; None: it is a new column
    missing: str | None = None  # of a new column: the value, as JSON; None: null
    as_text: bool = False  # whether numbers become text


class Alteration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a table version changes the rows that were written before it, in its columns' order.

    A follower that has applied the events up to it changes the stored rows in this way.
    """

    format: int = FORMAT
    schema_id: int
    previous: int  # the version before, of the same table
    schema: str
    table: str
    topic: str
    columns: tuple[ColumnAlteration, ...]
    stale: str = ""  # as in the version's record


class NumberedColumn(msgspec.Struct, frozen=True, omit_defaults=True):
    """A column of a table as the catalog has it."""

    attnum: int
    name: str  # empty if it is dropped
    type_id: int = 0
    type_modifier: int = -1
    xmin: int = 0  # of its row in the catalog, which every change of the column replaces
    sent: bool = True  # whether the publication sends it
    dropped: bool = False
    computed_from: tuple[int, ...] = ()  # the columns that a generated column is computed from


class ColumnNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """All columns that a table ever had, as the catalog had them at `lsn`, in their order.

    Kept for tables that hide a column: `hidden` has the number of each hidden column, with the name
    that it was hidden by. `columns` is empty if the table was dropped.
    """

    format: int = FORMAT
    relation_id: int
    schema: str = ""
    table: str = ""
    lsn: LSN
    membership: int = 0  # of the table in the publication: another one may send other columns
    columns: tuple[NumberedColumn, ...] = ()
    hidden: dict[int, str] = {}


class Replacement(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that emptied a table's topic and then wrote all of its rows.

    The newest one of each name is kept. What it replaced is what was written under the versions up
    to `schema_id`, the table's version where the topic was emptied.
    """

    format: int = FORMAT
    pipeline: str
    schema: str
    table: str
    schema_id: int
    snapshot: str  # the id of an incremental one, or `initial` and the generation
    at_us: int


Record = ResumeIdentity | ResumePosition | FrontierRecord | SchemaRecord
R = TypeVar("R", bound=msgspec.Struct)  # cdc.snapshot.initial.records has some more


class _OfAnyFormat(msgspec.Struct):
    format: Any = None


_read_format: Final = msgspec.json.Decoder(_OfAnyFormat).decode
_read_key: Final = msgspec.json.Decoder(dict[str, Any]).decode
_FOREIGN: Final = "something else writes to this topic; give the pipeline a log.prefix of its own"
_first_use: Final = threading.Lock()


def encode(record: msgspec.Struct) -> bytes:
    """Return the record's JSON."""
    return msgspec.json.encode(_plain(record))


def decode(kind: type[R], value: bytes, topic: str) -> R:
    """Return the record of `kind` that `value` holds; raise ConfigError if it can't be trusted."""
    try:
        seen = format_of(value)
        newest = newest_format(kind)
        if seen > newest:
            raise ConfigError(
                f"topic {topic} holds a {kind.__name__} of format {seen}; this version reads up to"
                f" {newest}",
                hint="run the Lockstep version that wrote it, or a newer one",
            )
        record: R = _decoder(kind)(value)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"topic {topic} holds a {kind.__name__} that can't be read: {unquoted(error)}",
            hint=_FOREIGN,
        ) from error
    return record


def decode_key(key: bytes | None, topic: str) -> dict[str, Any]:
    """Return the fields of a record's key; raise ConfigError if it has none."""
    try:
        return _read_key(key or b"")
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"topic {topic} holds a key that can't be read: {unquoted(error)}", hint=_FOREIGN
        ) from error


def format_of(value: bytes) -> int:
    """Return the format that a record states, 0 if it states none; raise if it is not JSON."""
    seen = _read_format(value).format
    return seen if isinstance(seen, int) else 0


@cache
def _decoder(kind: type[msgspec.Struct]) -> Callable[[bytes], Any]:
    # msgspec crashes if two threads use a type for the first time at once.
    with _first_use:
        return msgspec.json.Decoder(kind, dec_hook=_lsn).decode


@cache  # it evaluates all annotations
def newest_format(kind: type[msgspec.Struct]) -> int:
    """Return the newest format of a kind of record that this version reads, and writes."""
    fields = msgspec.structs.fields(kind)
    return next((each.default for each in fields if each.name == "format"), FORMAT)


def alteration_of(content: bytes) -> Alteration:
    """Return what a message of the prefix `ALTERED` holds."""
    return decode(Alteration, content, "cdc.messages")


def resume_key(pipeline: str, part: str) -> bytes:
    """Return the key of the `identity` or `position` part of a pipeline's resume record."""
    return msgspec.json.encode({"pipeline": pipeline, "part": part})


def frontier_key(pipeline: str) -> bytes:
    """Return the key of a pipeline's frontier records."""
    return msgspec.json.encode({"pipeline": pipeline})


def schema_key(schema_id: int) -> bytes:
    """Return the key of one table version."""
    return msgspec.json.encode({"schema_id": schema_id})


def numbers_key(numbers: ColumnNumbers) -> bytes:
    """Return the key of a table's column numbers at one LSN, in the topic of the versions."""
    at = {"relation_id": numbers.relation_id, "lsn": str(numbers.lsn)}
    return msgspec.json.encode({"columns": at})


def is_numbers_key(key: bytes) -> bool:
    """Return whether a record of the schema topic gives column numbers."""
    return key.startswith(b'{"columns":')


def is_schema_key(key: bytes) -> bool:
    """Return whether a record of the schema topic is a table version, and not another record."""
    return key.startswith(b'{"schema_id":')


def _plain(record: msgspec.Struct) -> dict[str, object]:
    # LSN is an int: left to itself the encoder would write a number, which JSON readers round.
    fields = zip(
        record.__struct_encode_fields__, msgspec.structs.astuple(record), strict=True
    )  # by their names in JSON
    return {k: str(v) if isinstance(v, LSN) else v for k, v in fields}


def _lsn(kind: type, value: object) -> object:
    if kind is LSN and isinstance(value, str):
        return LSN.parse(value)
    raise TypeError(f"not an LSN: {value!r}" if kind is LSN else kind.__name__)
