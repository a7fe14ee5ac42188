"""Parse a user's conditions on rows, and write them again for Postgres. Pure.

No character of a condition's text reaches Postgres as it was given. `parse` accepts comparisons of
columns with literals and with each other, and nothing else: no function but `now()`, no subquery,
no cast of a column, no comment. `Condition.sql` writes the tree that was parsed, each operand in
parentheses, each column and literal quoted, each type from a list. With the columns' types it
writes an operator only where no user's function can run (`cdc.source.column_types`), compares an
enum by the functions of enums, which have one candidate each, and refuses to compare the rest.

    condition:  AND, OR, NOT, parentheses, of
                a = b, <>, !=, <, <=, >, >=, IS [NOT] DISTINCT FROM b
                a IS [NOT] NULL, TRUE, FALSE, UNKNOWN
                a [NOT] IN (b, …), a [NOT] BETWEEN b AND c, a [NOT] LIKE b, a [NOT] ILIKE b
    operand:    column, "Column", 1.5, 'text', 'text'::type, DATE 'text', TRUE, FALSE, NULL,
                now(), CURRENT_DATE, CURRENT_TIMESTAMP, -a, a + b, a - b, a * b, a / b, a % b
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.decode.types import BY_OID, ValueKind, names_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cdc.source.column_types import ColumnType

# Far more than a person writes; a list of many keys has an option of its own.
_MOST_CHARACTERS, _MOST_TOKENS, _MOST_DEPTH = 20_000, 5_000, 40

_TOKEN: Final = re.compile(
    r"\s*(?:"
    r"(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.$]))"
    r"|(?P<text>'(?:[^']|'')*'(?!'))"
    r'|(?P<quoted>"(?:[^"]|"")+"(?!"))'
    r"|(?P<word>[A-Za-z_\u0080-\U0010ffff][\w$]*(?![\w$'\"]))"
    r"|(?P<sign>::|<>|!=|<=|>=|[=<>+*/%(),-])"
    r"|(?P<end>\Z)"
    r")"
)
_COMMENT: Final = re.compile(r"--|/\*")
_COMPARISONS: Final = {"=": "=", "<>": "<>", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_OF_ENUMS: Final = {
    "=": "enum_eq", "<>": "enum_ne", "<": "enum_lt", "<=": "enum_le", ">": "enum_gt",
    ">=": "enum_ge",
}  # fmt: skip
_TESTS: Final = {"null", "true", "false", "unknown"}
_TIMES: Final = {"current_date": "CURRENT_DATE", "current_timestamp": "CURRENT_TIMESTAMP"}
# Types of which a literal may be written before its text.
_OF_TIMES: Final = {
    *(ValueKind.DATE, ValueKind.TIME, ValueKind.TIMESTAMP, ValueKind.INSTANT, ValueKind.INTERVAL)
}
_TYPED: Final = names_of(*_OF_TIMES)
_OF_LITERALS: Final = _OF_TIMES | {
    *(ValueKind.BOOLEAN, ValueKind.INTEGER, ValueKind.NUMERIC, ValueKind.FLOAT, ValueKind.TEXT),
    *(ValueKind.UUID, ValueKind.BYTES, ValueKind.ADDRESS),
}
# As they may be written, and as Postgres names them.
_TYPES: Final = {
    written: row.name
    for row in BY_OID.values()
    if row.kind in _OF_LITERALS
    for written in (row.name, *row.aliases)
}
# Words that mean something else in SQL: a column of such a name is written in quotes.
_RESERVED: Final = frozenset(
    """all analyse analyze and any array as asc asymmetric between both case cast check coalesce
    collate column constraint create cross current_catalog current_role current_schema current_time
    current_user default deferrable desc distinct do else end escape except exists extract fetch for
    foreign from full grant greatest group grouping having ilike in initially inner intersect into
    is isnull join lateral leading least left like limit localtime localtimestamp natural not
    notnull null nullif offset on only operator or order outer overlaps placing primary references
    returning right row select session_user similar some symmetric system_user table tablesample
    then to trailing true false union unique user using values variadic verbose when where window
    with""".split()  # noqa: SIM905 - reads better so
)


class ConditionError(ValueError):
    """A text that is no supported condition. Its message has the position and what was expected."""


class UncomparableError(ConditionError):
    """A condition that compares a column whose type does not allow it. Names column and type."""


class Condition(NamedTuple):
    """A condition as it was understood."""

    sql: str
    columns: frozenset[str]


class _Token(NamedTuple):
    kind: str
    text: str  # words in lower case, quoted names and texts without their quotes
    at: int


class _Term(NamedTuple):
    """SQL that was written, and what it may be an operand of."""

    sql: str
    column: str | None = None  # one that has no operators
    untyped: bool = False  # a literal


def parse(text: str, types: Mapping[str, ColumnType] | None = None) -> Condition:
    """Return the condition that a text describes; ConditionError where it is none.

    What is sent to Postgres needs the columns' types. Without them every column has operators.
    """
    return _Parser(_tokens(text), types or {}).condition()


def _tokens(text: str) -> list[_Token]:
    if len(text) > _MOST_CHARACTERS:
        raise ConditionError(f"it is longer than {_MOST_CHARACTERS} characters")
    if "\0" in text or any("\ud800" <= each <= "\udfff" for each in text):
        raise ConditionError("it is no text")
    tokens: list[_Token] = []
    at = 0
    while not tokens or tokens[-1].kind != "end":
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise _wrong(at, "a column, a literal or an operator")
        kind = match.lastgroup
        found, start = match[kind], match.start(kind)
        if _COMMENT.match(text, start):
            raise _wrong(start, "no comment")
        if kind == "text":
            found = found[1:-1].replace("''", "'")
        elif kind == "quoted":
            found = found[1:-1].replace('""', '"')
        elif kind == "word":
            # As Postgres folds a name: ASCII letters only.
            found = "".join(each.lower() if each.isascii() else each for each in found)
        tokens.append(_Token(kind, found, start))
        at = match.end()
        if len(tokens) > _MOST_TOKENS:
            raise ConditionError(f"it has more than {_MOST_TOKENS} words and signs")
    return tokens


def _wrong(at: int, expected: str) -> ConditionError:
    return ConditionError(f"at character {at + 1}: expected {expected}")


class _Parser:
    """Recursive descent, with Postgres' precedence; each method returns what it has written."""

    def __init__(self, tokens: list[_Token], types: Mapping[str, ColumnType]) -> None:
        self._tokens, self._at, self._depth = tokens, 0, 0
        self._types = types
        self._columns: set[str] = set()

    def condition(self) -> Condition:
        written = self._any()
        if self._next.kind != "end":
            raise _wrong(self._next.at, "AND, OR or the end")
        return Condition(self._sql(written), frozenset(self._columns))

    # -- tokens ------------------------------------------------------------------------------------

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        token = self._next
        self._at += token.kind != "end"
        return token

    def _word(self, *words: str) -> str | None:
        """Consume one of these words, where it is next."""
        token = self._next
        return self._take().text if token.kind == "word" and token.text in words else None

    def _sign(self, *signs: str) -> str | None:
        token = self._next
        return self._take().text if token.kind == "sign" and token.text in signs else None

    def _must(self, taken: str | None, expected: str) -> None:
        if taken is None:
            raise _wrong(self._next.at, expected)

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise _wrong(self._next.at, f"no more than {_MOST_DEPTH} levels")

    # -- conditions --------------------------------------------------------------------------------

    def _any(self) -> _Term:
        return self._joined(self._all, "or")

    def _all(self) -> _Term:
        return self._joined(self._not, "and")

    def _joined(self, part: Callable[[], _Term], word: str) -> _Term:
        parts = [part()]
        while self._word(word):
            parts.append(part())
        if len(parts) == 1:
            return parts[0]
        return _Term(f"({f' {word.upper()} '.join(map(self._sql, parts))})")

    def _not(self) -> _Term:
        if not self._word("not"):
            return self._comparison()
        self._deeper()
        written = _Term(f"(NOT {self._sql(self._not())})")
        self._depth -= 1
        return written

    def _comparison(self) -> _Term:
        left = self._sum()
        if sign := self._sign(*_COMPARISONS):
            return _Term(self._compared(left, _COMPARISONS[sign], self._sum()))
        if self._word("is"):
            return _Term(self._is(left))
        at = self._at
        negated = "NOT " if self._word("not") else ""
        if self._word("in"):
            return _Term(self._in(left, negated))
        if self._word("between"):
            low = self._sum()
            self._must(self._word("and"), "AND")
            return _Term(self._between(left, negated, low, self._sum()))
        if word := self._word("like", "ilike"):
            pattern = self._sum()
            return _Term(f"({self._sql(left)} {negated}{word.upper()} {self._sql(pattern)})")
        if at != self._at:
            raise _wrong(self._next.at, "IN, BETWEEN, LIKE or ILIKE")
        return left

    def _is(self, left: _Term) -> str:
        negated = "NOT " if self._word("not") else ""
        if test := self._word(*_TESTS):
            # A row's columns are tested, and no function is called.
            tested = left.sql if test == "null" else self._sql(left)
            return f"({tested} IS {negated}{test.upper()})"
        self._must(self._word("distinct"), "NULL, TRUE, FALSE, UNKNOWN or DISTINCT FROM")
        self._must(self._word("from"), "FROM")
        right = self._sum()
        if not (left.column or right.column):
            return f"({left.sql} IS {negated}DISTINCT FROM {right.sql})"
        equal = self._compared(left, "=", right)
        both = f"(({left.sql} IS NULL) AND ({right.sql} IS NULL))"
        same = f"(({equal} IS TRUE) OR {both})"
        return same if negated else f"(NOT {same})"

    def _in(self, left: _Term, negated: str) -> str:
        self._must(self._sign("("), "(")
        items = [self._sum()]
        while self._sign(","):
            items.append(self._sum())
        self._must(self._sign(")"), ", or )")
        if not any(each.column for each in (left, *items)):
            return f"({left.sql} {negated}IN ({', '.join(each.sql for each in items)}))"
        any_of = " OR ".join(self._compared(left, "=", each) for each in items)
        return f"({negated}({any_of}))"

    def _between(self, left: _Term, negated: str, low: _Term, high: _Term) -> str:
        if not any(each.column for each in (left, low, high)):
            return f"({left.sql} {negated}BETWEEN {low.sql} AND {high.sql})"
        above, below = self._compared(left, ">=", low), self._compared(left, "<=", high)
        return f"({negated}({above} AND {below}))"

    # -- types -------------------------------------------------------------------------------------

    def _sql(self, term: _Term) -> str:
        """Return the SQL of an operand that goes to any operator, or to any test of a boolean."""
        if term.column is not None:
            raise self._uncomparable(term.column)
        return term.sql

    def _compared(self, left: _Term, sign: str, right: _Term) -> str:
        named = [each.column for each in (left, right) if each.column is not None]
        if not named:
            return f"({left.sql} {sign} {right.sql})"
        types = {self._types[name].base for name in named}
        enums = all(self._types[name].comparison == "enum" for name in named)
        alike = all(each.column is not None or each.untyped for each in (left, right))
        if not enums or not alike or len(types) > 1:
            raise self._uncomparable(named[0])
        return f"pg_catalog.{_OF_ENUMS[sign]}({left.sql}, {right.sql})"

    def _uncomparable(self, column: str) -> ConditionError:
        found = self._types[column]
        able = (
            "be compared with its labels and with columns of its type, by =, <, IN or BETWEEN, and"
            if found.comparison == "enum"
            else "only"
        )
        return UncomparableError(
            f"the column {column} has the type {found.name}, whose owner may have created casts"
            f" that a comparison would run: it can {able} be tested by IS NULL"
        )

    # -- operands ----------------------------------------------------------------------------------

    def _sum(self) -> _Term:
        return self._chain(self._product, "+", "-")

    def _product(self) -> _Term:
        return self._chain(self._signed, "*", "/", "%")

    def _chain(self, operand: Callable[[], _Term], *signs: str) -> _Term:
        depth, left = self._depth, operand()
        while sign := self._sign(*signs):
            self._deeper()
            left = _Term(f"({self._sql(left)} {sign} {self._sql(operand())})")
        self._depth = depth
        return left

    def _signed(self) -> _Term:
        if not self._sign("-"):
            return self._operand()
        self._deeper()
        written = _Term(f"(- {self._sql(self._signed())})")
        self._depth -= 1
        return written

    def _operand(self) -> _Term:
        token = self._take()
        if token.kind == "number":
            return _Term(self._cast(token.text))
        if token.kind == "text":
            return self._literal(quoted(token.text))
        if token.kind == "quoted":
            return self._column(token.text)
        if token.kind == "word":
            return self._named(token)
        if token == ("sign", "(", token.at):
            self._deeper()
            written = self._any()
            self._must(self._sign(")"), "AND, OR or )")
            self._depth -= 1
            return written
        raise _wrong(token.at, "a column or a literal")

    def _named(self, token: _Token) -> _Term:
        word = token.text
        if word in ("true", "false"):
            return _Term(self._cast(word.upper()))
        if word == "null":
            return self._literal("NULL")
        if word in _TIMES:
            return _Term(_TIMES[word])
        if word == "now" and self._sign("("):
            self._must(self._sign(")"), ")")
            return _Term("pg_catalog.now()")
        if word in _TYPED and self._next.kind == "text":
            return _Term(f"{quoted(self._take().text)}::pg_catalog.{_TYPES[word]}")
        if word in _RESERVED or (self._next.kind, self._next.text) == ("sign", "("):
            raise _wrong(token.at, "a column or a literal (no function; reserved words in quotes)")
        return self._column(word)

    def _literal(self, literal: str) -> _Term:
        written = self._cast(literal)
        return _Term(written, untyped=written == literal)

    def _cast(self, literal: str) -> str:
        while self._sign("::"):
            token = self._take()
            if token.kind != "word" or token.text not in _TYPES:
                raise _wrong(token.at, "a type: " + ", ".join(sorted(_TYPES)))
            literal = f"({literal}::pg_catalog.{_TYPES[token.text]})"
        return literal

    def _column(self, name: str) -> _Term:
        self._columns.add(name)
        written = '"' + name.replace('"', '""') + '"'
        found = self._types.get(name)
        if found is None or found.has_operators:
            return _Term(written)
        return _Term(found.value(written) if found.comparison == "enum" else written, name)


def quoted(text: str) -> str:
    """Return the literal of a text, the same whatever `standard_conforming_strings` is."""
    inside = text.replace("'", "''")
    return f"E'{inside.replace(chr(92), chr(92) * 2)}'" if "\\" in text else f"'{inside}'"
