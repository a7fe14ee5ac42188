"""Frontiers of the log, found by what a person or a store knows of them.

A frontier is the state after a complete transaction; its seq identifies it. `find` searches the
frontier topic by halves, so it costs a few reads however much the log holds.
"""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from cdc.errors import ConfigError, GapError
from cdc.events import LSN
from cdc.log import reader
from cdc.log.frontier_search import FrontierSearch, Placed
from lockstep.sinks.contract import Applied

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.log.partitions import Partition

BEGINNING: Final = "beginning"
EARLIEST: Final = "earliest"
LATEST: Final = "latest"
FORMS: Final = f"a seq, an LSN (0/16E9088), a time with its zone, {BEGINNING}, {EARLIEST}, {LATEST}"
# How many offsets are read at once when searching backwards for the ends of partitions.
_BACK: Final = 20_000


# A seq, an LSN, a time, or one of the words.
Position: TypeAlias = "str | int | LSN | datetime"


def parse(text: str) -> Position:
    """Return the position that a text names; raise ConfigError if it names none."""
    text = text.strip()
    if text in {BEGINNING, EARLIEST, LATEST}:
        return text
    if text.isdecimal():
        return int(text)
    for read in (LSN.parse, datetime.fromisoformat):
        try:
            found = read(text)
        except ValueError:
            continue
        if isinstance(found, datetime) and found.tzinfo is None:
            break
        return found
    raise ConfigError(f"{text!r} names no position in the log", hint=f"give {FORMS}")


class FrontierFinder(FrontierSearch):
    """Finds frontiers, up to the topic's end at the time of creation."""

    def find(self, wanted: Position) -> Applied:
        """Return the newest frontier not above a position, with the end of every partition at it.

        A partition that no remaining record names has no end in it: read it from its beginning. A
        seq must be a frontier's. Raises GapError if retention has deleted the position, ConfigError
        if the log has none such.
        """
        is_seq = isinstance(wanted, int) and not isinstance(wanted, LSN)
        if wanted == BEGINNING or (is_seq and wanted == 0):
            return self._beginning()
        if wanted == EARLIEST:
            placed = self.at_or_after(self.first)
            if placed is None or not placed.record.above:
                return Applied.beginning(self._config.pipeline, 1)
        else:
            placed = self.newest(None if wanted == LATEST else wanted)
        if placed is None or (is_seq and placed.record.seq != wanted):
            raise self._missing(wanted, placed)
        return self.at(placed)

    def _beginning(self) -> Applied:
        first = self.at_or_after(self.first)
        if first is not None and first.record.above:
            raise GapError(
                f"{self._topic} begins at {first.record.lsn}, seq {first.record.seq}: retention has"
                " deleted what was before",
                hint=f"read from {EARLIEST}, or request the rows again: `cdc snapshot TABLE`",
            )
        return Applied.beginning(self._config.pipeline, 1)

    def _missing(self, wanted: object, below: Placed | None) -> ConfigError | GapError:
        text = wanted.isoformat() if isinstance(wanted, datetime) else str(wanted)
        first = self.at_or_after(self.first)
        if first is None:
            return ConfigError("the log has no frontier yet", hint="`cdc run` writes the first")
        if below is not None:
            return ConfigError(
                f"seq {text} is no frontier: the one before it is {below.record.seq}",
                hint="a frontier is the seq at the end of a transaction, as in column `frontier`",
            )
        return GapError(
            f"the log has no frontier up to {text}: its first is {first.record.lsn}, seq"
            f" {first.record.seq}",
            hint=f"retention has deleted what was before: name a later one, or {EARLIEST}",
        )

    def newest(self, wanted: Position | None = None) -> Placed | None:
        """Return the newest record, or the newest not above a position; None if there is none."""
        return self.last() if wanted is None else self.newest_that(not_above(wanted))

    def at(self, placed: Placed) -> Applied:
        """Return the frontier of a record, with the ends that `find` describes."""
        record = placed.record
        by_topic: dict[str, dict[int, int]] = {}
        for (topic, number), end in self.ends(placed).items():
            by_topic.setdefault(topic, {})[number] = end
        return Applied(
            self._config.pipeline,
            1,
            record.epoch,
            record.lsn,
            record.seq,
            record.committed_at_us,
            placed.offset + 1,
            {
                topic: tuple(each.get(number, 0) for number in range(max(each) + 1))
                for topic, each in by_topic.items()
            },
        )

    def ends(self, placed: Placed) -> dict[Partition, int]:
        """Return partitions' ends at a frontier, each from the last remaining record that names it.

        It reads backwards until it has every partition of a table, or the topic begins.
        """
        resume = reader.read_resume(self._config)
        assert resume is not None, "there is a log"
        missing = {
            (topic, number)
            for topic, count in resume[0].partitions.items()
            for number in range(count)
        }
        ends: dict[Partition, int] = {}
        high = placed.offset + 1
        while missing and high > self.first:
            low = max(self.first, high - _BACK)
            for each in reversed(list(self.read(low, high))):
                for topic, number, end, _ in each.record.partitions:
                    ends.setdefault((topic, number), end)
            missing -= ends.keys()
            high = low
        return ends


class _Placed(Protocol):
    """What a frontier is found by."""

    @property
    def lsn(self) -> LSN: ...
    @property
    def seq(self) -> int: ...
    @property
    def committed_at_us(self) -> int: ...


def not_above(wanted: Position) -> Callable[[_Placed], bool]:
    """Return whether a frontier is at or below a seq, an LSN or a time."""
    match wanted:
        case LSN():
            return lambda record: record.lsn <= wanted
        case int():
            return lambda record: record.seq <= wanted
        case datetime():
            micros = int(wanted.astimezone(UTC).timestamp() * 1_000_000)
            return lambda record: record.committed_at_us <= micros
    raise ConfigError(f"{wanted!r} names no position in the log", hint=f"give {FORMS}")


def find(config: Config, wanted: Position) -> Applied:
    """Return what `FrontierFinder.find` does, with a connection of its own."""
    with closing(FrontierFinder(config)) as frontiers:
        return frontiers.find(wanted)
