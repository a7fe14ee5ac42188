"""Commits written directly to Delta's log, because delta-rs does not write deletion vectors.

A commit is one file of JSON actions, `_delta_log/<version>.json`, that must not exist yet: the
storage decides which of two writers is first (an object store by a conditional put, a file system
by a link that fails). The second one reads the table again before it retries; so a commit is always
based on exactly the version before it, and needs no conflict checks.

A deletion vector is the set of a file's deleted rows, as positions in a Roaring bitmap; those of
one commit are in one file.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md
https://github.com/RoaringBitmap/RoaringFormatSpec
"""

from __future__ import annotations

import json
import re
import struct
import time
import zlib
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit
from uuid import UUID, uuid4

import obstore
import pyarrow as pa
import pyarrow.compute as pc
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, from_url

from cdc.errors import ConfigError, UnavailableError, gist
from lockstep.sinks.delta import features, lake, layout
from lockstep.sinks.delta.lake import ConflictError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from deltalake import DeltaTable
    from obstore.store import ObjectStore

    from lockstep.sinks.delta.lake import CommitInfo

Action = dict[str, Any]

_Z85: Final = (
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)
_DELTA_MAGIC: Final = 1_681_511_377
_ROARING_COOKIE: Final = 12_346  # no run containers
_CONTAINER: Final = 1 << 16
_ARRAY_MOST: Final = 4_096  # up to this many values a container is a list, above a bitmap
_FILE_VERSION: Final = b"\x01"
# How many bytes of an upload are held in memory.
PART_BYTES: Final = 8 << 20
_PARTS: Final = 2
# Options of the HTTP client, which delta-rs takes with any store's prefix, or without one.
_CLIENT: Final = frozenset({
    "allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type",
    "http1_only", "http2_keep_alive_interval", "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle", "http2_only", "pool_idle_timeout", "pool_max_idle_per_host",
    "proxy_ca_certificate", "proxy_excludes", "proxy_url", "randomize_addresses", "read_timeout",
    "root_certificate", "timeout", "user_agent",
})  # fmt: skip
_PREFIX: Final = re.compile("^(?:aws|azure|google)_")
# delta-rs' consent to commits that could replace each other, which ours never do.
_UNSAFE: Final = "s3_allow_unsafe_rename"
# How many versions share a checkpoint.
CHECKPOINT_EVERY: Final = 100
# The feature that readers of a table with deletion vectors must support.
VECTORS: Final = "deletionVectors"
_ENABLED: Final = "delta.enableDeletionVectors"
_MAPPED: Final = "delta.columnMapping.mode"
# The features of a table whose protocol names none, by the version that introduced them.
_LEGACY: Final = {
    2: ("appendOnly", "invariants"),
    3: ("checkConstraints",),
    4: ("changeDataFeed", "generatedColumns"),
    5: ("columnMapping",),
}


class TaggedVersion(NamedTuple):
    """A version, and the tag of its file in the log.

    The number alone does not identify it: after a table was restored, another commit can have it.
    """

    number: int
    tag: str | None  # None: unknown


