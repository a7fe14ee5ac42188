"""A follower's record in `<prefix>-followers`: its generations, frontiers and indices.

One document per follower, changed only by compare-and-set, so that copies of a follower need no
lock: the applied frontier and `reached` only ever rise, and every copy sees another's changes to
the indices before it writes again. Its first fields are for readers:

- `generation`, `epoch`, `lsn`, `seq`, `committed_at_us`: the frontier that was applied last
- `applying`: null, or the seq up to which rows above the frontier may exist. A reader that finds
  the same `seq` and null before and after its search has seen a state that the database had.
- `lost`: the tables whose index is missing, so that searches find nothing of them at any frontier,
  until another generation is complete

What a generation (`Build`) is in, by its fields:

    reached = applied ──begin of a cut──▶ reached > applied ──its commit──▶ reached = applied
    readers' searches are exact          `applying` is set

What each of its tables is in (`TableIndices`); each arrow is one change of the record:

    now ──a truncate──────────────▶ now, next            `next` is empty and written
     ▲  ──a field's type changes──▶ now, next unfilled   the rows of `source` or `now` are copied
     │                                  │ copied             │ another type before that
     │                                  ▼                    ▼
     └──the commit: aliases move── now, next         now, next unfilled, source: the former `next`

The record names an index before it is created (`uuid` is None until then), and the old one is
deleted after the record has left it, so that a copy which continues finds each of them.

A shadow build is another generation, which no alias shows. Then:

    generation 1 ──switch──▶ generation 2, `switching` ──all aliases moved──▶ generation 2

The record is read and written in real time; the index of its alias is never created automatically.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cdc.errors import ConfigError, StoreLostError, SwitchedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lockstep.sinks.opensearch.client import OpenSearchClient

FORMAT: Final = 1
# Each lost race is another copy's progress, so this many in a row have another cause.
_RACES: Final = 50
_MISSING: Final = (404,)


class TableIndex(msgspec.Struct):
    """One index of a table, and the write alias, through which alone it is written."""

    name: str = msgspec.field(name="index")
    uuid: str | None = None  # None: not created yet
    floor: int = 0  # changes up to this seq are late: a shadow build has them
    truncated: int = 0  # the last truncate's seq: changes below it are late
    filled: bool = True  # False: the previous index's rows must still be copied

    @property
    def late(self) -> int:
        """The seq up to which changes are late: nothing of them is written any more."""
        return max(self.floor, self.truncated - 1)

    @property
    def write_alias(self) -> str:
        """The write alias, deleted with its index: no write can recreate either by accident."""
        return f"{self.name}-w"


class TableIndices(msgspec.Struct):
    """The indices of a table."""

    alias: str  # the readers' alias
    origin: int  # the generation that created it; another may have taken it over
    now: TableIndex  # the index that readers see
    # The index that is written, and replaces `now` at the next frontier.
    next: TableIndex | None = None
    source: TableIndex | None = None  # the former `next`, the source of `next` in place of `now`
    key: list[str] | None = None  # the key columns of its rows, once there are any
    made: int = 1  # how many indices it has had, so that names are unique
    lost: bool = False  # an index is missing

    @property
    def target(self) -> TableIndex:
        return self.next or self.now


class Build(msgspec.Struct):
    """One generation."""

    token: str  # distinguishes it from another of the same number, after a loss
    reached: int = 0
    replacing: int = 0  # the newest `reached` of a cut that is no difference from its frontier
    applied: dict[str, Any] | None = None
    tables: dict[str, TableIndices] = {}
    letters: int = 0  # how many documents were refused; shows other copies that there are new ones
    only: list[str] | None = None  # a shadow build of these tables only; None: all

    def indices(self) -> Iterator[TableIndex]:
        """Yield its indices."""
        for table in self.tables.values():
            yield from filter(None, (table.now, table.next, table.source))


def new_build(only: frozenset[str] | None = None) -> Build:
    return Build(token=uuid.uuid4().hex, only=None if only is None else sorted(only))


class IndexRecord(msgspec.Struct):
    """The complete record."""

    follower: str
    pipeline: str
    generation: int
    format: int = FORMAT
    epoch: int | None = None
    lsn: str | None = None
    seq: int | None = None
    committed_at_us: int | None = None
    applying: int | None = None
    lost: list[str] = []
    switching: bool = False  # to `generation`, which may not have all aliases yet
    builds: dict[str, Build] = {}

    def build(self, generation: int) -> Build | None:
        return self.builds.get(str(generation))

    def indices(self) -> Iterator[TableIndex]:
        """Yield the indices of all generations, some twice."""
        for build in self.builds.values():
            yield from build.indices()

    def show(self) -> None:
        """Set the readers' fields from the current generation."""
        build = self.builds[str(self.generation)]
        now = build.applied or {}
        self.epoch, self.lsn, self.seq, self.committed_at_us = (
            now.get(name) for name in ("epoch", "lsn", "seq", "committed_at_us")
        )
        mark = build.reached + 1 if self.switching else build.reached
        self.applying = mark if mark > (self.seq or 0) else None
        self.lost = sorted(name for name, table in build.tables.items() if table.lost)


class _Stored(msgspec.Struct):
    source: IndexRecord = msgspec.field(name="_source")
    seq_no: int = msgspec.field(name="_seq_no")
    term: int = msgspec.field(name="_primary_term")


class _Format(msgspec.Struct):
    format: int = 0


class _StoredFormat(msgspec.Struct):
    source: _Format = msgspec.field(name="_source")


class _Written(msgspec.Struct):
    seq_no: int = msgspec.field(name="_seq_no")
    term: int = msgspec.field(name="_primary_term")


