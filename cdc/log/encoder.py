"""Row messages → keys and change events, by code compiled for each table version.

Python source is generated from the schema record (`cdc.log.compile`) and compiled once. It walks
the tuple's bytes and formats each value's slice straight into the JSON envelope, and allocates
nothing but the result: on the path of every row a dict, a closure a column or a second parse would
cost more than the whole rest. `cdc.decode` parses the same bytes the typed way and is the oracle
in the tests.

Bounds: a slice past the end is short without an error, so every function compares the end it
reached with the frame's length; `struct.error` and `IndexError` from a cut frame are the caller's
to translate. Same bytes in, same bytes out: nothing here reads a clock.

Frame: XLogData, 25 bytes of header, then the pgoutput payload.
https://www.postgresql.org/docs/current/protocol-replication.html
https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from cdc.errors import ProtocolError
from cdc.log.compile import RowSource

if TYPE_CHECKING:
    from cdc.log.records import SchemaRecord

# Where a row message's parts stand in its frame: kind of the first tuple ('N', 'K', 'O'), tuple.
KIND: Final = 30
TUPLE: Final = 31

_N, _K, _O = b"NKO"

# An encoded value a column; None for what Postgres did not send.
Values = tuple[bytes | None, ...]


class New(Protocol):
    """Return key and event of a frame whose new tuple stands right behind the relation id."""

    def __call__(
        self, b: bytes, op: bytes, seq: int, ordinal: int, tx: bytes, times: bytes, /
    ) -> tuple[bytes | None, bytes]: ...


class Encoder:
    """The compiled encoder of one table version, and where its records go."""

    def __init__(self, schema: SchemaRecord, database: str, name: str, partitions: int) -> None:
        source = RowSource(schema, database, name)
        functions = source.compile()
        self.schema = schema
        # Without a key there is no order but the table's own: one partition keeps it.
        self.partitions = partitions if schema.key else 1
        self.new: New = functions["new"]
        self._after = functions["after"]
        self._old = functions["old"]
        columns = range(len(schema.columns))
        self._rows = {
            _K: (source.key_columns, source.row_format(source.key_columns)),
            _O: (tuple(columns), source.row_format(columns)),
        }
        self._delete = source.event_format(b"%b", b"null", b"d")
        self._truncate = source.event_format(b"null", b"null", b"t")

    def old(self, b: bytes) -> tuple[int, bytes, Values]:
        """Return the end of the frame's old tuple, its JSON row, and its values.

        Of an old key only the key's columns are known; Postgres fills the others with NULLs.
        """
        kind = b[KIND]
        if kind not in self._rows:
            raise ProtocolError(f"tuple kind {kind:#04x} where an old row or key belongs")
        q, values = self._old(b, TUPLE)
        columns, row = self._rows[kind]
        if kind == _K:
            values = tuple(v if i in columns else None for i, v in enumerate(values))
        return q, row % tuple(values[i] for i in columns), values

    def key(self, values: Values) -> bytes | None:
        """Return the record key of an old row; None for a table without a key."""
        columns, row = self._rows[_K]
        return row % tuple(values[i] for i in columns) if columns else None

    def after(  # noqa: PLR0913, PLR0917 - one row's parts, flat as in `new`
        self, b: bytes, q: int, before: bytes, olds: Values, op: bytes, seq: int, ordinal: int,
        tx: bytes, times: bytes,
    ) -> tuple[bytes | None, bytes]:  # fmt: skip
        """Return key and event of the new tuple at `q`; gaps of TOAST are filled from `olds`."""
        if b[q] != _N:
            raise ProtocolError(f"tuple kind {b[q]:#04x} where a new row belongs")
        result: tuple[bytes | None, bytes] = self._after(
            b, q + 1, before, olds, op, seq, ordinal, tx, times
        )
        return result

    def delete(
        self, lsn: int, before: bytes, seq: int, ordinal: int, tx: bytes, times: bytes
    ) -> bytes:
        """Return a delete event."""
        return self._delete % (before, tx, b"", lsn, ordinal, seq, times)

    def truncate(self, lsn: int, seq: int, ordinal: int, tx: bytes, times: bytes) -> bytes:
        """Return a truncate event."""
        return self._truncate % (tx, b"", lsn, ordinal, seq, times)
