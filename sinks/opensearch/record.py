"""What a follower's record in `<prefix>-followers` says: its generations, frontiers and indices.

One document a follower, changed by compare-and-set alone, so that copies of a follower need no
lock: the applied frontier and the mark `reached` only ever rise, and what one copy does to the
indices every other learns before it writes again. Its first fields are for readers:

- `generation`, `epoch`, `lsn`, `seq`, `committed_at_us`: the frontier that was applied last
- `applying`: null, or up to which seq rows may be there beyond it. A reader that finds the same
  `seq` and null before and after its search has seen a state that the database had.

The record is read and written in real time; the index behind its alias is never made by itself.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cdc.errors import ConfigError, StoreLostError, SwitchedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sinks.contract import Applied
    from sinks.opensearch.client import Client

FORMAT: Final = 1
# Every loss of the race is another copy's gain, so this many in a row mean something else.
_RACES: Final = 50
_GONE: Final = (404,)


class Place(msgspec.Struct):
    """One index of a table, and the alias through which alone it is written."""

    index: str
    uuid: str | None = None  # None: not made yet
    floor: int = 0  # a truncate's seq: what is below it is late
    filled: bool = True  # False: the rows of the index before are still to be copied

    @property
    def door(self) -> str:
        """The alias for writing, which goes with the index: nothing makes either by accident."""
        return f"{self.index}-w"


class Table(msgspec.Struct):
    """Where a table's rows are."""

    alias: str  # the readers'
    origin: int  # the generation that made it; another may have taken it over
    now: Place  # what readers see
    next: Place | None = None  # what is written, and takes its place at the next frontier
    source: Place | None = None  # what `next` is filled from, if not `now`: it was to be `next`
    key: list[str] | None = None  # the columns that tell its rows apart, once there are any
    made: int = 1  # how many indices it has had, so that no name comes twice

    @property
    def target(self) -> Place:
        return self.next or self.now


class Build(msgspec.Struct):
    """One generation."""

    token: str  # tells it from another of the same number, after a loss
    reached: int = 0
    applied: dict[str, Any] | None = None
    tables: dict[str, Table] = {}
    letters: int = 0  # how many documents were refused; copies learn from it that some were
    only: list[str] | None = None  # built aside for these tables; the rest is the current one's

    def places(self) -> Iterator[Place]:
        """Yield its indices."""
        for table in self.tables.values():
            yield from filter(None, (table.now, table.next, table.source))


def new_build(only: frozenset[str] | None = None) -> Build:
    return Build(token=uuid.uuid4().hex, only=None if only is None else sorted(only))


class Record(msgspec.Struct):
    """The whole of it."""

    follower: str
    pipeline: str
    generation: int
    format: int = FORMAT
    epoch: int | None = None
    lsn: str | None = None
    seq: int | None = None
    committed_at_us: int | None = None
    applying: int | None = None
    switching: bool = False  # to `generation`, whose aliases may not all be its own yet
    builds: dict[str, Build] = {}

    def build(self, generation: int) -> Build | None:
        return self.builds.get(str(generation))

    def places(self) -> Iterator[Place]:
        """Yield the indices of all generations; one may come twice."""
        for build in self.builds.values():
            yield from build.places()

    def show(self) -> None:
        """Bring what readers see in line with the current generation."""
        build = self.builds[str(self.generation)]
        now = build.applied or {}
        self.epoch, self.lsn, self.seq, self.committed_at_us = (
            now.get(name) for name in ("epoch", "lsn", "seq", "committed_at_us")
        )
        mark = build.reached + 1 if self.switching else build.reached
        self.applying = mark if mark > (self.seq or 0) else None


class _Found(msgspec.Struct):
    source: Record = msgspec.field(name="_source")
    seq_no: int = msgspec.field(name="_seq_no")
    term: int = msgspec.field(name="_primary_term")


class _Written(msgspec.Struct):
    seq_no: int = msgspec.field(name="_seq_no")
    term: int = msgspec.field(name="_primary_term")


