"""The error of a row that can't be encoded: which table and column, and what to do. Pure.

Never the value: a column's name is metadata, its value is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.decode import messages, pgoutput
from cdc.errors import CDCError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.encode.encoder import Encoder


def unreadable(encoder: Encoder, texts: Sequence[bytes | None], error: Exception) -> ProtocolError:
    """Return the error of a row whose columns have these texts, as Postgres writes them."""
    schema, kind = encoder.schema, type(error).__name__
    table, column = f"{schema.schema}.{schema.table}", encoder.at_fault(texts)
    if column is None:
        return ProtocolError(f"a row of {table} can't be read ({kind})")
    named = next(each for each in schema.columns if each.name == column)
    what = f"a row of {table} can't be read: column {column} ({named.type}, {kind})"
    leave = f'leave the column out: tables."{table}".exclude'
    if isinstance(error, UnicodeDecodeError):
        return ProtocolError(
            f"{what}: it is no text in UTF-8",
            hint="values.invalid.text.handling.mode: base64 writes the bytes; or correct the row in"
            f" the source; or {leave}",
        )
    return ProtocolError(f"{what}", hint=f"report it with the column's type; meanwhile {leave}")


def unreadable_message(
    encoder: Encoder, payload: bytes, error: Exception, *, in_stream: bool
) -> ProtocolError | None:
    """Return the error of a row message that can't be encoded; None if it is not a row."""
    try:
        message = pgoutput.decode(payload, in_stream=in_stream, parallel=False)
    except CDCError:
        return None
    match message:
        case messages.Insert():
            rows = [message.new]
        case messages.Update():
            rows = [message.new, *([message.old.values] if message.old else [])]
        case messages.Delete():
            rows = [message.old.values]
        case _:
            return None
    texts = [[each if isinstance(each, bytes) else None for each in row] for row in rows]
    bad = [row for row in texts if encoder.at_fault(row) is not None]
    return unreadable(encoder, (bad or texts)[0], error)
