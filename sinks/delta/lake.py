"""Delta tables by delta-rs: open, create, read and commit; translates its errors.

Every commit has the follower's own Delta transaction, `app` and the seq that the table has reached.
Delta rejects the later of two concurrent commits with the same `app`, whatever they change: so of
two copies of a follower one always sees the other's commit before it continues, and a table's
newest transaction shows up to which seq its rows are.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from queue import Full, Queue
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import (
    CommitProperties,
    DeltaTable,
    QueryBuilder,
    Schema,
    Transaction,
    WriterProperties,
    write_deltalake,
)
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from cdc.errors import (
    CDCError,
    ConfigError,
    StoreLostError,
    UnavailableError,
    gist,
)
from lockstep.sinks.delta import layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

# How many of the newest commits are searched for ours: others only compact, add a property, and
# similar.
_HISTORY: Final = 50
_TABLE: Final = "t"
_PARTS_AHEAD: Final = 4
# What delta-rs says of tables that no attempt can read or write, in errors of several classes.
_UNSUPPORTED: Final = re.compile(
    r"Unsupported table features required: \[[^\]]*\]|Unsupported: Feature '[^']*'"
    r"|catalog-managed table|Invalid protocol action|Unsupported minimum (?:reader|writer) version"
)
# What Arrow and delta-rs say of a missing file, in errors of several classes.
_MISSING: Final = re.compile(r"No such file or directory|Object at location .* not found")
_LOOK_SECONDS: Final = 0.1
# A rewrite holds one of delta-rs' threads while it waits for rows, which other ones of them read;
# there are as many as processors, so several rewrites would wait for each other for ever.
_REWRITING: Final = Lock()
# The seqs of 89 years at 100,000 changes a second; the other bits count 32,767 generations.
_SEQ_BITS: Final = 48


class ConflictError(UnavailableError):
    """Another process committed first: reload the table, then decide."""

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what, hint=hint or "the follower reads the table again and continues")


class CommitInfo(NamedTuple):
    """What a commit records about itself."""

    app: str
    upto: int | None  # generation and seq, from `transaction_version`; None: unchanged
    facts: Mapping[str, object]

    @property
    def properties(self) -> CommitProperties:
        """The commit's properties, for delta-rs."""
        return CommitProperties(
            custom_metadata={"userMetadata": layout.metadata(**self.facts)},
            app_transactions=[] if self.upto is None else [Transaction(self.app, self.upto)],
        )


def transaction_version(generation: int, seq: int) -> int:
    """Return generation and seq as the version of a Delta transaction."""
    return generation << _SEQ_BITS | seq


def generation_and_seq(version: int | None) -> tuple[int, int]:
    """Return the generation and the seq in a Delta transaction's version; 0 if there is none."""
    return (version or 0) >> _SEQ_BITS, (version or 0) & (1 << _SEQ_BITS) - 1


def app_of(pipeline: str, follower: str) -> str:
    """Return the name of a follower's Delta transactions.

    One for all generations: no two write concurrently.
    """
    return f"lockstep/{pipeline}/{follower}"


def newest_transaction(table: DeltaTable, app: str) -> int | None:
    """Return the version of an app's newest transaction, which may be read from the storage."""
    with translated(table.table_uri):
        return table.transaction_version(app)


def unmoved(facts: Mapping[str, object]) -> CommitProperties:
    """Return the properties of a commit that changes no rows: its writer and their frontier."""
    return CommitProperties(custom_metadata={"userMetadata": layout.metadata(**facts)})


def opened(path: str, storage: Mapping[str, str], version: int | None = None) -> DeltaTable | None:
    """Return the table, at its newest version if none is given; None if there is none."""
    with translated(path):
        try:
            return DeltaTable(path, version, storage_options=dict(storage))
        except TableNotFoundError:
            return None


