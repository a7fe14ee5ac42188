"""The key of a row in one form, and what an alteration makes of it."""

from __future__ import annotations

import pyarrow as pa

from lockstep.conformance.store import VALUES
from lockstep.jobs.cuts.altered import as_altered
from lockstep.sinks.contract import Altered, AlteredColumn, Column, Version, renamed_key
from lockstep.sinks.delta import key_forms
from lockstep.sinks.delta.key_forms import KeyForms
from lockstep.sinks.delta.rows import EXACT_TYPE
from lockstep.sinks.delta.targets import Target

TOPIC = "shop.public.t"
OURS = [
    ("_seq", pa.int64()),
    ("_commit_lsn", pa.int64()),
    ("_committed_at", pa.timestamp("us", "UTC")),
    ("_exact", EXACT_TYPE),
]
FLOAT = Column("k", "float8", 701, -1, nullable=False)
NUMERIC = Column("k", "numeric", 1700, (5 << 16 | 2) + 4, nullable=False)
WIDER = NUMERIC._replace(modifier=(8 << 16 | 3) + 4)
INTEGER = Column("k", "int4", 23, -1, nullable=False)
BODY = Column("body", "text", 25, -1, nullable=True)


def version(id_: int, column: Column, mode: str = "string") -> Version:
    values = {**VALUES, "decimal.handling.mode": mode}
    return Version(id_, "public", "t", TOPIC, (column.name,), (column, BODY), values)


def forms(kind: pa.DataType, *versions: Version) -> KeyForms:
    key = versions[-1].key
    schema = pa.schema([(key[0], kind), ("body", pa.string()), *OURS])
    return KeyForms(Target("t", "", {}, schema, key, 0, 0, replaces=False, files={}), versions)


def test_floats_that_postgres_takes_for_one_key_have_one_form() -> None:
    written = ("0", "-0.0", "0.0", "1.5", '"NaN"', '"-Infinity"')
    keys = [(b'{"k":%b}' % text.encode(), 1) for text in written]
    found = forms(pa.float64(), version(1, FLOAT)).of(keys)
    assert found[0] == found[1] == found[2]
    assert len(set(found)) == 4


def test_a_number_has_one_form_whatever_its_scale_and_the_options_for_values_are() -> None:
    """In the order in which they are given, of whichever version each is."""
    older, newer = version(1, NUMERIC), version(2, WIDER, "double")
    one = forms(pa.decimal128(8, 3), older, newer)
    keys = [(b'{"k":1.500}', 2), (b'{"k":"1.50"}', 1), (b'{"k":"NaN"}', 1), (b'{"k":"NaN"}', 2)]
    first, same, odd, other = one.of(keys)
    assert (first, odd) == (same, other)
    assert first != odd


def test_only_keys_that_the_log_may_write_in_several_ways_are_rewritten() -> None:
    integer = version(1, INTEGER)
    schema = pa.schema([("k", pa.int32())])
    assert not key_forms.vary(schema, [integer, integer._replace(schema_id=2)])
    assert key_forms.vary(schema, [version(1, INTEGER, "double"), integer])
    assert key_forms.vary(pa.schema([("k", pa.float64())]), [version(1, FLOAT)])
    assert key_forms.vary(pa.schema([("k", pa.decimal128(5, 2))]), [version(1, NUMERIC)])


# A column of the key was renamed, and one was added.
BEFORE, AFTER = version(1, INTEGER), version(2, INTEGER._replace(name="id"))
ALTERED = Altered(
    5, BEFORE, AFTER, (AlteredColumn("id", "k"), AlteredColumn("body", None, b'"new"'))
)


def test_an_event_gets_the_alterations_after_it() -> None:
    source = b'{"seq":%d,"commit_lsn":"0/1","ordinal":1,"schema_id":%d,"ts_us":1}'
    older = b'{"op":"c","source":%b,"before":null,"after":{"k":5,"body":"b"}}' % (source % (4, 1))
    key, value, id_ = as_altered(b'{"k":5}', older, [ALTERED])
    assert (key, id_) == (b'{"id":5}', 2)
    assert b'"after":{"id":5,"body":"new"}' in value
    newer = b'{"op":"d","source":%b}' % (source % (6, 2))
    assert as_altered(b'{"id":5}', newer, [ALTERED]) == (b'{"id":5}', newer, 2)
    assert renamed_key(BEFORE, [ALTERED]) == ("id",) == renamed_key(AFTER, [ALTERED])
