"""Views in Python: the decorators, and what is required of what their functions return.

A decorated function can still be called, with Arrow tables or with lists of rows as dicts, without
Spark: it returns an Arrow table with the declared columns, or raises ConfigError where a follower
would halt.

Followers call it in executors, with `compute`: a transform with batches of rows, a view with all
rows that have some values of its columns `by`. There a part of each call is repeated with fewer
rows and in another order, because only a function that then returns the same can be maintained.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import traceback
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
from pyarrow import types as arrow

from cdc.errors import CDCError, ConfigError, NoAnswerError
from lockstep.jobs.views import types
from lockstep.sinks.delta.columns import arrow_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    Rows: TypeAlias = "pa.Table | Iterable[Mapping[str, Any]]"

# How many values of `by` a call is repeated with.
_REPEATED: Final = 20
_REPORT: Final = re.compile(r"lockstep view code: ([A-Za-z0-9+/=]+)\.")
_HINT: Final = "correct its code (a test can call it: docs/CODE.md), and start the follower again"
_INTEGER: Final = "a whole number"
_FLOAT: Final = "a number of floating point"
_DECIMAL: Final = "a decimal number"
_FAMILIES: Final[dict[str, Callable[[pa.DataType], bool]]] = {
    _INTEGER: arrow.is_integer,
    _FLOAT: arrow.is_floating,
    _DECIMAL: arrow.is_decimal,
    "true or false": arrow.is_boolean,
    "text": lambda kind: arrow.is_string(kind) or arrow.is_large_string(kind),
    "a date": arrow.is_date,
    "a timestamp": lambda kind: arrow.is_timestamp(kind) and kind.tz is None,
    "a timestamp with time zone": lambda kind: arrow.is_timestamp(kind) and kind.tz is not None,
    "nothing": arrow.is_null,
}
_WIDER: Final = {(_INTEGER, _DECIMAL), (_INTEGER, _FLOAT)}


class Code:
    """A decorated function."""

    def __init__(
        self, function: Callable[..., Rows], key: Sequence[str], columns: Mapping[str, str]
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._name, self._key = function, function.__name__, tuple(key)
        kinds = {name: types.named(text) for name, text in columns.items()}
        self._schema = pa.schema([(name, arrow_type(kind.delta)) for name, kind in kinds.items()])

    def __call__(self, *rows: Rows, **named: Rows) -> pa.Table:
        """Return the function's rows; raise ConfigError if they are not as declared."""
        given = {name: _table(each) for name, each in named.items()}
        found = self._typed(self._function(*map(_table, rows), **given))
        self._expect_key(found)
        return found

    def _typed(self, result: Rows) -> pa.Table:
        if isinstance(result, pa.Table):
            names = result.column_names
            if sorted(names) != sorted(self._schema.names):
                raise self._wrong(f"returned the columns {', '.join(names)}")
            made = [self._column(result[each.name], each) for each in self._schema]
            return pa.table(made, schema=self._schema)
        rows = list(result)
        for row in rows:
            if row.keys() != set(self._schema.names):
                raise self._wrong(f"returned a row with the columns {', '.join(row)}")
        return pa.table(
            [self._array([row[each.name] for row in rows], each) for each in self._schema],
            schema=self._schema,
        )

    def _column(self, values: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
        found, wanted = _family(values.type), _family(field.type)
        if found not in {wanted, "nothing"} and (found, wanted) not in _WIDER:
            raise self._wrong(f"returned {found} as {field.name}, which is {wanted}")
        try:
            if (found, wanted) == (_INTEGER, _DECIMAL):  # Arrow refuses types that could not fit
                values = values.cast(pa.decimal128(20, 0))
            return values.cast(field.type)
        except pa.ArrowException:
            raise self._misfit(field) from None  # its message has the value

    def _array(self, values: list[Any], field: pa.Field) -> pa.ChunkedArray:
        # Given a type, Arrow would make 1 of 1.5; without one, it refuses 1 next to Decimal("1.5").
        known = field.type if arrow.is_decimal(field.type) else None
        try:
            found = pa.chunked_array([pa.array(values, known)])
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            raise self._misfit(field) from None  # its message has the value
        return self._column(found, field)

    def _misfit(self, field: pa.Field) -> ConfigError:
        return self._wrong(f"returned a value as {field.name} that is no {field.type}")

    def _expect_key(self, found: pa.Table) -> None:
        for each in self._key:
            if found[each].null_count:
                raise self._wrong(f"returned a row without {each}")
        keys = found.select(self._key)
        if keys.group_by(list(self._key)).aggregate([]).num_rows != found.num_rows:
            raise self._wrong(f"returned several rows with one {', '.join(self._key)}")

    def _wrong(self, what: str) -> ConfigError:
        declared = ", ".join(self._schema.names)
        return ConfigError(
            f"view {self._name}: its code {what}",
            hint=f"it must return the columns {declared}, of their types, and one row for each key",
        )


def view(
    *,
    reads: Mapping[str, str],
    key: Sequence[str],
    columns: Mapping[str, str],
    by: Sequence[str] = (),
    refresh: str = "auto",
    freshness_seconds: float | None = None,
) -> Callable[[Callable[..., Rows]], Code]:
    """Declare a view whose rows the function makes of its tables' rows (docs/CODE.md).

    `reads` has a table, view or SELECT for each parameter. The rows that have one value of `by` are
    made of the rows with that value, in every table.
    """
    del reads, by, refresh, freshness_seconds  # the configuration has them
    return lambda function: Code(function, key, columns)


def transform(
    *,
    reads: str,
    key: Sequence[str],
    columns: Mapping[str, str],
    by: Sequence[str] = (),
    refresh: str = "auto",
    freshness_seconds: float | None = None,
) -> Callable[[Callable[..., Rows]], Code]:
    """Declare a view whose rows the function makes of each row of a table (docs/CODE.md).

    It is called with batches of them. `by` identifies a row that it reads: the table's key.
    """
    del reads, by, refresh, freshness_seconds  # the configuration has them
    return lambda function: Code(function, key, columns)


# --- in followers ---


class Task(NamedTuple):
    """What an executor calls."""

    view: str
    source: str
    parameters: tuple[str, ...]
    by: tuple[str, ...]
    is_transform: bool


@functools.lru_cache(maxsize=64)
def loaded(view_name: str, source: str) -> Code:
    """Run a view's file; return its function, or raise ConfigError."""
    names: dict[str, Any] = {"__name__": f"views.{view_name}"}
    try:
        exec(compile(source, _file(view_name), "exec"), names)  # noqa: S102 - of the configuration's own folder
    except CDCError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(view_name, error) from error
    found = names.get(view_name)
    if not isinstance(found, Code):
        raise ConfigError(
            f"view {view_name}: {_file(view_name)} has no function of that name any more",
            hint="do not assign its name again",
        )
    return found


def compute(task: Task, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield what the view's function returns; runs in an executor.

    A transform's batches are rows. Those of a view have one struct for each parameter, all NULL but
    one. What a CDCError says is in the error that Spark raises: `reported` finds it.
    """
    try:
        code = loaded(task.view, task.source)
        if task.is_transform:
            for batch in batches:
                found = _called(task, code, {task.parameters[0]: pa.Table.from_batches([batch])})
                yield from found.to_batches()
        elif every := list(batches):
            rows = pa.Table.from_batches(every)
            given = {name: _of_struct(rows[at]) for at, name in enumerate(task.parameters)}
            yield from _called(task, code, given).to_batches()
    except CDCError as error:
        text = base64.b64encode(json.dumps([error.what, error.hint]).encode()).decode()
        # Without what it was raised from: that could quote values of rows.
        raise RuntimeError(f"lockstep view code: {text}.") from None


def reported(error: Exception) -> NoAnswerError | None:
    """Return what `compute` has raised in an executor, if Spark's error is because of that."""
    found = _REPORT.search(str(error))
    if found is None:
        return None
    what, hint = json.loads(base64.b64decode(found[1]))
    return NoAnswerError(what, hint=hint)


def _called(task: Task, code: Code, given: Mapping[str, pa.Table]) -> pa.Table:
    """Return the function's rows for these; raise ConfigError if it fails, or is not pure."""
    try:
        found = code(**given)
        _expect_own(task, given, found)
        _expect_same(task, code, given, found)
    except CDCError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(task.view, error, _culprit(task, code, given)) from error
    return found


def _expect_own(task: Task, given: Mapping[str, pa.Table], found: pa.Table) -> None:
    """Raise ConfigError for a row with values of `by` that no row had."""
    had = {value for each in given.values() for value in _values(each, task.by)}
    if task.by and not had.issuperset(_values(found, task.by)):
        raise ConfigError(
            f"view {task.view}: its code returned a row with a {', '.join(task.by)} that no row has"
            " that it was given",
            hint="return the columns of `by` unchanged; a view without `by` is computed completely",
        )


def _expect_same(task: Task, code: Code, given: Mapping[str, pa.Table], found: pa.Table) -> None:
    """Raise ConfigError if fewer rows, in another order, make other rows."""
    some = [value for each in given.values() for value in _values(each, task.by)]
    chosen = set(list(dict.fromkeys(some))[:_REPEATED])
    again = code(**{name: _among(each, task.by, chosen)[::-1] for name, each in given.items()})
    if Counter(map(repr, _tuples(again))) != Counter(
        map(repr, _tuples(_among(found, task.by, chosen)))
    ):
        raise ConfigError(
            f"view {task.view}: its code returned other rows when it was called again with"
            f" {'some of the same rows' if task.by else 'the same rows'} in another order",
            hint="it must depend on nothing but its rows: no clock, no random number, no order, no"
            " state" + (f", and no rows with another {', '.join(task.by)}" if task.by else ""),
        )


def _culprit(task: Task, code: Code, given: Mapping[str, pa.Table]) -> tuple[Any, ...] | None:
    """Return the values of `by` that the function fails with, if it fails with those alone."""

    def fails(values: Sequence[tuple[Any, ...]]) -> bool:
        try:
            code(**{name: _among(each, task.by, set(values)) for name, each in given.items()})
        except (Exception, SystemExit):  # noqa: BLE001 - of the user's code
            return True
        return False

    left = list(dict.fromkeys(v for each in given.values() for v in _values(each, task.by)))
    if not task.by:
        return None
    while len(left) > 1:
        half = left[: len(left) // 2]
        left = half if fails(half) else left[len(half) :]
    return left[0] if left and fails(left) else None


def _failed(name: str, error: BaseException, values: tuple[Any, ...] | None = None) -> ConfigError:
    """Return what is known of an error of the user's code, without its message and the row."""
    places = [
        each for each in traceback.extract_tb(error.__traceback__) if each.filename == _file(name)
    ]
    line = places[-1].lineno if places else getattr(error, "lineno", None)
    what = f"view {name}: its code raised {type(error).__name__} in {_file(name)}"
    what += f", line {line}" if line else ""
    if isinstance(error, ImportError) and error.name:
        what += f" (no module {error.name})"
    if values is None:
        return ConfigError(what, hint=_HINT)
    text = ",".join(str(each) for each in values if each is not None)  # as concat_ws does
    digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    return ConfigError(f"{what}, for the rows whose `by` has the MD5 {digest}", hint=_HINT)


def _file(view_name: str) -> str:
    return f"{view_name}.py"


def _table(rows: Rows) -> pa.Table:
    return rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows))


def _of_struct(rows: pa.ChunkedArray) -> pa.Table:
    chunks = [each.filter(each.is_valid()) for each in rows.chunks]
    return pa.Table.from_batches([pa.RecordBatch.from_struct_array(each) for each in chunks])


def _values(rows: pa.Table, names: Sequence[str]) -> list[tuple[Any, ...]]:
    return _tuples(rows.select(list(names)))


def _tuples(rows: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(each.to_pylist() for each in rows.columns), strict=True))


def _among(rows: pa.Table, names: Sequence[str], wanted: set[tuple[Any, ...]]) -> pa.Table:
    """Return the rows with these values of the columns; all rows if there are no columns."""
    if not names:
        return rows
    return rows.filter(pa.array([each in wanted for each in _values(rows, names)], pa.bool_()))


def _family(kind: pa.DataType) -> str:
    return next((name for name, holds in _FAMILIES.items() if holds(kind)), str(kind))