def made(
    path: str,
    schema: dict[str, object],
    storage: Mapping[str, str],
    *,
    properties: Mapping[str, str],
    facts: Mapping[str, object],
    partition: Sequence[str] = (),
    about: str | None = None,
) -> DeltaTable:
    """Create a table, or return the one that another copy created concurrently."""
    with translated(path):
        try:
            return DeltaTable.create(
                path,
                Schema.from_json(json.dumps(schema)),
                description=about,
                configuration=dict(properties),
                storage_options=dict(storage),
                partition_by=list(partition) or None,
                commit_properties=CommitProperties(
                    custom_metadata={"userMetadata": layout.metadata(**facts)}
                ),
            )
        except DeltaError:
            found = opened(path, storage)
            if found is None:
                raise
            return found


@contextmanager
def translated(path: str) -> Iterator[None]:
    """Translate delta-rs' errors into ours."""
    try:
        yield
    except TableNotFoundError as error:
        raise StoreLostError(f"the Delta table {path} is missing") from error
    except CommitFailedError as error:
        raise _unsupported(path, error) or ConflictError(
            f"{path}: another commit was first"
        ) from error
    except (DeltaError, OSError) as error:
        raise _unsupported(path, error) or UnavailableError(
            f"{path}: {gist(error)}",
            hint="the follower tries again; see that the storage can be reached and written",
        ) from error


def return_to(table: DeltaTable, version: int) -> None:
    """Load a version again that we have committed, if a commit of another followed it at once.

    What we know is of our version: so our next commit conflicts with theirs.
    """
    if table.version() != version:
        table.load_as_version(version)


def is_missing_file(error: BaseException) -> bool:
    """Return whether a file could not be read because it is missing."""
    return not isinstance(error, CDCError) and bool(_MISSING.search(str(error)))


def _unsupported(path: str, error: Exception) -> ConfigError | None:
    """Return the error for a table that no attempt can read or write; None if it is another."""
    found = _UNSUPPORTED.search(str(error))
    return found and ConfigError(
        f"{path} has what delta-rs does not support: {found[0]}",
        hint="it was enabled by another writer: drop it (`ALTER TABLE … DROP FEATURE`), or move the"
        " table away and `cdc rebuild` the follower; docs/DELTA.md has what is supported",
    )


def arrow_schema(table: DeltaTable, columns: Sequence[str] | None = None) -> pa.Schema:
    """Return the Arrow schema of all or the named columns, without Delta's metadata."""
    schema = plain(pa.schema(table.schema().to_arrow()))
    return schema if columns is None else pa.schema([schema.field(name) for name in columns])


def size(table: DeltaTable) -> int:
    """Return the total size of its files in bytes."""
    sizes = pa.table(table.get_add_actions())["size_bytes"]
    return int(pc.sum(sizes).as_py() or 0)


def newest_facts(table: DeltaTable) -> dict[str, object]:
    """Return the facts of our newest commit; empty if there is none."""
    for many in (_HISTORY, None):
        with translated(table.table_uri):
            history = table.history(many)
        for commit in history:
            if found := layout.facts(commit.get("userMetadata")):
                return found
    return {}


def read(table: DeltaTable, columns: Sequence[str], where: str = "") -> pa.Table:
    """Return columns of all rows, or of those that an SQL predicate selects."""
    names = ", ".join(map(quoted, columns)) or "1 AS one"
    query = f"SELECT {names} FROM {_TABLE}" + (f" WHERE {where}" if where else "")  # noqa: S608 - names quoted
    with translated(table.table_uri):
        found = pa.table(QueryBuilder().register(_TABLE, table).execute(query).read_all())
    if not columns:
        return found
    known = arrow_schema(table)
    return found.cast(pa.schema([known.field(name) for name in columns]))


def quoted(name: str) -> str:
    """Return a column's name quoted for SQL, that of delta-rs and of Postgres."""
    return '"' + name.replace('"', '""') + '"'


def busy(path: str) -> UnavailableError:
    """Return the error for a table with too many concurrent commits."""
    return UnavailableError(
        f"{path}: other writers were always first", hint="run one copy of a follower"
    )


def replace(table: DeltaTable, rows: pa.Table, commit: CommitInfo) -> None:
    """Replace all stored rows by these."""
    write_deltalake(table, rows, mode="overwrite", commit_properties=commit.properties)


