"""Parse a user's conditions on rows, and write them again for Postgres. Pure.

No character of a condition's text reaches Postgres as it was given. `parse` accepts comparisons of
columns with literals and with each other, and nothing else: no function but `now()`, no subquery,
no cast of a column, no comment. `Condition.sql` writes the tree that was parsed, each operand in
parentheses, each column and literal quoted, each type from a list.

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

if TYPE_CHECKING:
    from collections.abc import Callable

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
_TESTS: Final = {"null", "true", "false", "unknown"}
_TIMES: Final = {"current_date": "CURRENT_DATE", "current_timestamp": "CURRENT_TIMESTAMP"}
# As they may be written, and as Postgres names them.
_TYPES: Final = {
    "smallint": "int2", "int2": "int2", "int": "int4", "integer": "int4", "int4": "int4",
    "bigint": "int8", "int8": "int8", "numeric": "numeric", "decimal": "numeric",
    "real": "float4", "float4": "float4", "float8": "float8",
    "text": "text", "varchar": "varchar", "bool": "bool", "boolean": "bool",
    "date": "date", "time": "time", "timestamp": "timestamp", "timestamptz": "timestamptz",
    "interval": "interval", "uuid": "uuid", "bytea": "bytea", "inet": "inet",
}  # fmt: skip
_TYPED: Final = {"date", "time", "timestamp", "timestamptz", "interval"}
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


class Condition(NamedTuple):
    """A condition as it was understood."""

    sql: str
    columns: frozenset[str]


class _Token(NamedTuple):
    kind: str
    text: str  # words in lower case, quoted names and texts without their quotes
    at: int


def parse(text: str) -> Condition:
    """Return the condition that a text describes; ConfigError where it is none."""
    return _Parser(_tokens(text)).condition()


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
    """Recursive descent, with Postgres' precedence; each method returns SQL that it has written."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens, self._at, self._depth = tokens, 0, 0
        self._columns: set[str] = set()

    def condition(self) -> Condition:
        written = self._any()
        if self._next.kind != "end":
            raise _wrong(self._next.at, "AND, OR or the end")
        return Condition(written, frozenset(self._columns))

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

    def _any(self) -> str:
        parts = [self._all()]
        while self._word("or"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else f"({' OR '.join(parts)})"

    def _all(self) -> str:
        parts = [self._not()]
        while self._word("and"):
            parts.append(self._not())
        return parts[0] if len(parts) == 1 else f"({' AND '.join(parts)})"

    def _not(self) -> str:
        if not self._word("not"):
            return self._comparison()
        self._deeper()
        written = f"(NOT {self._not()})"
        self._depth -= 1
        return written

    def _comparison(self) -> str:
        left = self._sum()
        if sign := self._sign(*_COMPARISONS):
            return f"({left} {_COMPARISONS[sign]} {self._sum()})"
        if self._word("is"):
            return self._is(left)
        at = self._at
        negated = "NOT " if self._word("not") else ""
        if self._word("in"):
            return self._in(left, negated)
        if self._word("between"):
            low = self._sum()
            self._must(self._word("and"), "AND")
            return f"({left} {negated}BETWEEN {low} AND {self._sum()})"
        if word := self._word("like", "ilike"):
            return f"({left} {negated}{word.upper()} {self._sum()})"
        if at != self._at:
            raise _wrong(self._next.at, "IN, BETWEEN, LIKE or ILIKE")
        return left

    def _is(self, left: str) -> str:
        negated = "NOT " if self._word("not") else ""
        if test := self._word(*_TESTS):
            return f"({left} IS {negated}{test.upper()})"
        self._must(self._word("distinct"), "NULL, TRUE, FALSE, UNKNOWN or DISTINCT FROM")
        self._must(self._word("from"), "FROM")
        return f"({left} IS {negated}DISTINCT FROM {self._sum()})"

    def _in(self, left: str, negated: str) -> str:
        self._must(self._sign("("), "(")
        items = [self._sum()]
        while self._sign(","):
            items.append(self._sum())
        self._must(self._sign(")"), ", or )")
        return f"({left} {negated}IN ({', '.join(items)}))"

    # -- operands ----------------------------------------------------------------------------------

    def _sum(self) -> str:
        return self._chain(self._product, "+", "-")

    def _product(self) -> str:
        return self._chain(self._signed, "*", "/", "%")

    def _chain(self, operand: Callable[[], str], *signs: str) -> str:
        depth, left = self._depth, operand()
        while sign := self._sign(*signs):
            self._deeper()
            left = f"({left} {sign} {operand()})"
        self._depth = depth
        return left

    def _signed(self) -> str:
        if not self._sign("-"):
            return self._operand()
        self._deeper()
        written = f"(- {self._signed()})"
        self._depth -= 1
        return written

    def _operand(self) -> str:
        token = self._take()
        if token.kind in ("number", "text"):
            return self._cast(token.text if token.kind == "number" else quoted(token.text))
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

    def _named(self, token: _Token) -> str:
        word = token.text
        if word in ("true", "false", "null"):
            return self._cast(word.upper())
        if word in _TIMES:
            return _TIMES[word]
        if word == "now" and self._sign("("):
            self._must(self._sign(")"), ")")
            return "pg_catalog.now()"
        if word in _TYPED and self._next.kind == "text":
            return f"{quoted(self._take().text)}::pg_catalog.{_TYPES[word]}"
        if word in _RESERVED or (self._next.kind, self._next.text) == ("sign", "("):
            raise _wrong(token.at, "a column or a literal (no function; reserved words in quotes)")
        return self._column(word)

    def _cast(self, literal: str) -> str:
        while self._sign("::"):
            token = self._take()
            if token.kind != "word" or token.text not in _TYPES:
                raise _wrong(token.at, "a type: " + ", ".join(sorted(_TYPES)))
            literal = f"({literal}::pg_catalog.{_TYPES[token.text]})"
        return literal

    def _column(self, name: str) -> str:
        self._columns.add(name)
        return '"' + name.replace('"', '""') + '"'


def quoted(text: str) -> str:
    """Return the literal of a text, the same whatever `standard_conforming_strings` is."""
    inside = text.replace("'", "''")
    return f"E'{inside.replace(chr(92), chr(92) * 2)}'" if "\\" in text else f"'{inside}'"
