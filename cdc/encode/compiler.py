"""Write the source of a table version's row functions, and compile it.

One function walks one tuple: for each column the kind byte and length, then the value's form from
`cdc.encode.values`. Kind and length are read together, even if a NULL has only its kind: so a
tuple's bytes must be followed by a few more, which every chunk's padding ensures
(`cdc.decode.frames`).

A row of a binary COPY has lengths and no kinds (-1 is NULL). Its values are the same text, read by
the same forms, so a snapshot's event has the stream's bytes.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from orjson import dumps

from cdc import __version__
from cdc.config.value_options import Values
from cdc.encode.masks import masked, subject_column
from cdc.encode.values import NAMESPACE, form
from cdc.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import CodeType

    from cdc.encode.masks import ColumnMask
    from cdc.keyring.ciphers import Ciphers
    from cdc.log.records import SchemaRecord

NULL: Final = b"null"
# How many row functions are cached in compiled form: some milliseconds and some KB each.
_SHAPES: Final = 1_024

_END: Final = "    if q != e: raise malformed(e - s)"


class FunctionText:
    """The functions of one table version, as source text and as formats."""

    def __init__(
        self, schema: SchemaRecord, database: str, name: str,
        masks: Sequence[ColumnMask | None] = (), ciphers: Ciphers | None = None,
    ) -> None:  # fmt: skip
        self._schema = schema
        self._masked = {i: masked(mask, i, ciphers) for i, mask in enumerate(masks) if mask}
        # By the number of an encrypted column, that of the column that names its subject.
        self._subjects = {
            i: subject_column(schema.columns, schema.columns[i].name, mask)
            for i, mask in enumerate(masks)
            if mask and mask.subject
        }
        self._database = database
        self._name = name
        self._options = schema.values or Values()
        # Debezium's readers expect it instead of a value not sent; ours read `unchanged`.
        self._placeholder = _json(self._options.unavailable_value_placeholder)
        self._labels = [_json(column.name) for column in schema.columns]
        names = [column.name for column in schema.columns]
        self.key_columns = tuple(names.index(name) for name in schema.key)

    # -- formats: everything about an event that the table version fixes ---------------------------

    def row_format(self, columns: Sequence[int]) -> bytes:
        """Return a bytes format of a JSON object with these columns."""
        parts = (_literal(self._labels[i]) + b":%b" for i in columns)
        return b"{" + b",".join(parts) + b"}"

    def event_format(
        self, before: bytes, after: bytes, op: bytes, *, unchanged: bytes = b"%b",
        snapshot: str = "false", tx: bytes = b"%b", lsn: bytes = b"%d", times: bytes = b"%b",
    ) -> bytes:  # fmt: skip
        """Return the envelope's format; takes tx, unchanged, lsn, ordinal, seq, times between.

        What is given instead of one of them is in every event.
        """
        source = {
            "version": __version__,
            "connector": "postgresql",
            "name": self._name,
            "snapshot": snapshot,
            "db": self._database,
            "schema": self._schema.schema,
            "table": self._schema.table,
            "schema_id": self._schema.schema_id,
        }
        head = _literal(dumps(source)[:-1])
        return (
            b'{"before":' + before + b',"after":' + after
            + b',"source":' + head + b"," + tx + unchanged
            + b',"lsn":' + lsn + b',"ordinal":%d,"seq":%d}'
            + b',"op":"' + op + b'",' + times + b',"transaction":null}'
        )  # fmt: skip

    def copied_format(self, lsn: int, tx: bytes, times: bytes) -> bytes:
        """Return the format of a snapshot's event: a value per column, then ordinal and seq."""
        return self.event_format(
            b"null",
            self.row_format(range(len(self._labels))),
            b"r",
            unchanged=b"",
            snapshot="true",
            lsn=b"%d" % lsn,
            tx=_literal(tx),
            times=_literal(times),
        )

    def unchanged(self, columns: tuple[int, ...]) -> bytes:
        """Return the `unchanged` member of `source` for the columns Postgres did not send."""
        if not columns:
            return b""
        return b',"unchanged":[%b]' % b",".join(self._labels[i] for i in columns)

    # -- source text ------------------------------------------------------------------------------

    def new(self) -> str:
        """Return the function for a new tuple whose first column is at `q`, of common kinds.

        The caller has checked kind and column count. Any other kind is passed to `after`.
        """
        head = ["def new(b, q, e, lsn, op, seq, ordinal, tx, times):", "    s = q"]
        again = "after(b, s - 2, e, NULL, NO_OLDS, lsn, op, seq, ordinal, tx, times)"
        other = [f"    else: return {again}"]
        values, key = self._names(range(len(self._labels))), self._names(self.key_columns)
        result = (
            f"    return {f'KEY % ({key})' if key else 'None'},"
            f" NEW % ({values}tx, lsn, ordinal, seq, op, times)"
        )
        return "\n".join([*head, *self._walk(other), _END, result])

    def after(self) -> str:
        """Return the function for any new tuple; its column count is at `q`."""
        head = [
            "def after(b, q, e, before, olds, lsn, op, seq, ordinal, tx, times):",
            "    s = q; gaps = ()",
            f"    if COUNT(b, q)[0] != {len(self._labels)}: raise malformed(e - s)",
            "    q += 2",
        ]
        gap = [
            "    elif k == 117:",
            "        v{i} = olds[{i}]; q += 1",
            "        if v{i} is None: v{i} = gap(e - s, {i}); gaps += ({i},)",
            "    else: raise malformed(e - s)",
        ]
        values, key = self._names(range(len(self._labels))), self._names(self.key_columns)
        result = (
            f"    return {f'KEY % ({key})' if key else 'None'}, EVENT % (before, {values}tx,"
            " unchanged(gaps), lsn, ordinal, seq, op, times)"
        )
        return "\n".join([*head, *self._walk(gap), _END, result])

    def old(self) -> str:
        """Return the function for an old tuple: its end and its encoded values."""
        head = [
            "def old(b, q, e):",
            "    s = q",
            f"    if COUNT(b, q)[0] != {len(self._labels)}: raise malformed(e - s)",
            "    q += 2",
        ]
        values = self._names(range(len(self._labels)))
        other = ["    else: raise malformed(e - s)"]
        return "\n".join([*head, *self._walk(other), f"    return q, ({values})"])

    def copied(self) -> str:
        """Return the function for a row of a binary COPY whose first column is at `q`.

        The caller has checked the column count. `event` is a `copied_format`.
        """
        head = ["def copied(b, q, e, event, seq, ordinal):", "    s = q"]
        values, key = self._names(range(len(self._labels))), self._names(self.key_columns)
        result = f"    return {f'KEY % ({key})' if key else 'None'}, event % ({values}ordinal, seq)"
        return "\n".join([*head, *self._walk_copied(), _END, result])

    def copied_values(self) -> str:
        """Return the function for the encoded values of the row that `copied` reads."""
        head = ["def copied_values(b, q, e):", "    s = q"]
        values = self._names(range(len(self._labels)))
        return "\n".join([*head, *self._walk_copied(), _END, f"    return ({values})"])

    def _walk_copied(self) -> list[str]:
        """Return the lines that read every column of a COPY's row."""
        lines = []
        for i in range(len(self._labels)):
            value, null = self._assigned(i)
            lines += [
                "    n = LENGTH(b, q)[0]",
                f"    if n >= 0: p = q + 4; q = p + n; {value}",
                f"    elif n == -1: {null}; q += 4",
                "    else: raise malformed(e - s)",
            ]
        return [*lines, *self._encrypt()]

    def is_encrypted(self, column: int) -> bool:
        """Return whether a column is encrypted by the key of the row's subject."""
        return column in self._subjects

    def value(self, column: int) -> tuple[str, str]:
        """Return what a column's value and what a NULL become, as expressions."""
        if mask := self._masked.get(column):
            return mask.value, mask.null
        return form(self._schema.columns[column], self._options), "NULL"

    def _walk(self, other: list[str]) -> list[str]:
        """Return the lines that read every column; `other` handles kinds except text and NULL."""
        lines = []
        for i in range(len(self._labels)):
            value, null = self._assigned(i)
            lines.append("    k, n = VALUE(b, q)")
            lines.append(f"    if k == 116: p = q + 5; q = p + n; {value}")
            lines.append(f"    elif k == 110: {null}; q += 1")
            lines.extend(line.replace("{i}", str(i)) for line in other)
        return [*lines, *self._encrypt()]

    def _assigned(self, column: int) -> tuple[str, str]:
        """Return the assignments for a value and for a NULL.

        The text of an encrypted value is `t`, until its subject, which is `u`, has been read.
        """
        value, null = self.value(column)
        if column in self._subjects:
            return f"v{column} = None; t{column} = {value}", f"v{column} = {null}"
        if column in self._subjects.values():
            return (
                f"u{column} = b[p:q]; v{column} = {value}",
                f"u{column} = b''; v{column} = {null}",
            )
        return f"v{column} = {value}", f"v{column} = {null}"

    def _encrypt(self) -> list[str]:
        """Return the lines that encrypt values, of which None is left as a sign."""
        return [
            f"    if v{i} is None: v{i} = MASK{i}(u{subject}, t{i})"
            for i, subject in self._subjects.items()
        ]

    @staticmethod
    def _names(columns: Iterable[int]) -> str:
        return "".join(f"v{i}, " for i in columns)

    def compile(self) -> RowFunctions:
        """Return the functions `new`, `after`, `old`, `copied` and `copied_values`."""
        columns = range(len(self._labels))
        namespace: dict[str, Any] = {
            **NAMESPACE,
            "COUNT": struct.Struct(">H").unpack_from,
            "VALUE": struct.Struct(">BI").unpack_from,
            "LENGTH": struct.Struct(">i").unpack_from,
            "NULL": NULL,
            "gap": self._gap,
            "NO_OLDS": (None,) * len(columns),
            "KEY": self.row_format(self.key_columns),
            "EVENT": self.event_format(b"%b", self.row_format(columns), b"%b"),
            "NEW": self.event_format(b"null", self.row_format(columns), b"%b", unchanged=b""),
            "unchanged": self.unchanged,
            "malformed": self._malformed,
        }
        for mask in self._masked.values():
            namespace.update(mask.names)
        sources = {
            "after": self.after,
            "new": self.new,
            "old": self.old,
            "copied": self.copied,
            "copied_values": self.copied_values,
        }
        return RowFunctions(namespace, sources)

    def _gap(self, size: int, column: int) -> bytes:
        """Return the placeholder for a value not sent; raise if it belongs to the key."""
        if column in self.key_columns:
            raise self._malformed(size)
        return self._placeholder

    def _malformed(self, size: int) -> ProtocolError:
        table = f"{self._schema.schema}.{self._schema.table}"
        return ProtocolError(
            f"a row of {size} bytes does not match {table} as its relation message"
            f" describes it ({len(self._labels)} columns)",
        )


