"""Translate an expression, with its type in Postgres; refuse what has none of the same meaning.

Pure. The rules are in `logic`, `scalars` and `aggregates`, by kind of expression. See
`jobs.views.translating`, which has the queries that these are in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from sqlglot import exp

from cdc.errors import ConfigError
from lockstep.jobs.views import aggregates, jsonb, logic, scalars
from lockstep.jobs.views.refusing import SEE_THE_LIST, UnsupportedError
from lockstep.jobs.views.types import BOOL, UNKNOWN
from lockstep.jobs.views.values import Scope, Value, coerced

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_RULES: Final = logic.RULES | scalars.RULES | jsonb.RULES | aggregates.RULES
# Parts that change nothing, or that only say how it was written.
_HARMLESS: Final = {"typed", "safe", "big_int", "_type", "ignore_nulls", "over", "nested"}
_CLOCK: Final = "what depends on the time of the query"
_REFUSED: Final[dict[str, tuple[str, str]]] = {
    **dict.fromkeys(
        ("CurrentTimestamp", "CurrentDate", "CurrentTime", "Localtimestamp"),
        (_CLOCK, "compare with a column, or filter where the view is read"),
    ),
    "Rand": ("random()", "leave it out: a view's answer is always the same"),
    "ILike": ("ILIKE, which depends on the collation", "store the text as it is compared"),
    "Lower": ("lower(), which depends on the collation", "select the text as it is"),
    "Upper": ("upper(), which depends on the collation", "select the text as it is"),
    "RegexpLike": ("a regular expression, whose dialects differ", "write LIKE or ="),
    "ArrayAgg": ("array_agg(), whose order is not defined", "make a view with a row for each"),
    "GroupConcat": ("string_agg()", "make a view with a row for each"),
    **dict.fromkeys(
        ("JSONBPathExists", "MatchAgainst"), ("@? and @@", "compare members that ->> selects")
    ),
    "JSONBDeleteAtPath": ("#-", "select the members that are to be there"),
    "Bracket": ("a subscript", "write -> or ->> for a jsonb, and select an array as it is"),
    "Tuple": ("a comparison of rows", "compare the columns, with AND and OR"),
    "Any": ("ANY and SOME", "write IN or EXISTS"),
    "All": ("ALL", "write NOT EXISTS"),
}


class Queries(Protocol):
    """What translates queries: `jobs.views.translating.Translator`."""

    def query(self, node: exp.Expr, ctes: Any, outer: Scope | None) -> Any:  # noqa: ANN401 - its own
        """Return the translation of a query."""
        ...


class Expressions:
    """Translates the expressions of one query."""

    def __init__(self, queries: Queries, ctes: Mapping[str, Any], scope: Scope) -> None:
        self._queries, self._ctes, self.scope = queries, ctes, scope
        self.order_is_total: Callable[[Sequence[exp.Expr]], bool] = lambda _: False
        self.can_call = scope.outer is None

    def value(self, node: exp.Expr) -> Value:
        rule = _RULES.get(type(node))
        if rule is None:
            name = type(node).__name__
            called, is_call, _ = node.sql(dialect="postgres").partition("(")
            what = called if is_call and called.isidentifier() else node.key
            raise UnsupportedError(*_REFUSED.get(name, (what.upper(), SEE_THE_LIST)))
        for part, given in node.args.items():
            if given and part not in rule.parts and part not in _HARMLESS:
                raise UnsupportedError(f"{node.key.upper()} with {part}", "leave it out")
        return rule.translate(self, node)

    def condition(self, node: exp.Expr, where: str) -> str:
        found = self.value(node)
        if found.type.name not in {"bool", UNKNOWN}:
            raise ConfigError(f"{where} is of type {found.type.title}", hint="write a condition")
        return coerced(found, BOOL)

    def query(self, node: exp.Expr) -> Any:  # noqa: ANN401 - the translator's
        return self._queries.query(node, self._ctes, self.scope)
