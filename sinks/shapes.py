"""Shapes: how a table's rows are stored as keys and values, by templates.

A template is text with `{column}` for that column's value; `{{` and `}}` are literal braces. A
value's text is its JSON without the quotes: `7`, `12.50`, `true`, `Ada`. NULL has no text, so a row
with a NULL in its key, member or text is not shown in the store.

Pure and independent of any store. A `Shaper` is for one version of a table and takes its rows as
the log's JSON; it parses only the columns that the shape needs, and none for complete rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import product
from typing import Final, NamedTuple, TypeAlias

import msgspec

from cdc.errors import ConfigError
from lockstep.sinks.contract import Change, Version

_PIECE: Final = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|([{}])|([^{}]+)")
# A colon separates the columns of a composite key; a colon in a value is escaped.
_ESCAPED: Final = str.maketrans({"%": "%25", ":": "%3A"})
_NULL_IN_KEY: Final = "%N"  # not a valid escape, so no text can equal it

Values: TypeAlias = Mapping[str, bytes]  # JSON by column; a missing column is NULL


class RowShape(NamedTuple):
    """The configuration of a table's rows; see docs/CONFIG.md."""

    key: str | None = None
    form: str = "row"
    fields: tuple[str, ...] = ()
    value: str | None = None
    member: str | None = None
    score: str | None = None
    ttl_seconds: int | None = None

    @property
    def collects(self) -> bool:
        """Whether a row is a member of a collection of rows."""
        return self.form in {"set", "zset"}


class Shaped(NamedTuple):
    """A row's place and value."""

    place: bytes  # the key that clients read
    # The value: one string; for a hash, alternating fields and values; for a set the member, for a
    # sorted set the member and its score.
    value: tuple[bytes, ...]
    # JSON with the columns of the templates, from which an update that does not send them is
    # filled; empty if the value itself has them.
    kept: bytes = b""


class Template:
    """Text with column placeholders."""

    def __init__(self, text: str) -> None:
        """Raise ValueError for an unmatched brace."""
        self.pieces: list[tuple[str, str | None]] = []  # literal, or "" and a column
        for match in _PIECE.finditer(text):
            column, alone, literal = match.groups()
            if alone:
                raise ValueError(f"a brace is alone in {text!r}; write {alone * 2} for one")
            self.pieces.append((literal or ("" if column else match[0][0]), column))
        self._tagged = self._tag_end()

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(column for _, column in self.pieces if column)

    def fill(self, values: Values, *, to_the_tag: bool = False) -> bytes | None:
        """Return a row's text, or the part that decides its slot; None if a column is NULL."""
        filled = []
        for literal, column in self.pieces[: self._tagged if to_the_tag else None]:
            text = literal.encode() if column is None else text_of(values.get(column, b"null"))
            if text is None:
                return None
            filled.append(text)
        return b"".join(filled)

    def fixed_by(self, columns: Iterable[str]) -> bool:
        """Return whether `columns` decide the hash slot of every text from this template."""
        deciding = {column for _, column in self.pieces[: self._tagged] if column}
        return deciding <= frozenset(columns)

    def _tag_end(self) -> int | None:
        """Return how many pieces decide the slot: those up to the tag's end, None for all.

        The slot is that of the text between the first brace and the next closing one, else of the
        complete text.
        """
        opened = None
        for at, (literal, _) in enumerate(self.pieces):
            if literal == "{" and opened is None:
                opened = at
            if literal == "}" and opened is not None:
                return at + 1 if at > opened + 1 else None
        return None


def text_of(value: bytes) -> bytes | None:
    """Return the text of a JSON value, None for null."""
    if value[:1] == b'"':
        return _decode_text(value).encode()
    return None if value == b"null" else value


_decode_text: Final = msgspec.json.Decoder(str).decode


class Columns:
    """Extracts some columns from rows, as JSON, without parsing the others."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(dict.fromkeys(names))
        slots = [(f"c{n}", msgspec.Raw, msgspec.Raw(b"null")) for n in range(len(self.names))]
        rename = {f"c{n}": name for n, name in enumerate(self.names)}
        row = msgspec.defstruct("Row", slots, rename=rename)
        self._decode = msgspec.json.Decoder(row).decode
        self._pairs = [(f"c{n}", name) for n, name in enumerate(self.names)]

    def of(self, row: bytes) -> dict[str, bytes]:
        """Return the columns' JSON by name; null for those that the row lacks."""
        found = self._decode(row)
        return {name: bytes(getattr(found, slot)) for slot, name in self._pairs}


_any_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def values_of(row: bytes) -> dict[str, bytes]:
    """Return all columns of a row as JSON, by name."""
    return {name: bytes(value) for name, value in _any_object.decode(row).items()}


def object_of(values: Values) -> bytes:
    """Return a JSON object of columns' JSON."""
    return b"{%b}" % b",".join(
        b"%b:%b" % (msgspec.json.encode(name), value) for name, value in values.items()
    )