class RowFunctions:
    """The functions of one table version by name, each compiled when it is first asked for.

    Thousands of tables are described at once, and most never need more than `new` and `after`.
    """

    def __init__(self, namespace: dict[str, Any], sources: Mapping[str, Callable[[], str]]) -> None:
        self._namespace = namespace
        self._sources = sources

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - a function made of text
        if name not in self._namespace:
            # Our own text; it contains no name from a user.
            exec(_code(self._sources[name]()), self._namespace)  # noqa: S102
        return self._namespace[name]

    def lambda_of(self, value: str) -> Callable[[bytes, int, int], bytes]:
        """Return the expression of one value, of `b[p:q]`, as a function."""
        function: Callable[[bytes, int, int], bytes] = eval(  # noqa: S307 - our own text
            f"lambda b, p, q: {value}", self._namespace
        )
        return function


@lru_cache(maxsize=_SHAPES)
def _code(source: str) -> CodeType:
    """Return the compiled source: tables with columns of the same kinds share it."""
    return compile(source, "<row functions>", "exec")


def _json(text: str) -> bytes:
    # A copy: orjson's own result keeps kilobytes that it was written into, for each of the columns
    # of thousands of tables.
    return bytes(memoryview(dumps(text)))


def _literal(text: bytes) -> bytes:
    return text.replace(b"%", b"%%")
