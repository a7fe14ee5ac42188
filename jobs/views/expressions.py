"""Translate an expression, with its type in Postgres; refuse what has none of the same meaning.

Pure. See `jobs.views.translating`, which has the queries that these are in.
"""

from __future__ import annotations

import re
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from sqlglot import exp

from cdc.errors import ConfigError
from lockstep.jobs.views import types
from lockstep.jobs.views.refusing import UnsupportedError
from lockstep.jobs.views.types import (
    BOOL,
    COMPARED,
    DATE,
    FLOAT8,
    FLOATS,
    INT4,
    INT8,
    INTEGERS,
    NULL,
    TEXT,
    TEXTS,
    UNKNOWN,
    Type,
    numeric,
)
from lockstep.sinks.delta.types import MAX_PRECISION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# The parts of an expression that its rule reads; one with anything else is refused.
_COMPARISONS: Final = {
    exp.EQ: "=", exp.NEQ: "<>", exp.LT: "<", exp.LTE: "<=", exp.GT: ">", exp.GTE: ">=",
    exp.NullSafeEQ: "<=>", exp.NullSafeNEQ: "<=>",
}  # fmt: skip
_UNORDERED: Final = (exp.EQ, exp.NEQ, exp.NullSafeEQ, exp.NullSafeNEQ)
_ARITHMETIC: Final = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/", exp.Mod: "%"}
_RANKS: Final = {exp.RowNumber: "row_number", exp.Rank: "rank", exp.DenseRank: "dense_rank"}
_PARTS_OF_DATES: Final = {"year", "month", "day", "hour", "minute"}
_TRUNCATED_TO: Final = {"year", "quarter", "month", "week", "day", "hour", "minute", "second"}
_TYPES: Final = {
    "BOOLEAN": "bool", "SMALLINT": "int2", "INT": "int4", "BIGINT": "int8", "FLOAT": "float4",
    "DOUBLE": "float8", "TEXT": "text", "VARCHAR": "varchar", "DATE": "date", "UUID": "uuid",
    "TIMESTAMP": "timestamp", "TIMESTAMPTZ": "timestamptz", "DECIMAL": "numeric",
}  # fmt: skip
_HARMLESS: Final = {"typed", "safe", "big_int", "_type", "ignore_nulls", "over", "nested"}
_CLOCK: Final = "what depends on the time of the query"
_REFUSED: Final[dict[str, tuple[str, str]]] = {
    **dict.fromkeys(("CurrentTimestamp", "CurrentDate", "CurrentTime", "Localtimestamp"), (_CLOCK, "compare with a column, or filter where the view is read")),
    "Rand": ("random()", "leave it out: a view's answer is always the same"),
    "Avg": (
        "avg(), whose scale Postgres chooses by the values",
        "select sum(…) and count(…), and divide where the view is read",
    ),
    "ILike": ("ILIKE, which depends on the collation", "store the text as it is compared"),
    "Lower": ("lower(), which depends on the collation", "select the text as it is"),
    "Upper": ("upper(), which depends on the collation", "select the text as it is"),
    "RegexpLike": ("a regular expression, whose dialects differ", "write LIKE or ="),
    "ArrayAgg": ("array_agg(), whose order is not defined", "make a view with a row for each"),
    "GroupConcat": ("string_agg()", "make a view with a row for each"),
    "Tuple": ("a comparison of rows", "compare the columns, with AND and OR"),
    "Any": ("ANY and SOME", "write IN or EXISTS"),
    "All": ("ALL", "write NOT EXISTS"),
}


class Scope:
    """The columns that the expressions of a query may name."""

    def __init__(self, sources: dict[str, dict[str, Type]], outer: Scope | None = None) -> None:
        self.sources, self.outer = sources, outer
        self.keys: dict[str, frozenset[str] | None] = {}

    def add(self, alias: str, columns: dict[str, Type], key: frozenset[str] | None) -> None:
        """Add a table or a subquery; `key`: columns that are unique in it."""
        self.sources[alias], self.keys[alias] = columns, key

    def type_of(self, column: exp.Column) -> Type:
        """Return a column's type."""
        if (found := self.sources.get(column.table)) is not None:
            if column.name not in found:
                raise ConfigError(
                    f"there is no column {column.table}.{column.name}", hint="correct its name"
                )
            return found[column.name]
        if self.outer is None:
            raise ConfigError(
                f"there is no table {column.table or column.name} here", hint="correct its name"
            )
        return self.outer.type_of(column)


class Value(NamedTuple):
    """An expression in Spark's SQL, with its type in Postgres."""

    sql: str
    type: Type
    text: str | None = None  # of a quoted literal


class Queries(Protocol):
    """What translates queries: `jobs.views.translating.Translator`."""

    def query(self, node: exp.Expr, ctes: Any, outer: Scope | None) -> Any:  # noqa: ANN401 - its own
        """Return the translation of a query."""
        ...