class Files:
    """The storage of one table."""

    def __init__(self, uri: str, storage: Mapping[str, str]) -> None:
        # delta-rs names a local table by a URL.
        local = unquote(uri.removeprefix("file://")) if uri.startswith("file://") else uri
        self._folder = Path(local) if local.startswith("/") else None
        if self._folder is not None:
            self.store: ObjectStore = LocalStore(self._folder, mkdir=True)
            self.prefix = ""
        else:
            at = uri.rstrip("/")
            lake, _, name = at.rpartition("/") if urlsplit(at).path else (at, "", "")
            self.store = _client(lake, frozenset(storage.items()))
            self.prefix = f"{name}/" if name else ""

    def put(self, name: str, data: bytes | pa.Buffer) -> None:
        """Write a file with a name of its own."""
        with _translated(name):
            if self._folder is not None:
                # No reader knows it before a commit names it: no need for a temporary file.
                (self._folder / name).write_bytes(data)
                return
            obstore.put(self.store, self.prefix + name, bytes(data))

    def put_new(self, name: str, data: bytes) -> str | None:
        """Write a file that must not exist, and return its tag; raise ConflictError if it does."""
        with _translated(name):
            return obstore.put(self.store, self.prefix + name, data, mode="create")["e_tag"]

    def tag(self, name: str) -> str | None:
        """Return a file's tag, another for each file that was ever written; None if unknown."""
        with _translated(name):
            try:
                return obstore.head(self.store, self.prefix + name)["e_tag"]
            except FileNotFoundError:
                return None

    def tagged(self, version: int) -> TaggedVersion:
        """Return a version with its tag."""
        return TaggedVersion(version, self.tag(log_name(version)))

    def has(self, version: TaggedVersion) -> bool:
        """Return whether the log has that version; False if its tag is unknown."""
        return version.tag is not None and self.tagged(version.number) == version

    def read(self, name: str) -> bytes:
        """Return a file's bytes; raise FileNotFoundError if there is none."""
        try:
            return bytes(obstore.get(self.store, self.prefix + name).bytes())
        except FileNotFoundError:
            raise
        except (BaseError, OSError) as error:
            raise _unavailable(name, error) from error

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder, "" for the table's own, without it."""
        place = (self.prefix + folder).rstrip("/")
        with _translated(folder):
            found = [each["path"] for part in obstore.list(self.store, place) for each in part]
        return sorted(path.removeprefix(f"{place}/") for path in found)

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes; None if there is none."""
        with _translated(name):
            try:
                return int(obstore.head(self.store, self.prefix + name)["size"])
            except FileNotFoundError:
                return None

    def sink(self, name: str) -> pa.NativeFile:
        """Return a new file to write to, which exists once it is closed."""
        with _translated(name):
            if self._folder is not None:
                return pa.OSFile(str(self._folder / name), "wb")
            return pa.PythonFile(_Upload(self.store, self.prefix + name), "w")


@lru_cache(maxsize=8)
def _client(uri: str, storage: frozenset[tuple[str, str]]) -> ObjectStore:
    """Return the client of an object store, one for all tables of a lake: it keeps connections.

    `storage` has delta-rs' options; what it does not name is taken from the environment. Raises
    ConfigError for a store or an option that does not exist.
    """
    options, client = {}, {}
    for name, value in storage:
        plain = _PREFIX.sub("", name.lower())
        if plain in _CLIENT:
            client[plain] = value
        elif plain != _UNSAFE:
            options[name.lower()] = value
    try:
        return from_url(uri, config=options, client_options=client or None)  # type: ignore[call-overload,no-any-return]
    except (BaseError, ValueError) as error:
        given = f" with the options {', '.join(sorted(options))}" if options else ""
        raise ConfigError(
            f"{uri} can't be opened{given}: {gist(error)}",
            hint="give a folder, or the URL of a bucket (s3a://…, gs://…, abfss://…) and delta-rs'"
            " options of it in `storage`",
        ) from error


class _Upload:
    """A file of an object store, with the interface that Arrow writes to."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._name, self._written, self.closed = name, 0, False
        self._to = obstore.open_writer(store, name, buffer_size=PART_BYTES, max_concurrency=_PARTS)

    def write(self, data: bytes) -> int:
        with _translated(self._name):
            self._to.write(data)
        self._written += len(data)
        return len(data)

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        """Do nothing: parts are uploaded when they are full."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with _translated(self._name):
                self._to.close()


@contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except AlreadyExistsError as error:
        raise ConflictError(f"{name} is there already") from error
    except (BaseError, OSError) as error:
        raise _unavailable(name, error) from error


def _unavailable(name: str, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"{name}: {gist(error)}",
        hint="the follower tries again; see that the storage can be written",
    )


class Vector(NamedTuple):
    """Where a file's deletion vector is."""

    name: UUID
    offset: int
    size: int
    cardinality: int

    @property
    def action(self) -> Action:
        """The vector as an add action has it."""
        return {
            "storageType": "u",
            "pathOrInlineDv": _z85(self.name.bytes),
            "offset": self.offset,
            "sizeInBytes": self.size,
            "cardinality": self.cardinality,
        }


def put_vectors(files: Files, deleted: Sequence[pa.BooleanArray]) -> list[Vector]:
    """Write one file of deletion vectors; return where each is."""
    name, text, found = uuid4(), bytearray(_FILE_VERSION), []
    for rows in deleted:
        data = roaring_bitmap(rows)
        found.append(Vector(name, len(text), len(data), rows.true_count))
        text += struct.pack(">I", len(data)) + data + struct.pack(">I", zlib.crc32(data))
    files.put(f"deletion_vector_{name}.bin", bytes(text))
    return found


