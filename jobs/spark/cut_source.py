"""The Spark data source `lockstep_cuts`: a streaming source whose micro-batches are cuts.

It tails the frontier topic, in a separate process next to the driver, with a consumer that stays
open. Its offset is a frontier: place, epoch, LSN and seq. The rows of a batch describe one cut, one
row per partition; each row has the frontier at the cut's end. A cut of no partition is one row
without a topic. An error is also one row, with `error` set: the follower decides how to handle it.

The rows are returned with the offset, so that no task has to read them. The follower's position
comes from its store, by the option `applied`: Spark's checkpoint is scratch data and never read
again.
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
from cdc.log.frontier_tail import FrontierTail
from cdc.runtime import bugs
from lockstep.jobs.cuts.chosen import Chosen
from lockstep.jobs.cuts.cutting import Cut, CutPart, Cutter, Limits
from lockstep.sinks.contract import Applied

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from pyspark.sql import Row
    from pyspark.sql.types import StructType

NAME: Final = "lockstep_cuts"
# How many seconds one poll for frontier records may take: stopping a query waits for it.
_POLL_SECONDS: Final = 0.25
_SCHEMA: Final = (
    "topic string, partition int, start long, end long, events long, above long,"
    " epoch long, lsn long, seq long, committed_at_us long, place long, error string"
)


class Start(NamedTuple):
    """Where a query starts, and how it is paced: the parameters of the source."""

    config: Path
    follower: str
    applied: Applied
    reached: int
    pace: Path  # a file with the recent size of an event in bytes
    through: LSN | None = None  # no cut ends above it

    def options(self) -> dict[str, str]:
        """Return the data source's options."""
        return {
            "config": str(self.config),
            "follower": self.follower,
            "applied": msgspec.json.encode(
                {**self.applied._asdict(), "lsn": str(self.applied.lsn)}
            ).decode(),
            "reached": str(self.reached),
            "pace": str(self.pace),
            "through": "" if self.through is None else str(self.through),
        }


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
        follower = self._config.followers[options["follower"]]
        self._pace = Path(options["pace"])
        self._applied = Applied.from_fields(msgspec.json.decode(options["applied"]))
        self._cutter = Cutter(
            self._applied,
            Chosen(self._config, follower).follows,
            Limits(follower.max_events, follower.max_bytes, follower.max_events_per_second),
            int(options["reached"]),
            LSN.parse(options["through"]) if options["through"] else None,
        )
        self._tail: FrontierTail | None = None
        self._failures = 0
        sys.excepthook = _print_error

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's
        at = self._applied
        return {"place": at.place, "epoch": at.epoch, "lsn": str(at.lsn), "seq": at.seq}

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
        if self._tail is None:
            self._tail = FrontierTail(self._config, self._applied.place, self._applied.seq)
        cutter, tail = self._cutter, self._tail
        wait = _POLL_SECONDS if cutter.waiting == 0 else 0.0
        for record, offset in () if cutter.has_enough else tail.arrivals(wait):
            cutter.add(record, offset)
        if self._pace.exists():
            cutter.limits.event_bytes = float(self._pace.read_text("ascii") or 0)
        cut = cutter.take(time.monotonic())
        if cut is None and cutter.waiting:
            time.sleep(_POLL_SECONDS / 10)  # the next cut is not due yet
        return cut


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
