"""Translate an expression, with its type in Postgres; refuse what has none of the same meaning.

Pure. The rules are in `logic`, `scalars`, `dates`, `texts`, `jsonb`, `aggregates`, `windows`. See
`jobs.views.translating`, which has the queries that these are in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, Protocol

from sqlglot import exp

from cdc.errors import ConfigError
from lockstep.jobs.views import aggregates, dates, jsonb, logic, scalars, texts, windows
from lockstep.jobs.views.refusing import unknown
from lockstep.jobs.views.types import BOOL, UNKNOWN
from lockstep.jobs.views.values import ColumnScope, Value, coerced, expect_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

_RULES: Final = (
    logic.RULES | scalars.RULES | dates.RULES | texts.RULES | jsonb.RULES | aggregates.RULES
    | windows.RULES
)  # fmt: skip
# Functions that sqlglot knows nothing of, by name.
_NAMED: Final[Mapping[str, Callable[..., Value]]] = jsonb.NAMED | dates.NAMED


def _is_never(_: Sequence[exp.Expr], /) -> bool:
    return False


class Queries(Protocol):
    """What translates queries: `jobs.views.translating.Translator`."""

    def query(self, node: exp.Expr, ctes: Any, outer: ColumnScope | None) -> Any:  # noqa: ANN401 - its own
        """Return the translation of a query."""
        ...


class Expressions:
    """Translates the expressions of one query."""

    def __init__(self, queries: Queries, ctes: Mapping[str, Any], scope: ColumnScope) -> None:
        self._queries, self._ctes, self.scope = queries, ctes, scope
        self.order_is_total: Callable[[Sequence[exp.Expr]], bool] = _is_never
        self.order_of_group_is_total: Callable[[Sequence[exp.Expr]], bool] = _is_never
        self.can_call = scope.outer is None

    def value(self, node: exp.Expr) -> Value:
        if isinstance(node, exp.Anonymous):
            return self._called(node)
        rule = _RULES.get(type(node))
        if rule is None:
            raise unknown(node)
        expect_parts(node, rule.parts)
        return rule.translate(self, node)

    def _called(self, node: exp.Anonymous) -> Value:
        function = _NAMED.get(node.name.lower())
        given = node.expressions
        if function is None or len(given) != len(signature(function).parameters) - 1:
            raise unknown(node)
        return function(self, *given)

    def condition(self, node: exp.Expr, where: str) -> str:
        found = self.value(node)
        if found.type.name not in {"bool", UNKNOWN}:
            raise ConfigError(f"{where} is of type {found.type.title}", hint="write a condition")
        return coerced(found, BOOL)

    def query(self, node: exp.Expr) -> Any:  # noqa: ANN401 - the translator's
        return self._queries.query(node, self._ctes, self.scope)
