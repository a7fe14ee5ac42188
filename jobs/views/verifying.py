"""A view's stored rows, in a form that Postgres can compare with its own answer.

Postgres can't run a view in Python, and has not the masked values: such a view is compared with
what the complete mirrors make.
"""

from __future__ import annotations

from collections import Counter
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cdc.source.answers import Differing, Question
from lockstep.jobs.views.parsing import named_views

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.config import Config
    from lockstep.jobs.views.plans import ViewPlan
    from lockstep.jobs.views.types import Type
    from lockstep.sinks.contract import Listable

_DAY: Final = date(1970, 1, 1)
_TIME: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - of timestamps without time zone
_MILLISECONDS: Final = 3


def question(config: Config, view: ViewPlan) -> Question:
    """Return what to ask Postgres for the view's rows."""
    sqls = {name: each.sql for name, each in config.views.items()}
    named = {name: sqls[name] for name in named_views(view.name, sqls)}
    types = {name: kind.name for name, kind in view.columns.items()}
    return Question(sqls[view.name], named, types)


def stored_rows(sink: Listable, view: ViewPlan) -> bytes:
    """Return the view's rows in a store, as a JSON array."""
    rows = [msgspec.json.decode(row) for _, _, row in sink.contents(view.version) if row]
    return msgspec.json.encode(
        [{name: _text(row[name], kind) for name, kind in view.columns.items()} for row in rows]
    )


def differing(wanted: Iterable[bytes], stored: Iterable[bytes]) -> Differing:
    """Return how many rows only the mirrors make, and how many only the store has."""
    one, other = (
        Counter(msgspec.json.encode(msgspec.json.decode(row), order="sorted") for row in rows)
        for rows in (wanted, stored)
    )
    return Differing((one - other).total(), (other - one).total())


def _text(value: Any, kind: Type) -> Any:  # noqa: ANN401 - of any type
    """Return a value of the log as Postgres reads it in JSON."""
    if isinstance(value, int) and kind.name == "date":
        return str(_DAY + timedelta(days=value))
    if isinstance(value, int) and kind.name == "timestamp":
        millis = 0 <= kind.modifier <= _MILLISECONDS
        return str(_TIME + timedelta(microseconds=value * (1000 if millis else 1)))
    return value
