"""A key whose numbers DDL has made texts: another key in the log, and one row in a mirror."""

from __future__ import annotations

import pytest

from cdc.errors import ConfigError
from lockstep.conformance.memory import MemorySink
from lockstep.conformance.store import VALUES
from lockstep.jobs.apply.altering import alter
from lockstep.jobs.compacting.older import uncompacted_topics
from lockstep.jobs.cuts.schemas import key_form
from lockstep.sinks.contract import Altered, AlteredColumn, Column, Version

TOPIC = "shop.public.t"
INTEGER = Column("k", "int4", 23, -1, nullable=False)
BODY = Column("body", "text", 25, -1, nullable=True)


def version(id_: int, column: Column) -> Version:
    return Version(id_, "public", "t", TOPIC, (column.name,), (column, BODY), VALUES)


# A key's integers became texts, and it was renamed.
BEFORE, AFTER = version(1, INTEGER), version(2, Column("id", "text", 25, -1, nullable=False))
ALTERED = Altered(
    5, BEFORE, AFTER,
    (AlteredColumn("id", "k", as_text=True), AlteredColumn("body", None, b'"new"')),
)  # fmt: skip


def test_a_key_whose_numbers_became_texts_is_the_key_of_later_events() -> None:
    assert ALTERED.key(b'{"k":-5}') == b'{"id":"-5"}'
    assert ALTERED.former_key(b'{"id":"-5"}') == b'{"k":-5}'
    assert ALTERED.former_key(b'{"id":"05"}') is None, "it was no number: no row had it"


def test_integers_that_became_texts_are_another_key_in_the_log() -> None:
    """A reader of the log has each row twice: under its number and under its text."""
    renamed = BEFORE._replace(schema_id=3, key=("id",))
    longer = version(4, INTEGER._replace(type="int8", type_id=20))
    texts = version(5, INTEGER._replace(type="text", type_id=25))
    assert key_form(BEFORE) == key_form(longer)
    assert len({key_form(each) for each in (BEFORE, renamed, texts)}) == 3
    assert not uncompacted_topics([BEFORE, longer])
    assert uncompacted_topics([BEFORE, texts]) == {TOPIC}


def test_a_store_whose_keys_are_the_logs_refuses_that_they_become_texts() -> None:
    same = AFTER._replace(key=("k",), columns=(AFTER.columns[0]._replace(name="k"), BODY))
    columns = (AlteredColumn("k", "k", as_text=True), AlteredColumn("body", "body"))
    sink = MemorySink("texts", complete_rows=True)
    sink.open()
    with pytest.raises(ConfigError, match=r"has another key now \(k\)"):
        alter(sink, Altered(5, BEFORE, same, columns))