class Expressions:
    """The rules, in one query's scope."""

    def __init__(self, queries: Queries, ctes: Mapping[str, Any], scope: Scope) -> None:
        self._queries, self._ctes, self._scope = queries, ctes, scope
        # Whether an ORDER BY, in these partitions, leaves no two rows in either order.
        self.order_is_total: Callable[[Sequence[exp.Expr]], bool] = lambda _: False

    def value(self, node: exp.Expr) -> Value:
        """Return an expression's translation."""
        rule = _RULES.get(type(node))
        if rule is None:
            name = type(node).__name__
            what = node.name if isinstance(node, exp.Anonymous) else node.key
            raise UnsupportedError(
                *_REFUSED.get(name, (f"{what.upper()}", "docs/VIEWS.md lists what a view can have"))
            )
        parts, do = rule
        for part, given in node.args.items():
            if given and part not in parts and part not in _HARMLESS:
                raise UnsupportedError(f"{node.key.upper()} with {part}", "leave it out")
        return do(self, node)

    def condition(self, node: exp.Expr, where: str) -> str:
        """Return a condition's text."""
        found = self.value(node)
        if found.type.name not in {"bool", UNKNOWN}:
            raise ConfigError(f"{where} is of type {found.type.title}", hint="write a condition")
        return self.coerced(found, BOOL)

    def coerced(self, value: Value, wanted: Type) -> str:
        """Return the text of a value as that type; a quoted literal is read as Postgres does."""
        if value.type.name == UNKNOWN:
            if value.text is None:
                return f"CAST(NULL AS {wanted.spark})"
            return _literal(value.text, wanted)
        return (
            value.sql
            if value.type.spark == wanted.spark
            else f"CAST({value.sql} AS {wanted.spark})"
        )

    def common(self, given: Sequence[Type], where: str) -> Type:
        """Return the type that Postgres gives to values of these types together."""
        known = [each for each in given if each.name != UNKNOWN]
        if not known:
            return TEXT
        found = known[0]
        for each in known[1:]:
            found = _common(found, each, where)
        return found

    def expect_grouped(self, kind: Type, where: str) -> None:
        """Raise unless equal values of the type are one value in both."""
        if kind.name in FLOATS:
            raise UnsupportedError(
                f"{where} of {kind.title}, where 0 and -0 are equal", "cast it to numeric(p,s)"
            )
        _expect_compared(kind, where)

    # --- values ---

    def _column(self, node: exp.Column) -> Value:
        found = self._scope.type_of(node)
        if found.mask not in {None, "hmac", "truncate"}:
            raise UnsupportedError(
                f"{node.sql()}, whose values are masked ({found.mask})", "leave it out"
            )
        return Value(f"{quoted(node.table)}.{quoted(node.name)}", found)

    def _number(self, node: exp.Literal) -> Value:
        if node.is_string:
            return Value("", NULL, node.this)
        text = node.this
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
            raise UnsupportedError(f"the number {text}", "write its digits")
        integer, _, fraction = text.partition(".")
        if not fraction and int(text) < 1 << 31:
            return Value(text, INT4)
        if not fraction and int(text) < 1 << 63:
            return Value(f"{text}L", INT8)
        kind = _sized(len(integer.lstrip("0")) + len(fraction), len(fraction), text)
        return Value(f"CAST('{text}' AS {kind.spark})", kind)

    def _null(self, _: exp.Null) -> Value:
        return Value("NULL", NULL)

    def _boolean(self, node: exp.Boolean) -> Value:
        return Value("true" if node.this else "false", BOOL)

    def _paren(self, node: exp.Paren) -> Value:
        return self.value(node.this)

    # --- logic ---

    def _connector(self, node: exp.Expr) -> Value:
        word = "AND" if isinstance(node, exp.And) else "OR"
        sides = (self.condition(each, word) for each in (node.this, node.expression))
        return Value(f"({f' {word} '.join(sides)})", BOOL)

    def _not(self, node: exp.Not) -> Value:
        return Value(f"(NOT {self.condition(node.this, 'NOT')})", BOOL)

    def _is(self, node: exp.Is) -> Value:
        word = "IS NOT" if node.args.get("negate") else "IS"
        if isinstance(node.expression, exp.Null):
            found = self.value(node.this)
            return Value(f"({self.coerced(found, _own(found))} {word} NULL)", BOOL)
        if not isinstance(node.expression, exp.Boolean):
            raise UnsupportedError("IS with this operand", "write IS NULL, IS TRUE or IS FALSE")
        is_ = "TRUE" if node.expression.this else "FALSE"
        return Value(f"({self.condition(node.this, 'IS')} {word} {is_})", BOOL)

    def _comparison(self, node: exp.Expr) -> Value:
        sides = [self.value(node.this), self.value(node.expression)]
        word = _COMPARISONS[type(node)]
        left, right = self._compared(sides, word, ordered=not isinstance(node, _UNORDERED))
        text = f"({left} {word} {right})"
        return Value(f"(NOT {text})" if isinstance(node, exp.NullSafeNEQ) else text, BOOL)

    def _compared(self, given: Sequence[Value], where: str, *, ordered: bool) -> list[str]:
        """Return the texts of values that are compared, as one type."""
        kinds = [each.type for each in given]
        kind = self.common(kinds, where)
        _expect_compared(kind, where)
        for each in kinds:
            if each.name != UNKNOWN:
                _expect_compared(each, where)
        if ordered:
            _expect_ordered(kind, where)
        return [self.coerced(each, kind) for each in given]

    def _between(self, node: exp.Between) -> Value:
        given = [self.value(node.args[part]) for part in ("this", "low", "high")]
        value, low, high = self._compared(given, "BETWEEN", ordered=True)
        return Value(f"({value} BETWEEN {low} AND {high})", BOOL)

    def _in(self, node: exp.In) -> Value:
        if query := node.args.get("query"):
            found = self._queries.query(query, self._ctes, self._scope)
            ((name, type_),) = found.columns.items()
            inner = Value(f"i.{quoted(name)}", type_)
            value, column = self._compared([self.value(node.this), inner], "IN", ordered=False)
            return Value(f"({value} IN (SELECT {column} FROM ({found.sql}) AS i))", BOOL)
        given = [self.value(each) for each in (node.this, *node.expressions)]
        value, *among = self._compared(given, "IN", ordered=False)
        return Value(f"({value} IN ({', '.join(among)}))", BOOL)

    def _exists(self, node: exp.Exists) -> Value:
        found = self._queries.query(node.this, self._ctes, self._scope)
        return Value(f"EXISTS ({found.sql})", BOOL)

    def _scalar(self, node: exp.Subquery) -> Value:
        found = self._queries.query(node, self._ctes, self._scope)
        if len(found.columns) != 1:
            raise ConfigError("a subquery has several columns", hint="select one")
        return Value(f"({found.sql})", next(iter(found.columns.values())))

    def _like(self, node: exp.Like) -> Value:
        value, pattern = self.value(node.this), self.value(node.expression)
        if pattern.text is None or "\\" in pattern.text:
            raise UnsupportedError(
                "LIKE with a pattern that is not a plain literal", "write it without backslashes"
            )
        _expect_text(value.type, "LIKE")
        return Value(f"({self.coerced(value, TEXT)} LIKE {string(pattern.text)})", BOOL)

    # --- choices ---

    def _case(self, node: exp.Case) -> Value:
        default = node.args.get("default")
        made = [self.value(each.args["true"]) for each in node.args["ifs"]]
        last = self.value(default) if default else Value("NULL", NULL)
        kind = self.common([*(each.type for each in made), last.type], "CASE")
        tests = []
        for each in node.args["ifs"]:
            test = exp.EQ(this=node.this.copy(), expression=each.this) if node.this else each.this
            tests.append(self.condition(test, "CASE"))
        text = " ".join(
            f"WHEN {test} THEN {self.coerced(value, kind)}"
            for test, value in zip(tests, made, strict=True)
        )
        return Value(f"CASE {text} ELSE {self.coerced(last, kind)} END", kind)

    def _coalesce(self, node: exp.Coalesce) -> Value:
        given = [self.value(each) for each in (node.this, *node.expressions)]
        kind = self.common([each.type for each in given], "coalesce()")
        return Value(f"coalesce({', '.join(self.coerced(each, kind) for each in given)})", kind)

    def _extreme(self, node: exp.Greatest | exp.Least) -> Value:
        given = [self.value(each) for each in (node.this, *node.expressions)]
        texts = self._compared(given, f"{node.key}()", ordered=True)
        kind = self.common([each.type for each in given], "")
        return Value(f"{node.key}({', '.join(texts)})", kind)

    def _nullif(self, node: exp.Nullif) -> Value:
        given = [self.value(node.this), self.value(node.expression)]
        left, right = self._compared(given, "nullif()", ordered=False)
        kind = _own(given[0])
        return Value(f"if({left} = {right}, NULL, {self.coerced(given[0], kind)})", kind)

    # --- numbers and dates ---

    def _arithmetic(self, node: exp.Expr) -> Value:
        sign = _ARITHMETIC[type(node)]
        left, right = self.value(node.this), self.value(node.expression)
        if left.type.name == "date" or right.type.name == "date":
            return self._days(sign, left, right)
        sides = [each if each.type.name != UNKNOWN else None for each in (left, right)]
        given = next((each.type for each in sides if each), None)
        if given is None:
            raise UnsupportedError("arithmetic with quoted literals", "write numbers")
        left, right = (
            Value(self.coerced(each, given), given) if each.type.name == UNKNOWN else each
            for each in (left, right)
        )
        kind = _result(sign, left.type, right.type)
        if kind.name in INTEGERS:
            one, other = (self.coerced(each, kind) for each in (left, right))
            word = "div" if sign == "/" else sign
            text = f"({one} {word} {other})"
            return Value(f"CAST({text} AS {kind.spark})" if sign == "/" else text, kind)
        if kind.name in FLOATS:
            one, other = (self.coerced(each, kind) for each in (left, right))
            return Value(f"({one} {sign} {other})", kind)
        one, other = (self.coerced(each, _as_numeric(each.type)) for each in (left, right))
        return Value(f"CAST(({one} {sign} {other}) AS {kind.spark})", kind)

    def _days(self, sign: str, left: Value, right: Value) -> Value:
        names = left.type.name, sign, right.type.name
        match names:
            case ("date", "-", "date"):
                return Value(f"datediff({left.sql}, {right.sql})", INT4)
            case ("date", "+" | "-", "int2" | "int4"):
                word = "date_add" if sign == "+" else "date_sub"
                return Value(f"{word}({left.sql}, {right.sql})", DATE)
            case ("int2" | "int4", "+", "date"):
                return Value(f"date_add({right.sql}, {left.sql})", DATE)
        raise UnsupportedError(
            f"{left.type.title} {sign} {right.type.title}", "add days, as integers, to dates"
        )

    def _neg(self, node: exp.Neg) -> Value:
        found = self.value(node.this)
        _expect_number(found.type, "-")
        return Value(f"(- {found.sql})", found.type)

    def _abs(self, node: exp.Abs) -> Value:
        found = self.value(node.this)
        _expect_number(found.type, "abs()")
        return Value(f"abs({found.sql})", found.type)

    def _round(self, node: exp.Round) -> Value:
        found, digits = self.value(node.this), node.args.get("decimals")
        size = found.type.size
        if size is None or found.type.name != "numeric":
            raise UnsupportedError(
                f"round() of {found.type.title}", "round a numeric(p,s): cast to it"
            )
        if digits is not None and not (isinstance(digits, exp.Literal) and digits.is_int):
            raise UnsupportedError("round() to a number of digits that is no literal", "write it")
        scale = int(digits.this) if digits is not None else 0
        precision, old = size
        kind = _sized(max(precision - old + 1, 1) + scale, scale, "round()")
        return Value(f"CAST(round({found.sql}, {scale}) AS {kind.spark})", kind)

    def _whole(self, node: exp.Ceil | exp.Floor) -> Value:
        found = self.value(node.this)
        if found.type.name != "numeric" or found.type.size is None:
            raise UnsupportedError(f"{node.key}() of {found.type.title}", "cast to numeric(p,s)")
        precision, scale = found.type.size
        kind = _sized(precision - scale + 1, 0, node.key)
        return Value(f"CAST({node.key}({found.sql}) AS {kind.spark})", kind)

    def _extract(self, node: exp.Extract) -> Value:
        part, found = node.name.lower(), self.value(node.expression)
        if found.type.name not in {"date", "timestamp"} or part not in _PARTS_OF_DATES:
            raise UnsupportedError(
                f"extract({part} from {found.type.title})",
                f"take {', '.join(sorted(_PARTS_OF_DATES))} of a date or timestamp",
            )
        kind = numeric(10, 0)
        if found.type.name == "date" and part in {"hour", "minute"}:
            raise UnsupportedError(f"extract({part} from date)", "take it of a timestamp")
        return Value(f"CAST(extract({part} FROM {found.sql}) AS {kind.spark})", kind)

    def _truncated(self, node: exp.TimestampTrunc) -> Value:
        found, unit = self.value(node.this), node.args["unit"].name.lower()
        if found.type.name != "timestamp" or unit not in _TRUNCATED_TO:
            raise UnsupportedError(
                f"date_trunc('{unit}', {found.type.title})",
                f"take {', '.join(sorted(_TRUNCATED_TO))} of a timestamp without time zone",
            )
        text = f"CAST({found.sql} AS timestamp)"
        return Value(f"CAST(date_trunc('{unit}', {text}) AS timestamp_ntz)", found.type)

    def _zone(self, node: exp.AtTimeZone) -> Value:
        found, zone = self.value(node.this), self.value(node.args["zone"])
        if found.type.name != "timestamptz" or zone.text != "UTC":
            raise UnsupportedError(
                f"{found.type.title} AT TIME ZONE", "write timestamptz AT TIME ZONE 'UTC'"
            )
        return Value(f"CAST({found.sql} AS timestamp_ntz)", Type("timestamp"))

    # --- texts ---

    def _concatenated(self, node: exp.DPipe) -> Value:
        given = [self.value(node.this), self.value(node.expression)]
        for each in given:
            if each.type.name != UNKNOWN:
                _expect_text(each.type, "||")
        return Value(f"({' || '.join(self.coerced(each, TEXT) for each in given)})", TEXT)

    def _length(self, node: exp.Length) -> Value:
        found = self.value(node.this)
        _expect_text(found.type, "length()")
        return Value(f"length({found.sql})", INT4)

    def _trim(self, node: exp.Trim) -> Value:
        found = self.value(node.this)
        _expect_text(found.type, "trim()")
        return Value(f"trim({found.sql})", TEXT)

    def _replace(self, node: exp.Replace) -> Value:
        value, old, new = (self.value(node.args[p]) for p in ("this", "expression", "replacement"))
        _expect_text(value.type, "replace()")
        if not old.text or new.text is None:
            raise UnsupportedError("replace() of other than literals", "write both texts")
        return Value(f"replace({value.sql}, {string(old.text)}, {string(new.text)})", TEXT)

    def _substring(self, node: exp.Substring) -> Value:
        found = self.value(node.this)
        _expect_text(found.type, "substring()")
        start, length = node.args.get("start"), node.args.get("length")
        for each in (start, length):
            if each is not None and not (isinstance(each, exp.Literal) and each.is_int):
                raise UnsupportedError("substring() with other than numbers", "write numbers")
        if start is None or int(start.this) < 1:
            raise UnsupportedError("substring() without a start of 1 or more", "write one")
        given = [start.this, *([length.this] if length is not None else [])]
        return Value(f"substring({found.sql}, {', '.join(given)})", TEXT)

    def _left(self, node: exp.Left) -> Value:
        found, length = self.value(node.this), node.expression
        _expect_text(found.type, "left()")
        if not (isinstance(length, exp.Literal) and length.is_int):
            raise UnsupportedError("left() with other than a number", "write 0 or more")
        return Value(f"left({found.sql}, {length.this})", TEXT)

    def _collate(self, node: exp.Collate) -> Value:
        found = self.value(node.this)
        _expect_text(found.type, "COLLATE")
        if node.expression.name != "C":
            raise UnsupportedError(f"COLLATE {node.expression.name}", 'write COLLATE "C"')
        return found._replace(type=found.type._replace(is_c=True))

    # --- casts ---

    def _cast(self, node: exp.Cast) -> Value:
        found, wanted = self.value(node.this), _named(node.to)
        if found.type.name == UNKNOWN:
            kind = wanted
            if kind.name == "numeric" and kind.size is None:
                raise UnsupportedError("a cast to numeric", "write numeric(p,s)")
            return Value(self.coerced(found, kind), kind)
        return _converted(found, wanted)

    # --- aggregates and windows ---

    def _count(self, node: exp.Count) -> Value:
        inner = node.this
        if isinstance(inner, exp.Star):
            return Value("count(*)", INT8)
        if isinstance(inner, exp.Distinct):
            if len(inner.expressions) != 1:
                raise UnsupportedError("count(DISTINCT …) of several", "count one expression")
            found = self.value(inner.expressions[0])
            self.expect_grouped(found.type, "count(DISTINCT …)")
            return Value(f"count(DISTINCT {found.sql})", INT8)
        found = self.value(inner)
        return Value(f"count({self.coerced(found, _own(found))})", INT8)

    def _sum(self, node: exp.Sum) -> Value:
        word, inner = _distinct(node.this)
        found = self.value(inner)
        if found.type.name in FLOATS:
            raise UnsupportedError(
                f"sum() of {found.type.title}, which depends on the order of the rows",
                "cast to numeric(p,s)",
            )
        _expect_number(found.type, "sum()")
        if found.type.name in {"int2", "int4"}:
            return Value(f"sum({word}{found.sql})", INT8)
        size = found.type.size
        assert size is not None, "it is a number"
        wide = numeric(MAX_PRECISION, size[1], has_scale=found.type.has_scale)
        # Wide enough before the sum: Spark would add only ten digits.
        return Value(f"CAST(sum({word}{self.coerced(found, wide)}) AS {wide.spark})", wide)

    def _min_max(self, node: exp.Min | exp.Max) -> Value:
        _, inner = _distinct(node.this)
        found = self.value(inner)
        _expect_ordered(found.type, f"{node.key}()")
        if found.type.name in {"bool", "uuid"}:
            raise UnsupportedError(f"{node.key}() of {found.type.title}", "Postgres has none")
        return Value(f"{node.key}({found.sql})", found.type)

    def _all_any(self, node: exp.LogicalAnd | exp.LogicalOr) -> Value:
        word = "bool_and" if isinstance(node, exp.LogicalAnd) else "bool_or"
        return Value(f"{word}({self.condition(node.this, word)})", BOOL)

    def _filter(self, node: exp.Filter) -> Value:
        found, test = self.value(node.this), self.condition(node.expression.this, "FILTER")
        clause = f" FILTER (WHERE {test})"
        if found.sql.startswith("CAST(sum("):
            cast, inner = found.type.spark, found.sql[len("CAST(") :]
            inner = inner.removesuffix(f" AS {cast})")
            return Value(f"CAST({inner}{clause} AS {cast})", found.type)
        return Value(f"{found.sql}{clause}", found.type)

    def _rank(self, node: exp.Expr) -> Value:
        raise UnsupportedError(f"{_RANKS[type(node)]}() without OVER", "write OVER (…)")

    def _window(self, node: exp.Window) -> Value:
        by = [self.value(each) for each in node.args.get("partition_by") or ()]
        for each in by:
            self.expect_grouped(each.type, "PARTITION BY")
        order = node.args.get("order")
        ordered = order.expressions if order else []
        over = [f"PARTITION BY {', '.join(each.sql for each in by)}"] if by else []
        if ordered:
            over.append(f"ORDER BY {', '.join(map(self._ordered, ordered))}")
        over_sql = f"OVER ({' '.join(over)})"
        if name := _RANKS.get(type(node.this)):
            whole = [*(node.args.get("partition_by") or ()), *(each.this for each in ordered)]
            if name == "row_number" and not self.order_is_total(whole):
                raise UnsupportedError(
                    "row_number() whose ORDER BY may leave rows in any order",
                    "add the key of each joined table to ORDER BY, or write rank()",
                )
            if not ordered and name != "row_number":
                raise UnsupportedError(f"{name}() without ORDER BY", "write it")
            return Value(f"{name}() {over_sql}", INT8)
        inner = node.this.this if isinstance(node.this, exp.Filter) else node.this
        if not isinstance(inner, exp.Count | exp.Sum | exp.Min | exp.Max) or inner.find(
            exp.Distinct
        ):
            raise UnsupportedError(
                f"the window function {inner.key}()",
                "take row_number, rank, dense_rank, count, sum, min or max",
            )
        found = self.value(node.this)
        if found.sql.startswith("CAST(sum("):
            text = found.sql[len("CAST(") :].removesuffix(f" AS {found.type.spark})")
            return Value(f"CAST({text} {over_sql} AS {found.type.spark})", found.type)
        return Value(f"{found.sql} {over_sql}", found.type)

    def _ordered(self, node: exp.Ordered) -> str:
        found = self.value(node.this)
        _expect_ordered(found.type, "ORDER BY")
        way = "DESC" if node.args.get("desc") else "ASC"
        nulls = "FIRST" if node.args.get("nulls_first") else "LAST"
        return f"{found.sql} {way} NULLS {nulls}"