class Placer:
    """Computes from its key the place of a row that does not move."""

    def __init__(self, shape: RowShape, prefix: str, table: str) -> None:
        """Raise ValueError if the key's template is invalid."""
        self.template = None if shape.key is None else Template(shape.key)
        # The prefix of every place without a template. A store's own keys begin with `~`.
        named = f"%{ord(table[0]):X}{table[1:]}" if table.startswith(("~", "%")) else table
        self.head = f"{prefix}:{named}:".encode()

    def place(self, key: bytes) -> bytes:
        """Return the place of the row with this key, which is JSON."""
        if self.template is not None:
            filled = self.template.fill(values_of(key))
            # A key that is too long for the log is a digest there, without the template's columns.
            return self.head + key if filled is None else filled
        # Mostly a single column, whose text is its JSON without the quotes: `{"id":7}`.
        value = key[1:-1].partition(b":")[2]
        if value.isdigit():
            return self.head + value
        if value[:1] == b'"' and value.find(b'"', 1) == len(value) - 1 and b"\\" not in value:
            return self.head + value[1:-1]
        texts = [text_of(value) for value in values_of(key).values()]
        if len(texts) == 1:
            return self.head + (_NULL_IN_KEY.encode() if texts[0] is None else texts[0])
        return (
            self.head
            + ":".join(
                _NULL_IN_KEY if text is None else text.decode().translate(_ESCAPED)
                for text in texts
            ).encode()
        )

    def keys(self, place: bytes, columns: Sequence[str]) -> list[bytes]:
        """Return the keys whose row may be at a place without a template.

        There may be several, because a text does not show whether it was a number; none if it is
        not a key's place.
        """
        text = place.removeprefix(self.head).decode(errors="replace")
        texts = text.split(":") if len(columns) > 1 else [text]
        if len(texts) != len(columns):
            return []
        known = [text.encode()] if text.startswith("{") else []  # a key that is a digest
        names = [msgspec.json.encode(name) for name in columns]
        for values in product(*(_json_of(each, escaped=len(texts) > 1) for each in texts)):
            pairs = (b"%b:%b" % pair for pair in zip(names, values, strict=True))
            known.append(b"{%b}" % b",".join(pairs))
        return known

    def anchor(self, key: bytes) -> bytes:
        """Return text in the hash slot of the row's place, computed from its key only."""
        if self.template is None:
            return self.place(key)
        filled = self.template.fill(values_of(key), to_the_tag=True)
        return self.head + key if filled is None else filled


_BARE: Final = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?|true|false")


def _json_of(text: str, *, escaped: bool) -> list[bytes]:
    """Return the JSON values that have this text in a place."""
    found = [b"null"] if text == _NULL_IN_KEY else []
    if escaped:
        text = text.replace("%3A", ":").replace("%25", "%")
    if _BARE.fullmatch(text):
        found.append(text.encode())
    return [*found, msgspec.json.encode(text)]


