"""A DDL statement's message becomes a record; any other message does not."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from cdc.encode import ddl
from cdc.events import LSN
from cdc.log import records

STATEMENT: dict[str, Any] = {
    "event": "ddl_command_end",
    "tag": "ALTER TABLE",
    "objects": [{"type": "table", "schema": "public", "identity": "public.a"}],
    "object_count": 1,
    "statement": "ALTER TABLE a ADD b int",
    "statement_characters": 23,
    "withheld": False,
    "role": "me",
    "session_role": "you",
}


def record(content: bytes, *, literals: bool = True) -> tuple[str, bytes, bytes] | None:
    return ddl.record(
        "shop",
        content,
        lsn=LSN(0x30),
        commit_lsn=LSN(0x40),
        ordinal=2,
        seq=7,
        committed_at_us=5,
        tx_id=9,
        literals=literals,
    )


def test_a_record_holds_the_statement_and_its_position() -> None:
    made = record(orjson.dumps(STATEMENT))
    assert made is not None
    topic, key, value = made
    assert (topic, orjson.loads(key)) == ("shop.cdc.schema", {"ddl": "0/30"})
    assert not records.is_schema_key(key)
    assert records.is_schema_key(records.schema_key(12))
    place = {"lsn": "0/30", "commit_lsn": "0/40", "ordinal": 2, "seq": 7, "tx_id": 9}
    assert orjson.loads(value) == STATEMENT | place | {"format": 1, "committed_at_us": 5}


def test_where_columns_are_hidden_a_statement_has_no_literal() -> None:
    sent = STATEMENT | {"statement": "UPDATE a SET b = 'ada@x.org'; ALTER TABLE a ADD c int"}
    hidden = record(orjson.dumps(sent), literals=False)
    assert hidden is not None
    assert orjson.loads(hidden[2])["statement"] == "UPDATE a SET b = ?; ALTER TABLE a ADD c int"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[1]",
        b"\xff\xfe",
        orjson.dumps(STATEMENT | {"objects": None}),
        orjson.dumps(STATEMENT | {"statement": "x" * 1_000_000}),
    ],
)
def test_what_an_event_trigger_did_not_write_gives_none(content: bytes) -> None:
    assert record(content) is None


def test_bytes_of_an_unknown_encoding_are_kept_as_far_as_they_can_be_read() -> None:
    made = record(orjson.dumps(STATEMENT | {"role": "ROLE"}).replace(b"ROLE", b"\xe9"))
    assert made is not None
    assert orjson.loads(made[2])["role"] == "\ufffd"