def _distinct(node: exp.Expr) -> tuple[str, exp.Expr]:
    if isinstance(node, exp.Distinct):
        return "DISTINCT ", node.expressions[0]
    return "", node


_E: Final = Expressions
_TWO: Final = {"this", "expression"}
_RULES: Final[dict[type[exp.Expr], tuple[set[str], Callable[[Expressions, Any], Value]]]] = {
    exp.Column: ({"this", "table"}, _E._column),  # noqa: SLF001 - the rules are its own
}


def _register() -> None:
    rules: list[tuple[set[str], Any, tuple[type[exp.Expr], ...]]] = [
        ({"this", "is_string"}, _E._number, (exp.Literal,)),
        (set(), _E._null, (exp.Null,)),
        ({"this"}, _E._boolean, (exp.Boolean,)),
        ({"this"}, _E._paren, (exp.Paren,)),
        (_TWO, _E._connector, (exp.And, exp.Or)),
        ({"this"}, _E._not, (exp.Not,)),
        ({*_TWO, "negate"}, _E._is, (exp.Is,)),
        (_TWO, _E._comparison, tuple(_COMPARISONS)),
        ({"this", "low", "high"}, _E._between, (exp.Between,)),
        ({"this", "query", "expressions"}, _E._in, (exp.In,)),
        ({"this"}, _E._exists, (exp.Exists,)),
        ({"this"}, _E._scalar, (exp.Subquery,)),
        (_TWO, _E._like, (exp.Like,)),
        ({"this", "ifs", "default"}, _E._case, (exp.Case,)),
        ({"this", "expressions"}, _E._coalesce, (exp.Coalesce,)),
        ({"this", "expressions"}, _E._extreme, (exp.Greatest, exp.Least)),
        (_TWO, _E._nullif, (exp.Nullif,)),
        (_TWO, _E._arithmetic, tuple(_ARITHMETIC)),
        ({"this"}, _E._neg, (exp.Neg,)),
        ({"this"}, _E._abs, (exp.Abs,)),
        ({"this", "decimals"}, _E._round, (exp.Round,)),
        ({"this"}, _E._whole, (exp.Ceil, exp.Floor)),
        (_TWO, _E._extract, (exp.Extract,)),
        ({"this", "unit"}, _E._truncated, (exp.TimestampTrunc,)),
        ({"this", "zone"}, _E._zone, (exp.AtTimeZone,)),
        (_TWO, _E._concatenated, (exp.DPipe,)),
        ({"this"}, _E._length, (exp.Length,)),
        ({"this"}, _E._trim, (exp.Trim,)),
        ({*_TWO, "replacement"}, _E._replace, (exp.Replace,)),
        ({"this", "start", "length"}, _E._substring, (exp.Substring,)),
        (_TWO, _E._left, (exp.Left,)),
        (_TWO, _E._collate, (exp.Collate,)),
        ({"this", "to"}, _E._cast, (exp.Cast,)),
        ({"this"}, _E._count, (exp.Count,)),
        ({"this"}, _E._sum, (exp.Sum,)),
        ({"this"}, _E._min_max, (exp.Min, exp.Max)),
        ({"this"}, _E._all_any, (exp.LogicalAnd, exp.LogicalOr)),
        (_TWO, _E._filter, (exp.Filter,)),
        (set(), _E._rank, tuple(_RANKS)),
        ({"this", "partition_by", "order"}, _E._window, (exp.Window,)),
    ]
    for parts, do, nodes in rules:
        for node in nodes:
            _RULES[node] = parts, do