_decode_record: Final = msgspec.json.Decoder(IndexRecord).decode
_decode_stored: Final = msgspec.json.Decoder(_Stored).decode
_decode_format: Final = msgspec.json.Decoder(_StoredFormat).decode
_decode_written: Final = msgspec.json.Decoder(_Written).decode


class FollowerRecords:
    """The record of one follower, as this copy last read it, and this copy's generation.

    That is the one that readers see at `open`, or for a shadow build the one given.
    """

    def __init__(
        self,
        client: OpenSearchClient,
        alias: str,
        follower: str,
        pipeline: str,
        opened: tuple[int | None, str | None, bool] = (None, None, False),
    ) -> None:
        self._client, self._alias = client, alias
        self.follower, self.pipeline = follower, pipeline
        self.generation, self._token, self.is_shadow = opened
        self._known: tuple[IndexRecord, int, int] | None = None

    @property
    def opened(self) -> tuple[int | None, str | None, bool]:
        """The state that another process needs to continue as this copy."""
        return self.generation, self._token, self.is_shadow

    def bind(self, generation: int, build: Build) -> None:
        """Bind this copy to that generation."""
        self.generation, self._token = generation, build.token

    def own_build(self, record: IndexRecord) -> Build:
        """Return this copy's generation; raise if it was replaced or is no longer current."""
        if self.generation is None:
            self.generation = record.generation
        build = record.build(self.generation)
        if build is None or self._token not in {None, build.token}:
            raise StoreLostError(f"generation {self.generation} of {self.follower} was replaced")
        if record.generation != self.generation and not self.is_shadow:
            raise SwitchedError(f"{self.follower} has switched to generation {record.generation}")
        self._token = build.token
        return build

    @property
    def build(self) -> Build:
        return self.own_build(self.known)

    def first(self, generation: int) -> IndexRecord:
        """Return a record with a single empty generation."""
        builds = {str(generation): new_build()}
        return IndexRecord(self.follower, self.pipeline, generation, builds=builds)

    def prepare(self) -> None:
        """Create the index of records if there is none."""
        if self._client.call("GET", f"/_alias/{self._alias}", fine=_MISSING).status in _MISSING:
            fields = {"follower": {"type": "keyword"}, "seq": {"type": "long"}}
            self._client.create_index(
                f"{self._alias}-1",
                {"number_of_shards": 1, "auto_expand_replicas": "0-1"},
                {"dynamic": False, "properties": fields},
                self._alias,
            )

    def load(self) -> IndexRecord | None:
        """Read and return the record; None if there is none."""
        answer = self._client.call("GET", self._path, fine=_MISSING)
        if answer.status in _MISSING:
            self._known = None
            return None
        found = _decode_stored(answer.body)
        record = found.source
        if record.format > FORMAT or record.pipeline != self.pipeline:
            raise ConfigError(
                f"{self._alias} has a follower {self.follower} of the pipeline "
                f"{record.pipeline}, format {record.format}",
                hint="give this one a prefix or a name of its own, or run the newer release",
            )
        self._known = record, found.seq_no, found.term
        return record

    def stored_format(self) -> int | None:
        """Return the format of the record, also of one that `load` refuses; None without one."""
        answer = self._client.call("GET", self._path, fine=_MISSING)
        if answer.status in _MISSING:
            return None
        return _decode_format(answer.body).source.format

    @property
    def known(self) -> IndexRecord:
        """The last record that was read or written; read it if there is none yet."""
        if self._known is None and self.load() is None:
            raise StoreLostError(f"{self._alias} has lost the record of {self.follower}")
        assert self._known is not None
        return self._known[0]

    def create(self, record: IndexRecord) -> None:
        """Write the first record; if another copy was faster, keep its record."""
        record.show()
        if not self._put(record, op_type="create"):
            self.load()

    def replace(self, record: IndexRecord) -> None:
        """Write the record over any existing one."""
        record.show()
        self._put(record)

    def change(self, do: Callable[[IndexRecord], bool]) -> IndexRecord:
        """Return the record after `do` has changed it; `do` returns whether it changed anything.

        `do` may be called again with another copy's version of the record. It always ends with the
        newest record: if `do` changes nothing, the record is read again to make sure.
        """
        for _ in range(_RACES):
            known = self._copied()
            if do(known):
                known.show()
                _, seq_no, term = self._known or (None, 0, 0)
                if self._put(known, if_seq_no=str(seq_no), if_primary_term=str(term)):
                    return known
            elif self.is_newest():
                return self.known
            self._known = None
        raise StoreLostError(
            f"the record of {self.follower} in {self._alias} changes at every attempt to write it",
            hint="check what else writes to it",
        )

    def _copied(self) -> IndexRecord:
        return _decode_record(msgspec.json.encode(self.known))

    def is_newest(self) -> bool:
        """Read the record again; return whether it is unchanged."""
        before = self._known
        return (
            self.load() is not None
            and before is not None
            and self._known is not None
            and (before[1:] == self._known[1:])
        )

    def _put(self, record: IndexRecord, **how: str) -> bool:
        """Write the record; return False if another copy wrote first."""
        answer = self._client.call(
            "PUT", self._path, record, fine=(409, *_MISSING), require_alias="true", **how
        )
        if answer.status in _MISSING:
            raise StoreLostError(f"the index of the alias {self._alias} is missing")
        if answer.status == 409:  # noqa: PLR2004
            return False
        written = _decode_written(answer.body)
        self._known = record, written.seq_no, written.term
        return True

    @property
    def _path(self) -> str:
        return f"/{self._alias}/_doc/{self.follower}"