def commit(
    files: Files, table: DeltaTable, actions: Sequence[Action], operation: str, record: CommitInfo
) -> None:
    """Write and load the version after the table's; raise ConflictError if it exists.

    Raises ConfigError if the table has a feature that we do not support.
    """
    rows = any("add" in action or "remove" in action for action in actions)
    features.expect_ours(table, changes_rows=rows)
    version = table.version() + 1
    put_version(files, version, actions, {"operation": operation}, record)
    table.update_incremental()
    lake.return_to(table, version)


def put_version(
    files: Files,
    version: int,
    actions: Sequence[Action],
    about: Mapping[str, object],
    record: CommitInfo,
) -> str | None:
    """Write a version, 0 for a new table, and return its file's tag; ConflictError if it exists.

    `about` has the operation and the other fields of `commitInfo`.
    """
    now = int(time.time() * 1_000)
    info: Action = {
        "timestamp": now,
        "operationParameters": {},
        "isolationLevel": "Serializable",
        "isBlindAppend": False,
        "engineInfo": "lockstep",
        "userMetadata": layout.metadata(**record.facts),
        **about,
    }
    if version:
        info["readVersion"] = version - 1
    lines: list[Action] = [{"commitInfo": info}, *actions]
    if record.upto is not None:
        lines.append({"txn": {"appId": record.app, "version": record.upto, "lastUpdated": now}})
    text = "\n".join(json.dumps(each, separators=(",", ":")) for each in lines)
    return files.put_new(log_name(version), text.encode())


def added_file(
    path: str,
    size: int,
    stats: str,
    *,
    vector: Mapping[str, object] | None = None,
    changes_rows: bool = True,
    tags: Mapping[str, str] | None = None,
) -> Action:
    """Return the action that adds a file, or a file once more with another deletion vector.

    Not `changes_rows`: others had its rows.
    """
    action: dict[str, Any] = {
        "path": path,
        "partitionValues": {},
        "size": size,
        "modificationTime": int(time.time() * 1_000),
        "dataChange": changes_rows,
        "stats": stats,
    }
    if tags:
        action["tags"] = dict(tags)
    if vector:
        action["deletionVector"] = dict(vector)
    return {"add": action}


def removed_file(
    path: str,
    size: int,
    *,
    vector: Mapping[str, object] | None = None,
    changes_rows: bool = True,
) -> Action:
    """Return the action that removes a file, with the deletion vector that it has.

    Not `changes_rows`: others have its rows.
    """
    action: dict[str, Any] = {
        "path": path,
        "deletionTimestamp": int(time.time() * 1_000),
        "dataChange": changes_rows,
        "extendedFileMetadata": True,
        "partitionValues": {},
        "size": size,
    }
    if vector:
        action["deletionVector"] = dict(vector)
    return {"remove": action}


def removal(add: Mapping[str, Any], *, changes_rows: bool = True) -> Action:
    """Return the action that removes a file, of which `add` has at least its path and size."""
    vector = add.get("deletionVector")
    return removed_file(add["path"], add["size"], vector=vector, changes_rows=changes_rows)


def log_name(version: int) -> str:
    """Return the name of a version's file."""
    return f"_delta_log/{version:020d}.json"


def is_plain(table: DeltaTable) -> bool:
    """Return whether files that we write may be added: we support its features, and it is plain.

    A plain table has no partitions, and the same names for columns in its files.
    """
    about = table.metadata()
    return (
        not about.partition_columns
        and about.configuration.get(_MAPPED, "none") == "none"
        and not any(features.found(table))
    )


def enabling(table: DeltaTable) -> list[Action]:
    """Return the actions that enable deletion vectors for a table; none if they are enabled."""
    about = table.metadata()
    if about.configuration.get(_ENABLED) == "true":
        return []
    schema = json.loads(table.schema().to_json())
    return [
        with_feature(table, VECTORS),
        described(table, schema, {**about.configuration, _ENABLED: "true"}),
    ]


def with_feature(table: DeltaTable, feature: str) -> Action:
    """Return the action that adds a feature, which readers must support, to a table's protocol."""
    protocol = table.protocol()
    writers = set(protocol.writer_features or ())
    if protocol.writer_features is None:
        known = (names for at, names in _LEGACY.items() if at <= protocol.min_writer_version)
        writers = {name for names in known for name in names}
    return {
        "protocol": {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": sorted({*(protocol.reader_features or ()), feature}),
            "writerFeatures": sorted({*writers, feature}),
        }
    }


