"""A view's stored rows, in a form that Postgres can compare with its own answer.

A store shows all columns of all rows, unless a shape in Redis has some of them: then those are
compared, of the rows that have a place. Postgres can't run a view in Python, and has not the masked
values: such a view is compared with what the complete mirrors make.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cdc.decode.types import element_of
from cdc.errors import UnavailableError
from cdc.source.answers import CatalogQuestion, Differing
from lockstep.jobs.views.types import FLOATS, INTEGERS
from lockstep.sinks.contract import Change, KeepsFrontiers
from lockstep.sinks.delta.lake import quoted
from lockstep.sinks.shapes import Shaper

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cdc.config import Config
    from cdc.events import LSN
    from lockstep.jobs.views.plans import ViewPlan
    from lockstep.jobs.views.types import PgType
    from lockstep.sinks.contract import Applied, Generations, Listable, StoreState
    from lockstep.sinks.shapes import RowShape

_DAY: Final = date(1970, 1, 1)
_TIME: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - of timestamps without time zone
_MILLISECONDS: Final = 3
_PART_BYTES: Final = 4 << 20  # of rows that Postgres reads at a time
_PAUSE_SECONDS: Final = (0.05, 0.5)
_NUMBERS: Final = {*INTEGERS, *FLOATS, "numeric"}
_FLOATING: Final = {"double precision", "real", "numeric"}


class StoredView:
    """A view as the store of one follower shows it: in a shape of Redis, or all rows."""

    def __init__(self, config: Config, view: ViewPlan, shape: RowShape | None) -> None:
        self._config, self.view = config, view
        self._shaper = Shaper(shape, view.version, "") if shape else None
        self._columns = self._shaper.shown if self._shaper else tuple(view.columns)
        # Why its rows can't be compared; empty if they can.
        self.incomparable = "its rows expire" if shape and shape.ttl_seconds is not None else ""

    def question(self) -> CatalogQuestion:
        """Return what to ask Postgres for the rows that the store shows."""
        named = dict(self.view.asked)
        text = named.pop(self.view.name)
        types = {name: self.view.columns[name].name for name in self._columns}
        where = self._has_place(self._shaper) if self._shaper else ""
        return CatalogQuestion(text, named, types, where)

    def _has_place(self, shaper: Shaper) -> str:
        """Return the condition for rows that the shape shows; empty for all."""
        tests = [f"{quoted(name)} IS NOT NULL" for name in shaper.needed]
        score = shaper.shape.score
        if score is not None and self.view.columns[score].name in _FLOATING:
            tests.append(f"{quoted(score)} <> 'NaN'")
        if shaper.shape.form == "hash":  # one without fields does not exist
            some = (f"{quoted(name)} IS NOT NULL" for name in shaper.fields)
            tests.append(f"({' OR '.join(some)})")
        return " AND ".join(tests)

    def rows(self, sink: Listable) -> Iterator[bytes]:
        """Yield the stored rows that readers see, as JSON objects."""
        return (row for _, _, row in sink.contents(self.view.version) if row)

    def rows_at_frontier(
        self, sink: Generations, seconds: float, lsn: LSN
    ) -> tuple[Applied, list[bytes]]:
        """Return a frontier that is not below an LSN, and the stored rows that readers see at it.

        Of a store that keeps no frontiers they are read between two equal ones. Raises
        UnavailableError if the store does not reach the LSN, or is at no frontier for as long as a
        reading takes.
        """
        deadline, is_there = time.monotonic() + seconds, False
        while True:
            state = sink.open()
            if state is not None and state.applied.lsn >= lsn:
                is_there = True
                if (found := self._read_at(sink, state)) is not None:
                    return state.applied, found
            if time.monotonic() > deadline:
                raise self._not_read(is_there=is_there, lsn=lsn)
            # So that the readings do not keep in step with the cuts.
            time.sleep(random.uniform(*_PAUSE_SECONDS))  # noqa: S311 - jitter, not a secret

    def _read_at(self, sink: Generations, state: StoreState) -> list[bytes] | None:
        """Return the rows at the frontier of an opened store; None if it is at another one."""
        if isinstance(sink, KeepsFrontiers):
            kept = sink.contents_at(self.view.version, state.applied)
            return None if kept is None else [row for _, _, row in kept if row]
        if state.reached > state.applied.seq:
            return None  # a cut is being written
        found = list(self.rows(sink))
        return found if sink.open() == state else None

    def _not_read(self, *, is_there: bool, lsn: LSN) -> UnavailableError:
        if not is_there:
            return UnavailableError(
                f"the follower of view {self.view.name} has not applied {lsn} in time",
                hint="its job must run, and that of its mirror: `cdc follow`; or give --timeout",
            )
        return UnavailableError(
            f"view {self.view.name} was written to during each reading of its store",
            hint="give its follower longer `every_seconds` than a reading takes, or --timeout; a"
            " follower in Delta keeps the rows of a frontier",
        )

    def as_text(self, rows: Iterable[bytes]) -> Iterator[bytes]:
        """Yield rows as JSON arrays that Postgres reads, some rows at a time."""
        kinds = {name: self.view.columns[name] for name in self._columns}
        part, size = list[bytes](), 0
        for row in map(msgspec.json.decode, rows):
            part.append(
                msgspec.json.encode({name: _text(row[name], kind) for name, kind in kinds.items()})
            )
            size += len(part[-1])
            if size > _PART_BYTES:
                yield b"[%b]" % b",".join(part)
                part, size = [], 0
        yield b"[%b]" % b",".join(part)

    def differing(self, wanted: Iterable[bytes], stored: Iterable[bytes]) -> Differing:
        """Return how many rows only the mirrors make, and how many only the store has."""
        one, other = (Counter(map(self._row_alike, rows)) for rows in (wanted, stored))
        return Differing((one - other).total(), (other - one).total())

    def _row_alike(self, row: bytes) -> tuple[Any, ...]:
        values, kinds = msgspec.json.decode(row), self.view.columns
        return tuple(_alike(values.get(name), kinds[name]) for name in self._columns)

    def shown(self, rows: Iterable[bytes]) -> Iterator[bytes]:
        """Yield rows of the view as the store should show them."""
        if self._shaper is None:
            yield from rows
            return
        for row in rows:
            values = msgspec.json.decode(row)
            key = msgspec.json.encode({name: values[name] for name in self.view.key})
            shaped = self._shaper.shaped(Change(key, 0, row, self.view.version.schema_id, 0, 0))
            if shaped is not None and shaped.value:
                yield self._shaper.row(shaped.value, shaped.kept)


def _alike(value: Any, kind: PgType) -> Any:  # noqa: ANN401, PLR0911 - of any type, a case each
    """Return a value so that equal ones are alike, whatever JSON a store has for them."""
    value = _text(value, kind)
    if value is None:
        return None
    try:
        if kind.name == "bool":
            return str(value).lower() in {"true", "t", "1"}
        if kind.name in _NUMBERS:
            return _plain(Decimal(str(value)))
        if kind.name == "timestamptz":
            return str(datetime.fromisoformat(value).astimezone(UTC))
        if kind.name in {"timestamp", "date"}:
            return str(datetime.fromisoformat(value))
        if kind.name in {"json", "jsonb"} and isinstance(value, str):
            return json.dumps(json.loads(value, parse_float=Decimal), sort_keys=True, default=str)
    except (ValueError, TypeError, ArithmeticError):
        pass  # as it is: infinity, NaN
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _plain(number: Decimal) -> str:
    """Return a number's digits, all of them, without zeros at the end."""
    text = format(number, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def _text(value: Any, kind: PgType) -> Any:  # noqa: ANN401 - of any type
    """Return a value of the log as Postgres reads it in JSON."""
    if isinstance(value, list) and (element := element_of(kind.name)) is not None:
        return [_text(each, kind._replace(name=element)) for each in value]
    if isinstance(value, str) and kind.name in {"date", "timestamp"} and _is_number(value):
        value = int(value)  # in a hash of Redis, which has text only
    if isinstance(value, int) and kind.name == "date":
        return str(_DAY + timedelta(days=value))
    if isinstance(value, int) and kind.name == "timestamp":
        millis = 0 <= kind.modifier <= _MILLISECONDS
        return str(_TIME + timedelta(microseconds=value * (1000 if millis else 1)))
    return value


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()