_register()


# --- types ---


def _own(value: Value) -> Type:
    """Return a value's type; text if it is a quoted literal."""
    return TEXT if value.type.name == UNKNOWN else value.type


def _common(one: Type, other: Type, where: str) -> Type:
    names = {one.name, other.name}
    if one.mask or other.mask:
        if one.mask and other.mask:
            return one
        raise UnsupportedError(f"a masked column with another value in {where}", "leave it out")
    if one.name == other.name and one.name != "numeric":
        kind = one if one.modifier == other.modifier else one._replace(modifier=-1)
        return kind._replace(is_c=one.is_c or other.is_c)
    if names <= TEXTS:
        return TEXT._replace(is_c=one.is_c or other.is_c)
    if names <= INTEGERS.keys():
        return max(one, other, key=lambda each: INTEGERS[each.name])
    if names <= {"numeric", *INTEGERS}:
        (p1, s1), (p2, s2) = _size(one, where), _size(other, where)
        scale = max(s1, s2)
        kind = _sized(max(p1 - s1, p2 - s2) + scale, scale, where)
        same = s1 == s2 and one.has_scale and other.has_scale
        return kind._replace(has_scale=same)
    if names <= {"numeric", *INTEGERS, *FLOATS}:
        return FLOAT8
    if names == {"date", "timestamp"}:
        return Type("timestamp")
    raise UnsupportedError(f"{one.title} with {other.title} in {where}", "cast one to the other")