class Records:
    """The record of one follower, as this copy knows it, and which generation this copy is of.

    That is the one that readers see when it is opened, or the one `aside` says.
    """

    def __init__(
        self,
        client: Client,
        alias: str,
        follower: str,
        pipeline: str,
        opened: tuple[int | None, str | None, bool] = (None, None, False),
    ) -> None:
        self._client, self._alias = client, alias
        self.follower, self.pipeline = follower, pipeline
        self.generation, self._token, self.aside = opened
        self._known: tuple[Record, int, int] | None = None

    @property
    def opened(self) -> tuple[int | None, str | None, bool]:
        """What another process needs to go on as this copy."""
        return self.generation, self._token, self.aside

    def take(self, generation: int, build: Build) -> None:
        """Be of that generation from now on."""
        self.generation, self._token = generation, build.token

    def mine(self, record: Record) -> Build:
        """Return this copy's generation, if it is what it was."""
        if self.generation is None:
            self.generation = record.generation
        build = record.build(self.generation)
        if build is None or self._token not in {None, build.token}:
            raise StoreLostError(f"generation {self.generation} of {self.follower} was replaced")
        if record.generation != self.generation and not self.aside:
            raise SwitchedError(f"{self.follower} has switched to generation {record.generation}")
        self._token = build.token
        return build

    @property
    def build(self) -> Build:
        return self.mine(self.known)

    def first(self, generation: int) -> Record:
        """Return a record that has nothing but an empty generation."""
        builds = {str(generation): new_build()}
        return Record(self.follower, self.pipeline, generation, builds=builds)

    def prepare(self) -> None:
        """Make the index of records where there is none."""
        if self._client.call("GET", f"/_alias/{self._alias}", fine=_GONE).status in _GONE:
            fields = {"follower": {"type": "keyword"}, "seq": {"type": "long"}}
            self._client.make_index(
                f"{self._alias}-1",
                {"number_of_shards": 1, "auto_expand_replicas": "0-1"},
                {"dynamic": False, "properties": fields},
                self._alias,
            )

    def load(self) -> Record | None:
        """Return the record as it is; None where there is none."""
        answer = self._client.call("GET", self._path, fine=_GONE)
        if answer.status in _GONE:
            self._known = None
            return None
        found = msgspec.json.decode(answer.body, type=_Found)
        record = found.source
        if record.format > FORMAT or record.pipeline != self.pipeline:
            raise ConfigError(
                f"{self._alias} has a follower {self.follower} of the pipeline "
                f"{record.pipeline}, format {record.format}",
                hint="give this one a prefix or a name of its own, or run the newer release",
            )
        self._known = record, found.seq_no, found.term
        return record

    @property
    def known(self) -> Record:
        """What was read or written last, read first where nothing was."""
        if self._known is None and self.load() is None:
            raise StoreLostError(f"{self._alias} has no record of {self.follower} any more")
        assert self._known is not None
        return self._known[0]

    def create(self, record: Record) -> None:
        """Write the first one; another copy's, where it was quicker, stays."""
        record.show()
        if not self._put(record, op_type="create"):
            self.load()

    def replace(self, record: Record) -> None:
        """Write it in the place of whatever there is."""
        record.show()
        self._put(record)

    def change(self, do: Callable[[Record], bool]) -> Record:
        """Return the record after `do` has changed it, which says whether it has.

        `do` may be called again with what another copy has made of it meanwhile. What it finds is
        the newest record in any case: where there is nothing to change, it is asked for.
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
            f"the record of {self.follower} in {self._alias} never is what it was",
            hint="see who else writes to it",
        )

    def _copied(self) -> Record:
        return msgspec.json.decode(msgspec.json.encode(self.known), type=Record)

    def is_newest(self) -> bool:
        """Read the record again; return whether it is as it was known."""
        before = self._known
        return (
            self.load() is not None
            and before is not None
            and self._known is not None
            and (before[1:] == self._known[1:])
        )

    def _put(self, record: Record, **how: str) -> bool:
        """Write it; return whether nobody was quicker."""
        answer = self._client.call(
            "PUT", self._path, record, fine=(409, *_GONE), require_alias="true", **how
        )
        if answer.status in _GONE:
            raise StoreLostError(f"the index behind {self._alias} is gone")
        if answer.status == 409:  # noqa: PLR2004
            return False
        written = msgspec.json.decode(answer.body, type=_Written)
        self._known = record, written.seq_no, written.term
        return True

    @property
    def _path(self) -> str:
        return f"/{self._alias}/_doc/{self.follower}"


def to_record(applied: Applied) -> dict[str, Any]:
    """Return a frontier as the record holds it; `Applied.told` is the way back."""
    return {**applied._asdict(), "lsn": str(applied.lsn)}
