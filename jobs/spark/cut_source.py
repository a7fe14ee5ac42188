"""The Spark data source `lockstep_cuts`: a streaming source whose micro-batches are cuts.

It tails the frontier topic, in a separate process next to the driver, with a consumer that stays
open. Its offset is a frontier: place, epoch, LSN and seq. The rows of a batch describe one cut, one
row per partition; each row has the frontier at the cut's end. A cut of no partition is one row
without a topic. An error is also one row, with `error` set: the follower decides how to handle it.

The rows are returned with the offset, so that no task has to read them. The follower's position
comes from its store, in the file that the option `state` names: Spark's checkpoint is scratch data
and never read again. While there is no such file, there are no cuts: the follower itself takes them
until the query has started.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader

from cdc.config import load
from cdc.errors import CDCError, ConfigError
from cdc.events import LSN
from cdc.runtime import bugs
from lockstep.jobs.cuts.cutting import Cut, CutPart
from lockstep.jobs.cuts.tail import CutTail
from lockstep.sinks.contract import Applied, StoreState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from pyspark.sql import Row
    from pyspark.sql.types import StructType

NAME: Final = "lockstep_cuts"
# How many seconds one poll for frontier records may take: stopping a query waits for it.
_POLL_SECONDS: Final = 0.25
_HAND_OVER_SECONDS: Final = 0.05
_SCHEMA: Final = (
    "topic string, partition int, start long, end long, events long, above long,"
    " epoch long, lsn long, seq long, committed_at_us long, place long, error string"
)


class Start(NamedTuple):
    """Where a query starts, and how it is paced: the parameters of the source."""

    config: Path
    follower: str
    state: Path  # a file with the store's frontier, as `hand_over` writes it
    pace: Path  # a file with the recent size of an event in bytes
    through: LSN | None = None  # no cut ends above it

    def options(self) -> dict[str, str]:
        """Return the data source's options."""
        return {
            "config": str(self.config),
            "follower": self.follower,
            "state": str(self.state),
            "pace": str(self.pace),
            "through": "" if self.through is None else str(self.through),
        }


def hand_over(state: StoreState, file: Path) -> None:
    """Let the source's cuts start at the store's frontier."""
    fields = {**state.applied._asdict(), "lsn": str(state.applied.lsn)}
    part = file.with_suffix(".part")
    part.write_bytes(msgspec.json.encode([fields, state.reached]))
    part.replace(file)


class CutSource(DataSource):
    """Options: as `Start.options` gives them."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return _SCHEMA

    def simpleStreamReader(self, schema: StructType) -> SimpleDataSourceStreamReader:  # noqa: ARG002, N802 - Spark's
        return CutReader(self.options)


class CutReader(SimpleDataSourceStreamReader):
    """Runs in the source's own process."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._config = load(Path(options["config"]))
        self._follower = options["follower"]
        self._state, self._pace = Path(options["state"]), Path(options["pace"])
        self._through = LSN.parse(options["through"]) if options["through"] else None
        self._cuts: CutTail | None = None
        self._failures = 0
        sys.excepthook = _print_error

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's
        return {}  # the store's own frontier

    def read(self, start: dict[str, Any]) -> tuple[Iterator[tuple[Any, ...]], dict[str, Any]]:
        """Return the rows of the next cut and its frontier; no rows and `start` if there is none.

        An error is one row, with an offset that differs from `start` in `failures` only.
        """
        try:
            cut = self._next()
        except CDCError as error:
            self._failures += 1
            encoded = msgspec.json.encode(
                {"error": type(error).__name__, "what": error.what, "hint": error.hint}
            ).decode()
            row = (*[None] * (len(_SCHEMA.split(",")) - 1), encoded)
            return iter([row]), {**start, "failures": self._failures}
        if cut is None:
            return iter([]), start
        end = {"place": cut.place, "epoch": cut.epoch, "lsn": str(cut.lsn), "seq": cut.seq}
        return iter(rows(cut)), end

    def readBetweenOffsets(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[Any]:  # noqa: N802 - Spark's
        if start == end:
            return iter([])  # Spark's first batch, if the first poll found no record
        raise ConfigError(
            f"Spark asks again for the cut from {start} to {end}",
            hint="a checkpoint is never used twice: omit --checkpoint, or name another folder",
        )

    def _next(self) -> Cut | None:
        if self._cuts is None:
            if not self._state.exists():
                time.sleep(_HAND_OVER_SECONDS)
                return None
            fields, reached = msgspec.json.decode(self._state.read_bytes())
            state = StoreState(Applied.from_fields(fields), reached)
            self._cuts = CutTail(self._config, self._follower, state, self._through, self._pace)
        return self._cuts.next(_POLL_SECONDS)


def rows(cut: Cut) -> list[tuple[Any, ...]]:
    """Return a cut as rows."""
    end = (cut.above, cut.epoch, int(cut.lsn), cut.seq, cut.committed_at_us, cut.place, None)
    return [(*part, *end) for part in cut.parts] or [(None, None, None, None, None, *end)]


def cut_of(found: Sequence[Row]) -> Cut | CDCError:
    """Return the cut that the rows describe, or the error."""
    first = found[0]
    if first.error is not None:
        from cdc import errors  # noqa: PLC0415 - by name

        fields = msgspec.json.decode(first.error, type=dict[str, str])
        kind = getattr(errors, fields["error"], CDCError)
        error = kind(fields["what"], hint=fields["hint"])
        assert isinstance(error, CDCError)
        return error
    parts = tuple(CutPart(*row[:5]) for row in found if row.topic is not None)
    return Cut(
        first.above,
        first.epoch,
        LSN(first.lsn),
        first.seq,
        first.committed_at_us,
        first.place,
        parts,
    )


def _print_error(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
    """Print the error that ends the source's process, unless Spark ended it by closing the pipe."""
    if not issubclass(kind, BrokenPipeError):
        sys.stderr.write(f"the source of cuts ended:\n{bugs.where(error)}")