def _size(kind: Type, where: str) -> tuple[int, int]:
    if kind.size is None:
        raise UnsupportedError(
            f"a numeric without precision in {where}", "cast it to numeric(p,s) with p up to 38"
        )
    return kind.size


def _sized(precision: int, scale: int, where: str) -> Type:
    precision = max(precision, scale, 1)
    if precision > MAX_PRECISION:
        raise UnsupportedError(
            f"a numeric of {precision} digits ({where})",
            f"cast its parts to smaller ones: Spark has {MAX_PRECISION} digits",
        )
    return numeric(precision, scale)


def _as_numeric(kind: Type) -> Type:
    precision, scale = _size(kind, "arithmetic")
    return numeric(precision, scale)


def _result(sign: str, one: Type, other: Type) -> Type:
    """Return the type of an arithmetic operation."""
    for each in (one, other):
        _expect_number(each, sign)
    names = {one.name, other.name}
    if names <= INTEGERS.keys():
        return max(one, other, key=lambda each: INTEGERS[each.name])
    if names & FLOATS:
        if sign == "%":
            raise UnsupportedError("% of floating-point numbers", "cast to numeric(p,s)")
        return one if names == {"float4"} else FLOAT8
    (p1, s1), (p2, s2) = _size(one, sign), _size(other, sign)
    scale = max(s1, s2)
    if sign == "/":
        raise UnsupportedError(
            "a division of numeric, whose scale Postgres chooses by the values",
            "select both numbers, and divide where the view is read",
        )
    if sign == "*":
        kind = _sized(p1 + p2 + 1, s1 + s2, "*")
    elif sign == "%":
        kind = _sized(min(p1 - s1, p2 - s2) + scale, scale, "%")
    else:
        kind = _sized(max(p1 - s1, p2 - s2) + scale + 1, scale, sign)
    return kind._replace(has_scale=one.has_scale and other.has_scale)


