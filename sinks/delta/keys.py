"""Find stored rows by their keys, in Arrow.

A key identifies rows, so it must compare exactly: also if one of its values does not fit its column
and is in `_exact`, and if it is NULL, which is possible for a configured key. A single column
without either is compared directly; everything else as one text with unambiguous separators. In
Postgres 0 and -0 are the same float key.

Pure.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.sinks.delta.columns import one_chunk
from lockstep.sinks.delta.lake import looked_up, quoted
from lockstep.sinks.delta.layout import EXACT, OURS, SEQ
from lockstep.sinks.delta.rows import only

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from lockstep.sinks.delta.rows import ChangeBatch

_SEPARATOR: Final = b"\x00"  # occurs in no Postgres text
_HASH_BYTES: Final = 16
# How many rows are shown at a time.
_HASHED_ROWS: Final = 65_536


def places(wanted: pa.Table, stored: pa.Table, key: Sequence[str]) -> pa.Int32Array:
    """Return, for each wanted row, the index of the stored row with its key, or NULL."""
    mine, theirs = identities(wanted, stored, key)
    return pc.index_in(mine, value_set=theirs)


def identities(one: pa.Table, other: pa.Table, key: Sequence[str]) -> tuple[pa.Array, pa.Array]:
    """Return the identities of the rows of two tables, comparable with each other."""
    as_text = needs_text(one, key) or needs_text(other, key)
    return identities_of(one, key, as_text=as_text), identities_of(other, key, as_text=as_text)


def needs_text(rows: pa.Table, key: Sequence[str]) -> bool:
    """Return whether a key has a NULL, a value that does not fit its column, or an array."""
    return any(rows[name].null_count or pa.types.is_list(rows[name].type) for name in key)


def always_text(schema: pa.Schema, key: Sequence[str]) -> bool:
    """Return whether a key is compared as text whatever its values are."""
    kind = schema.field(key[0]).type
    # Arrow searches no sorted decimals.
    return len(key) > 1 or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def identities_of(table: pa.Table, key: Sequence[str], *, as_text: bool) -> pa.Array:
    """Return the identities of rows; `as_text` if one of them needs it."""
    if as_text or always_text(table.schema, key):
        return _texts(table, key)
    return one_chunk(table[key[0]])


def hashes(rows: pa.Table, dropped: Collection[str] = ()) -> pa.Array:
    """Return a hash of each row's values, which identifies it: equal rows have equal ones.

    128 bits of BLAKE2b, so that nobody finds two rows with one hash. A column that is NULL does not
    count: a stored row keeps its hash when a column is added; nor do those that the source has
    dropped. 0 and -0 are different values here, as they are in the log.
    """
    names = sorted(each for each in rows.column_names if is_value(each) and each not in dropped)
    found = list[bytes]()
    for part in rows.select(names).to_batches(_HASHED_ROWS):
        shown = [_shown(part.column(at), name, dropped) for at, name in enumerate(names)]
        texts = pc.binary_join_element_wise(*shown, _scalar(b"")).to_pylist()
        found += [blake2b(text, digest_size=_HASH_BYTES).digest() for text in texts]
    return pa.array(found, pa.binary())


def is_value(name: str) -> bool:
    """Return whether a column of a mirror has values of the source."""
    return name not in OURS or name == EXACT


def odd_values(
    exact: Iterable[list[tuple[str, str]] | None], dropped: Collection[str]
) -> list[list[tuple[str, str]] | None]:
    """Return rows' values of `_exact`, in one order, without those of dropped columns."""
    kept = (row and sorted(each for each in row if each[0] not in dropped) for row in exact)
    return [each or None for each in kept]


def _shown(values: pa.Array, name: str, dropped: Collection[str]) -> pa.Array:
    """Return each value with its column's name, unambiguously; nothing for NULL."""
    if pa.types.is_map(values.type):  # it has no order
        odd = odd_values(values.to_pylist(), dropped)
        text = pa.array([each and repr(each).encode() for each in odd], pa.binary())
    else:
        text = _as_bytes(values)
    marked = pc.binary_join_element_wise(
        _scalar(name.encode()), text, _scalar(b""), _scalar(_SEPARATOR)
    )
    return pc.fill_null(marked, _scalar(b""))


def _texts(table: pa.Table, key: Sequence[str]) -> pa.Array:
    parts = [_text(table, name) for name in key]
    return pc.binary_join_element_wise(*parts, pa.scalar(_SEPARATOR, pa.binary()))


def _text(table: pa.Table, name: str) -> pa.Array:
    """Return a column's values as bytes: marked as a value, a text from `_exact`, or NULL."""
    values = one_chunk(table[name])
    text = _as_bytes(unsigned_zero(values))
    marked = pc.binary_join_element_wise(_scalar(b"v"), text, _scalar(b""))
    if not values.null_count:
        return marked
    odd = looked_up(one_chunk(table[EXACT]), name)
    exact = pc.binary_join_element_wise(_scalar(b"x"), odd.cast(pa.binary()), _scalar(b""))
    return pc.coalesce(marked, exact, _scalar(b"n"))


def _as_bytes(values: pa.Array) -> pa.Array:
    """Return the values as bytes without the separator, except in binary, which has its length."""
    if pa.types.is_binary(values.type):
        # Binary is the only type that may contain the separator.
        size = pc.binary_length(values).cast(pa.string()).cast(pa.binary())
        return pc.binary_join_element_wise(size, values, _scalar(b":"))
    if pa.types.is_list(values.type):
        shown = [None if each is None else repr(each).encode() for each in values.to_pylist()]
        return pa.array(shown, pa.binary())
    return values.cast(pa.string()).cast(pa.binary())


def newest(batch: ChangeBatch, key: Sequence[str]) -> ChangeBatch:
    """Return the batch, with only the newest of rows whose keys differ in 0 and -0.

    They are two keys in the log, but at most one of them has a row.
    """
    if not any(has_zero(batch.rows[name]) for name in key):
        return batch
    seqs = batch.rows[SEQ].combine_chunks()
    rows = pa.table({"key": identities_of(batch.rows, key, as_text=True), "seq": seqs})
    last = rows.group_by("key").aggregate([("seq", "max")])["seq_max"]
    return only(batch, pc.is_in(seqs, value_set=last.combine_chunks()))


def has_zero(values: pa.ChunkedArray) -> bool:
    """Return whether a float among the values is 0 or -0."""
    return pa.types.is_floating(values.type) and bool(pc.any(pc.equal(values, 0.0)).as_py())


def unsigned_zero(values: pa.Array) -> pa.Array:
    """Return the values with 0 in place of -0."""
    if not pa.types.is_floating(values.type):
        return values
    return pc.add(values, pa.scalar(0.0, values.type))


def _scalar(text: bytes) -> pa.Scalar:
    return pa.scalar(text, pa.binary())


def same(rows: pa.Table, name: str) -> str:
    """Return the condition that a key's column of these rows, `s`, is that of a stored row, `t`.

    Also where it is NULL, or its text is in `_exact`.
    """
    column = quoted(name)
    # 0 and -0 are the same key: adding 0 removes the sign.
    unsigned = " + 0.0" if has_zero(rows[name]) else ""
    equal = f"t.{column}{unsigned} = s.{column}{unsigned}"
    if not rows[name].null_count:
        return equal
    text = "'" + name.replace("'", "''") + "'"
    exact = [f"coalesce(map_extract({each}.{quoted(EXACT)}, {text})[1], '')"
             for each in "ts"]  # fmt: skip
    return f"({equal} OR (t.{column} IS NULL AND s.{column} IS NULL AND {exact[0]} = {exact[1]}))"