class Shaper:
    """Shapes the rows of one version of a table."""

    def __init__(self, shape: RowShape, version: Version, prefix: str) -> None:
        """Raise ConfigError if the table lacks a column of the shape."""
        self.shape, self.version = shape, version
        if not version.key:
            raise _refused(version, "has no key, which identifies rows", _KEYLESS)
        try:
            placer = Placer(shape, prefix, version.name)
            self._value = None if shape.value is None else Template(shape.value)
            self._member = None if shape.member is None else Template(shape.member)
        except ValueError as error:
            raise _refused(version, f"has a wrong template: {error}") from None
        if shape.collects and shape.ttl_seconds is not None:
            raise _refused(version, "has members that would go away one by one: `ttl_seconds`")
        self._key, self.place, self.anchor = placer.template, placer.place, placer.anchor
        known = {column.name for column in version.columns}
        self.fields = shape.fields or tuple(column.name for column in version.columns)
        # The columns of the templates, and those of the row that the shape shows.
        templates = (each for each in (self._key, self._value, self._member) if each)
        named = {name for template in templates for name in template.columns}
        self._templated = sorted(named | ({shape.score} if shape.score else set()))
        shown = self.fields if shape.form in {"fields", "hash"} else ()
        self._columns = Columns((*self._templated, *shown))
        for name in self._columns.names:
            if name not in known:
                raise _refused(version, f"has no column {name}, which its shape names")
        self._used = known if shape.form == "row" else frozenset(self._columns.names)

    @property
    def plain(self) -> bool:
        """Whether a row's key alone decides its place, and its value is the row."""
        return self.shape.form == "row" and not self.moves

    @property
    def moves(self) -> bool:
        """Whether a change of a row can move it to another place."""
        return self._key is not None and not self._key.columns <= set(self.version.key)

    @property
    def slot_is_fixed(self) -> bool:
        """Whether a row stays in one hash slot when it moves."""
        return self._key is None or self._key.fixed_by(self.version.key)

    @property
    def shown(self) -> tuple[str, ...]:
        """The columns of a row that can be read back."""
        if self.shape.form == "row":
            return tuple(column.name for column in self.version.columns)
        return self._columns.names

    @property
    def needed(self) -> Sequence[str]:
        """The columns without which a row has no place: if one is NULL, readers do not see it."""
        return self._templated

    def shaped(self, change: Change) -> Shaped | None:
        """Return a row's place and value after a change; None if it has no place then.

        It has none if the key no longer has a row, if a template's column is NULL, or if a column
        that the shape needs is unknown: no value is better than a wrong one.
        """
        row = change.row
        if row is None or not self._used.isdisjoint(change.unchanged):
            return None
        assert change.key is not None
        if self.plain:
            return Shaped(self.place(change.key), (row,))
        values = self._columns.of(row)
        place = self._key.fill(values) if self._key else self.place(change.key)
        value = self._form(row, values)
        if place is None or value is None:
            return None
        kept = {name: values[name] for name in self._templated}
        return Shaped(place, value, object_of(kept) if kept else b"")

    def _form(self, row: bytes, values: dict[str, bytes]) -> tuple[bytes, ...] | None:
        form = self.shape.form
        if form == "row":
            return (row,)
        if form == "fields":
            return (object_of({name: values[name] for name in self.fields}),)
        if form == "hash":
            texts = ((name, text_of(values[name])) for name in self.fields)
            return tuple(
                part for n, text in texts if text is not None for part in (n.encode(), text)
            )
        template = self._value if form == "text" else self._member
        filled = template.fill(values) if template else None
        if filled is None or form != "zset":
            return None if filled is None else (filled,)
        score = self._score(values)
        return None if score is None else (filled, score)

    def _score(self, values: dict[str, bytes]) -> bytes | None:
        assert self.shape.score is not None
        text = text_of(values[self.shape.score])
        if text is None:
            return None
        try:
            score = number_of(text.decode())
        except ValueError:
            raise _refused(
                self.version,
                f"has a score, {self.shape.score}, that is neither number nor time",
                "name a column of a number or a timestamptz as `score`",
            ) from None
        return None if math.isnan(score) else repr(score).encode()

    def filled(self, kept: bytes) -> bytes:
        """Return a row's member of its collection, or its text, by its kept columns."""
        template = self._value or self._member
        found = template.fill(values_of(kept)) if template else None
        assert found is not None, "it has a place, so no column of the template is NULL"
        return found

    def row(self, value: Iterable[bytes] | None, kept: bytes) -> bytes:
        """Return the columns in a stored value and the kept columns, as a JSON object.

        A hash only holds text, so its values become strings.
        """
        values = values_of(kept) if kept else {}
        form, parts = self.shape.form, list(value or ())
        if form in {"row", "fields"} and parts:
            if not kept:
                return parts[0]
            values |= values_of(parts[0])
        elif form == "hash":
            shown = dict.fromkeys(self.fields, b"null")
            names = (part.decode() for part in parts[::2])
            texts = (msgspec.json.encode(part.decode()) for part in parts[1::2])
            values = shown | dict(zip(names, texts, strict=True)) | values
        return object_of(values)


def number_of(text: str) -> float:
    """Return the number of a numeric or time value: for a time the seconds since 1970.

    Dates and timestamps without a zone are numbers in the log, each type in its own unit; one that
    is out of range is text.
    """
    try:
        return float(text)
    except ValueError:
        far = _FAR.fullmatch(text)
        if far is None:
            return datetime.fromisoformat(text).timestamp()
        if far["zone"] is None:
            return math.nan
    year = 1 - int(far["year"]) if far["bc"] else int(far["year"])
    # The calendar repeats every 400 years, which are 146,097 days; Python only supports 9999.
    cycles, year = divmod(year, 400)
    near = f"{2000 + year}{far['rest']}{far['zone']}"
    return datetime.fromisoformat(near).timestamp() + (cycles - 5) * 146_097 * 86_400


# A time before our era or after the year 9999, as Postgres writes it.
_FAR: Final = re.compile(
    r"(?P<year>\d{4}(?=.* BC)|\d{5,})"
    r"(?P<rest>-\d\d-\d\d(?: \d\d:\d\d:\d\d(?:\.\d+)?)?)(?P<zone>[+-][\d:]+)?(?P<bc> BC)?"
)


_SHAPE: Final = "correct `shapes` of the follower, then `cdc rebuild` it"
_KEYLESS: Final = (
    "give it a primary key, or `tables.<table>.key`, or remove it from the follower's `tables`"
)


def _refused(version: Version, what: str, hint: str = _SHAPE) -> ConfigError:
    return ConfigError(f"{version.name} {what}", hint=hint)