def _expect_number(kind: Type, where: str) -> None:
    if kind.name not in {*INTEGERS, *FLOATS, "numeric"}:
        raise UnsupportedError(f"{where} of {kind.title}", "cast to a number, if it has one's text")
    if kind.name == "numeric":
        _size(kind, where)


def _expect_text(kind: Type, where: str) -> None:
    if kind.name not in {*TEXTS, UNKNOWN} or kind.mask:
        raise UnsupportedError(f"{where} of {kind.title}", "take a text or varchar column")


def _expect_compared(kind: Type, where: str) -> None:
    if kind.mask:
        return
    if kind.name not in COMPARED:
        raise UnsupportedError(f"{where} of {kind.title}", "only select such a column")
    if kind.name == "numeric":
        _size(kind, where)


def _expect_ordered(kind: Type, where: str) -> None:
    if kind.mask:
        raise UnsupportedError(f"{where} of a masked column", "leave it out")
    _expect_compared(kind, where)
    if kind.name in TEXTS and not kind.is_c:
        raise UnsupportedError(
            f"{where} of text in the database's collation", 'write … COLLATE "C"'
        )


def _named(node: exp.DataType) -> Type:
    name = _TYPES.get(node.this.name)
    if name is None:
        raise UnsupportedError(f"a cast to {node.sql(dialect='postgres')}", "leave it out")
    given = [int(each.name) for each in node.expressions]
    if name == "numeric" and given:
        precision, scale = given[0], given[1] if len(given) > 1 else 0
        return _sized(precision, scale, "a cast")
    if given:
        raise UnsupportedError(f"a cast to {node.sql(dialect='postgres')}", "cast without (n)")
    return Type(name)