def append(table: DeltaTable, rows: pa.Table, commit: CommitInfo) -> None:
    """Append the rows to the stored ones."""
    write_deltalake(table, rows, mode="append", commit_properties=commit.properties)


def streamed(table: DeltaTable, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield all rows, part by part; only some columns if given.

    A separate thread reads: delta-rs can't read while it writes.
    """
    schema = arrow_schema(table, columns)
    names = ", ".join(map(quoted, schema.names))
    query = f"SELECT {names} FROM {_TABLE}"  # noqa: S608 - names quoted
    parts: Queue[pa.Table | BaseException | None] = Queue(_PARTS_AHEAD)
    given_up = Event()

    def put(part: pa.Table | BaseException | None) -> bool:
        while not given_up.is_set():
            try:
                parts.put(part, timeout=_LOOK_SECONDS)
            except Full:
                continue
            return True
        return False

    def run() -> None:
        try:
            for part in QueryBuilder().register(_TABLE, table).execute(query):
                if not put(pa.table(part).cast(schema)):
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001 - raised where the rows are wanted
            put(error)

    thread = Thread(target=run, name="delta-read", daemon=True)
    thread.start()
    try:
        while (part := parts.get()) is not None:
            if isinstance(part, BaseException):
                raise part
            yield part
    finally:
        given_up.set()
        thread.join()


def rewrite(
    table: DeltaTable,
    schema: pa.Schema,
    parts: Iterable[pa.RecordBatch],
    properties: CommitProperties,
    group_rows: int | None = None,
) -> None:
    """Replace the table's rows and columns in one commit; the parts may be read from the table.

    `group_rows` is the size of the files' row groups, if not the usual one.
    """
    with _REWRITING:
        write_deltalake(
            table,
            pa.RecordBatchReader.from_batches(schema, parts),
            mode="overwrite",
            schema_mode=None if is_mapped(table) else "overwrite",
            writer_properties=WriterProperties(compression="SNAPPY", max_row_group_size=group_rows),
            commit_properties=properties,
        )


def plain(schema: pa.Schema) -> pa.Schema:
    """Return the schema without Delta's metadata."""
    return pa.schema([pa.field(field.name, field.type) for field in schema])


def under(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows of a file with the schema's columns; a column added later is NULL."""
    there = dict(zip(rows.column_names, rows.itercolumns(), strict=True))
    return pa.Table.from_arrays(
        [_column(there.get(field.name), field.type, rows.num_rows) for field in schema],
        schema=schema,
    )


def _column(values: pa.ChunkedArray | None, kind: pa.DataType, many: int) -> pa.ChunkedArray:
    if values is None:
        return pa.chunked_array([pa.nulls(many, kind)])
    return values if values.type == kind else values.cast(kind)


def looked_up(exact: pa.Array, name: str) -> pa.Array:
    """Return a column's texts from `_exact`."""
    if exact.null_count == len(exact):
        return pa.nulls(len(exact), pa.string())
    return pc.map_lookup(exact, query_key=name, occurrence="first")


def copied(
    table: DeltaTable, to: DeltaTable, path: str, storage: Mapping[str, str], commit: CommitInfo
) -> DeltaTable:
    """Replace `to`, which is at `path`, by another table's rows and columns; return it reloaded.

    Raises ConflictError if another commit of the app has come first.
    """
    rows = pa.RecordBatchReader.from_batches(
        arrow_schema(table), (part for rows in streamed(table) for part in rows.to_batches())
    )
    with translated(path):
        write_deltalake(
            to,
            rows,
            mode="overwrite",
            schema_mode=None if is_mapped(to) else "overwrite",
            storage_options=dict(storage),
            commit_properties=commit.properties,
        )
    found = opened(path, storage)
    assert found is not None, "it was just written"
    return found


def is_mapped(table: DeltaTable) -> bool:
    """Return whether columns have other names in the files; delta-rs then changes no schema."""
    return table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none"
