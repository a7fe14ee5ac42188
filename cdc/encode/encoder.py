"""Row messages → keys and change events, by code compiled for each table version.

Python source is generated from the schema record (`cdc.encode.compiler`) and compiled once. It
walks the tuple's bytes and formats each value's slice straight into the JSON envelope, and
allocates nothing but the result: for every row a dict, a closure per column or a second parse would
cost more than all the rest. `cdc.decode` parses the same bytes into typed messages and is the
oracle in the tests.

A row is given by its chunk (`b`), where it starts there (`q`) and where its message ends (`e`).
Bounds: what is read past the end is another message's, so every function that reaches a message's
end compares it with `e`; the caller translates `struct.error` and `IndexError`. Same bytes in, same
bytes out: nothing here reads a clock.

https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol

from cdc.encode.compiler import NULL, FunctionText
from cdc.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cdc.encode.masks import ColumnMask
    from cdc.keyring.ciphers import Ciphers
    from cdc.log.records import SchemaRecord

_N, _K, _O = b"NKO"

# What every event of a transaction shares: its time (ms, us, ns), and with it the xid or null, the
# epoch and the two halves of the commit LSN.
TIMES: Final = b'"ts_ms":%d,"ts_us":%d,"ts_ns":%d'
TX: Final = b'%b,"txId":%b,"epoch":%d,"commit_lsn":"%X/%X"'

# An encoded value per column; None for what Postgres did not send.
Values = tuple[bytes | None, ...]


class New(Protocol):
    """Return key and event of a new tuple of common kinds; its first column is at `q`."""

    def __call__(  # noqa: PLR0913, PLR0917 - flat, because every row passes here
        self, b: bytes, q: int, e: int, lsn: int, op: bytes, seq: int, ordinal: int, tx: bytes,
        times: bytes, /,
    ) -> tuple[bytes | None, bytes]: ...  # fmt: skip


class Encoder:
    """The compiled encoder of one table version, and where its records go."""

    def __init__(
        self, schema: SchemaRecord, database: str, name: str, partitions: int,
        masks: Sequence[ColumnMask | None] = (), ciphers: Ciphers | None = None,
    ) -> None:  # fmt: skip
        source = FunctionText(schema, database, name, masks, ciphers)
        self._functions = functions = source.compile()
        self.schema = schema
        self._source = source
        # Without a key only the table as a unit has an order: one partition keeps it.
        self.partitions = partitions if schema.key else 1
        self._after = functions["after"]
        self.new: New = functions["new"]
        self.copied_format = source.copied_format
        columns = range(len(schema.columns))
        self.no_olds: Values = (None,) * len(columns)
        self._rows = {
            _K: (source.key_columns, source.row_format(source.key_columns)),
            _O: (tuple(columns), source.row_format(columns)),
        }
        self._delete = source.event_format(b"%b", b"null", b"d")
        self._truncate = source.event_format(b"null", b"null", b"t")

    @cached_property
    def copied(self) -> Callable[[bytes, int, int, bytes, int, int], tuple[bytes | None, bytes]]:
        """The function for key and event of a row of a binary COPY; see `FunctionText.copied`."""
        return self._functions["copied"]  # type: ignore[no-any-return] # a function made of text

    @cached_property
    def _old(self) -> Callable[[bytes, int, int], tuple[int, Values]]:
        function: Callable[[bytes, int, int], tuple[int, Values]] = self._functions["old"]
        return function

    @cached_property
    def copied_values(self) -> Callable[[bytes, int, int], tuple[bytes, ...]]:
        """The function for the encoded values of a COPY's row; its first column is at `q`.

        Followed by ordinal and seq they are what a `copied_format` takes.
        """
        function: Callable[[bytes, int, int], tuple[bytes, ...]] = self._functions["copied_values"]
        return function

    def old(self, b: bytes, q: int, e: int) -> tuple[int, bytes, Values]:
        """Return the end of the old tuple whose kind is at `q`, its JSON row, and its values.

        Of an old key only the key's columns are known; Postgres fills the others with NULLs.
        """
        kind = b[q]
        if kind not in self._rows:
            raise ProtocolError(f"tuple kind {kind:#04x} where an old row or key belongs")
        q, values = self._old(b, q + 1, e)
        columns, row = self._rows[kind]
        if kind == _K:
            values = tuple(v if i in columns else None for i, v in enumerate(values))
        return q, row % tuple(values[i] for i in columns), values

    def key(self, values: Values) -> bytes | None:
        """Return the record key of an old row; None for a table without a key."""
        columns, row = self._rows[_K]
        return row % tuple(values[i] for i in columns) if columns else None

    def after(  # noqa: PLR0913, PLR0917 - one row's parts, flat as in `new`
        self, b: bytes, q: int, e: int, before: bytes, olds: Values, lsn: int, op: bytes, seq: int,
        ordinal: int, tx: bytes, times: bytes,
    ) -> tuple[bytes | None, bytes]:  # fmt: skip
        """Return key and event of the new tuple whose kind is at `q`.

        Unchanged TOAST values are taken from `olds`; without an old image those are `no_olds`.
        """
        if b[q] != _N:
            raise ProtocolError(f"tuple kind {b[q]:#04x} where a new row belongs")
        result: tuple[bytes | None, bytes] = self._after(
            b, q + 1, e, before, olds, lsn, op, seq, ordinal, tx, times
        )
        return result

    def value(self, column: int, text: bytes) -> bytes:
        """Return a column's value as a row has it, from Postgres' text; masked if the column is.

        Null for an encrypted one, whose key depends on the row.
        """
        if self._source.is_encrypted(column):
            return NULL
        value, _ = self._source.value(column)
        return self._functions.lambda_of(value)(text, 0, len(text))

    def at_fault(self, texts: Sequence[bytes | None]) -> str | None:
        """Return the column whose text, as Postgres writes it, can't be encoded; None if each can.

        For an error's message: it tries each column by itself.
        """
        for number, (column, text) in enumerate(zip(self.schema.columns, texts, strict=False)):
            if text is None:
                continue
            try:
                self.value(number, text)
            except Exception:  # noqa: BLE001 - whatever it is, it is this column's
                return column.name
        return None

    def delete(
        self, before: bytes, lsn: int, seq: int, ordinal: int, tx: bytes, times: bytes
    ) -> bytes:
        return self._delete % (before, tx, b"", lsn, ordinal, seq, times)

    def truncate(self, lsn: int, seq: int, ordinal: int, tx: bytes, times: bytes) -> bytes:
        return self._truncate % (tx, b"", lsn, ordinal, seq, times)