def _converted(value: Value, wanted: Type) -> Value:  # noqa: C901, PLR0911 - a case a pair of types
    """Return a cast, as Postgres converts."""
    sql, kind = value.sql, value.type
    made = f"CAST({sql} AS {wanted.spark})"
    if kind.mask:
        raise UnsupportedError("a cast of a masked column", "select it as it is")
    match kind.name, wanted.name:
        case (a, b) if a == b and a != "numeric":
            return value
        case ("text" | "varchar", "text" | "varchar"):
            return Value(sql, wanted._replace(is_c=kind.is_c))
        case (a, b) if a in INTEGERS and b in {*INTEGERS, "float8"}:
            return Value(made, wanted)
        case (a, "text" | "varchar") if a in {*INTEGERS, "bool", "date"}:
            return Value(made, wanted)
        case ("bool", "int4") | ("int4", "bool") | ("date", "timestamp") | ("timestamp", "date"):
            return Value(made, wanted)
        case (a, "numeric") if a in INTEGERS:
            return Value(f"CAST({sql} AS {_or(wanted, kind).spark})", _or(wanted, kind))
        case ("numeric", "numeric"):
            return value if wanted.size is None else Value(made, wanted)
        case ("numeric", b) if b in INTEGERS and kind.size:
            return Value(f"CAST(round({sql}, 0) AS {wanted.spark})", wanted)
        case ("numeric", "float8") if kind.size:
            return Value(made, wanted)
        case ("numeric", "text" | "varchar") if kind.size is None or kind.has_scale:
            return Value(made, wanted)
        case ("float4", "float8"):
            return Value(made, wanted)
        case ("float4" | "float8", b) if b in INTEGERS:
            return Value(f"CAST(rint({sql}) AS {wanted.spark})", wanted)
    raise UnsupportedError(
        f"a cast from {kind.title} to {wanted.title}", "select the column as it is"
    )