def described(
    table: DeltaTable, schema: Mapping[str, object], configuration: Mapping[str, str]
) -> Action:
    """Return the action that sets a table's schema and properties."""
    about = table.metadata()
    return {
        "metaData": {
            "id": str(about.id),
            "name": about.name,
            "description": about.description,
            "format": {"provider": "parquet", "options": {}},
            "schemaString": json.dumps(schema),
            "partitionColumns": list(about.partition_columns),
            "createdTime": about.created_time,
            "configuration": dict(configuration),
        }
    }


def roaring_bitmap(deleted: pa.BooleanArray) -> bytes:
    """Return the set of the rows that are true: 64-bit portable Roaring, in Delta's format."""
    keys, bodies = [], []
    rows = _true(deleted)
    firsts = range(0, len(deleted) + _CONTAINER, _CONTAINER)
    starts = pc.search_sorted(rows, pa.array(firsts, rows.type)).to_pylist()
    within = pc.bit_wise_and(rows, pa.scalar(_CONTAINER - 1, rows.type)).cast(pa.uint16())
    places = within.buffers()[1]
    for first, (start, end) in zip(firsts, pairwise(starts), strict=False):
        count = end - start
        if not count:
            continue
        keys.append(struct.pack("<HH", first // _CONTAINER, count - 1))
        if count > _ARRAY_MOST:
            part = deleted.slice(first, _CONTAINER)
            bodies.append(_bits(part).ljust(_CONTAINER // 8, b"\0"))
        else:
            bodies.append(places.slice(2 * start, 2 * count).to_pybytes())
    at = 8 + 8 * len(keys)
    offsets = []
    for body in bodies:
        offsets.append(struct.pack("<I", at))
        at += len(body)
    # Only the first 32-bit bitmap: no file has more rows.
    head = struct.pack("<IQII", _DELTA_MAGIC, 1, 0, _ROARING_COOKIE) + struct.pack("<I", len(keys))
    return b"".join([head, *keys, *offsets, *bodies])


def _true(deleted: pa.BooleanArray) -> pa.UInt64Array:
    """Return which rows are true: mostly few of many, so 64 are skipped at once where none is."""
    words = pa.Array.from_buffers(pa.uint64(), len(deleted) // 64, [None, bitmap(deleted)])
    used = pc.indices_nonzero(pc.not_equal(words, _number(0)))
    found = words.take(used)
    bits = pa.BooleanArray.from_buffers(pa.bool_(), 64 * len(found), [None, found.buffers()[1]])
    places = pc.indices_nonzero(bits)
    firsts = pc.multiply(used.take(pc.shift_right(places, _number(6))), _number(64))
    rows = pc.add(firsts, pc.bit_wise_and(places, _number(63)))
    first = 64 * len(words)
    rest = pc.add(pc.indices_nonzero(deleted.slice(first)), _number(first))
    return pa.concat_arrays([rows, rest])


def _number(number: int) -> pa.UInt64Scalar:
    return pa.scalar(number, pa.uint64())


def bitmap(rows: pa.BooleanArray) -> pa.Buffer:
    """Return a bitmap, the first row in the lowest bit of the first byte; longer than the rows."""
    if rows.offset:
        rows = pa.concat_arrays([rows, rows.slice(0, 0)])
    return rows.buffers()[1]


def _bits(rows: pa.BooleanArray) -> bytes:
    """Return the bitmap without the bits after the last row."""
    text: bytes = bitmap(rows).slice(0, (len(rows) + 7) // 8).to_pybytes()
    spare = -len(rows) % 8
    return text[:-1] + bytes([text[-1] & (0xFF >> spare)]) if spare else text


def _z85(data: bytes) -> str:
    """Return base 85 in Z85's alphabet."""
    return "".join(
        _Z85[number // 85**place % 85]
        for (number,) in struct.iter_unpack(">I", data)
        for place in (4, 3, 2, 1, 0)
    )


def z85_decoded(text: str) -> bytes:
    """Return the decoded bytes of a Z85 text whose length is a multiple of five."""
    groups = (text[at : at + 5] for at in range(0, len(text), 5))
    numbers = (sum(_Z85.index(each) * 85 ** (4 - at) for at, each in enumerate(g)) for g in groups)
    return b"".join(struct.pack(">I", number) for number in numbers)