def _or(wanted: Type, kind: Type) -> Type:
    """Return the numeric that is wanted; of an integer's size if that has none."""
    return numeric(*_size(kind, "a cast")) if wanted.size is None else wanted


# --- literals ---


def string(text: str) -> str:
    """Return a text as a literal of Spark's SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def quoted(name: str) -> str:
    """Return a name quoted for Spark's SQL."""
    return "`" + name.replace("`", "``") + "`"


_DATE: Final = r"\d{4}-\d\d-\d\d"
_TIME: Final = r"\d\d:\d\d(:\d\d(\.\d{1,6})?)?"
_UUID: Final = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def _literal(text: str, kind: Type) -> str:  # noqa: PLR0911 - a case a type
    """Return a quoted literal, read as a value of the type."""
    plain = text.strip()
    match kind.name:
        case "text" | "varchar":
            return string(text)
        case "bool" if plain.lower() in {"t", "true", "f", "false"}:
            return "true" if plain.lower().startswith("t") else "false"
        case a if a in INTEGERS and re.fullmatch(r"[+-]?\d{1,18}", plain):
            return f"CAST('{plain}' AS {kind.spark})"
        case "numeric" if kind.size and re.fullmatch(r"[+-]?\d{1,38}(\.\d{1,38})?", plain):
            return f"CAST('{plain}' AS {kind.spark})"
        case "float8" | "float4" if re.fullmatch(r"[+-]?\d+(\.\d+)?", plain):
            return f"CAST('{plain}' AS {kind.spark})"
        case "uuid" if re.fullmatch(_UUID, plain.lower()):
            return string(plain.lower())
        case "date" if re.fullmatch(_DATE, plain) and _is(date.fromisoformat, plain):
            return f"DATE '{plain}'"
        case "timestamp" if re.fullmatch(f"{_DATE}([ T]{_TIME})?", plain) and _is(
            datetime.fromisoformat, plain
        ):
            return f"TIMESTAMP_NTZ '{plain}'"
        case "timestamptz" if re.fullmatch(f"{_DATE}[ T]{_TIME}(Z|[+]00)", plain):
            return f"TIMESTAMP '{plain.removesuffix('+00').removesuffix('Z')}Z'"
    raise UnsupportedError(
        f"a literal of type {kind.title} written like this",
        "write dates as '2026-11-24', times as '2026-11-24 10:00:00', with +00 if timestamptz",
    )


def _is(parse: Callable[[str], object], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


__all__ = ["Expressions", "Queries", "Scope", "Value", "quoted", "string", "types"]
