"""The pipeline's own records: exact both ways, and refused if they cannot be trusted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.encode.ddl import DDLRecord
from cdc.errors import ConfigError, Exit, Policy
from cdc.events import LSN, Frontier, PartitionEnd
from cdc.log import records
from cdc.log.follower_reports import FollowerRecord
from cdc.log.records import (
    FrontierRecord,
    PinnedPublication,
    Record,
    ResumeIdentity,
    ResumePosition,
    SchemaColumn,
    SchemaRecord,
)

TOPIC = "shop.cdc.resume"
IDENTITY = ResumeIdentity(
    pipeline="shop",
    epoch=1,
    system_identifier="7431000000000000000",
    timeline=1,
    database="shop",
    slot="lockstep_shop",
    publication=PinnedPublication("lockstep_shop", 16411, {"public.users": 72, 'public."a.b"': 0}),
    partitions={"shop.public.users": 4},
    topic_ids={"shop.public.users": "aXb"},
)
POSITION = ResumePosition(
    end_lsn=LSN.parse("0/16E9088"),
    commit_lsn=LSN.parse("0/16E9058"),
    ordinal=3,
    open=False,
    seq=42,
    committed_at_us=1767323045123456,
    schema_id=5,
    pending=(("shop.public.users", 0, 3),),
    owner="host:123:9f3c",
    at_us=1767323045130000,
)
FRONTIER = FrontierRecord(
    pipeline="shop",
    epoch=1,
    lsn=LSN.parse("FFFFFFFF/FFFFFFFF"),
    seq=2**63 - 1,
    committed_at_us=1767323045123456,
    partitions=(("shop.public.users", 0, 1017, 3), ("shop.public.users", 3, 2, 1)),
)
SCHEMA = SchemaRecord(
    schema_id=1,
    relation_id=16402,
    schema="public",
    table='Ünï "q"',
    topic="shop.public.users",
    replica_identity="d",
    from_lsn=LSN.parse("0/16E8F10"),
    key=("id",),
    columns=(
        SchemaColumn(name="id", type_id=20, type="int8", type_modifier=-1, nullable=False),
        SchemaColumn(name="x", type_id=90001, type="public.mood", type_modifier=4, nullable=None),
    ),
)
ALL: list[Record] = [IDENTITY, POSITION, FRONTIER, SCHEMA]
lsns = st.integers(0, 2**64 - 1).map(LSN)


@pytest.mark.parametrize("record", ALL, ids=lambda record: type(record).__name__)
def test_a_record_read_back_is_the_same(record: Record) -> None:
    assert records.decode(type(record), records.encode(record), TOPIC) == record


def test_lsns_are_text_as_postgres_writes_them() -> None:
    """A JSON reader would round a 64-bit number."""
    assert json.loads(records.encode(POSITION))["end_lsn"] == "0/16E9088"
    assert json.loads(records.encode(FRONTIER))["lsn"] == "FFFFFFFF/FFFFFFFF"
    assert json.loads(records.encode(SCHEMA))["from_lsn"] == "0/16E8F10"


@given(lsns, lsns, st.booleans(), st.integers(0, 2**63 - 1))
def test_any_position_read_back_is_the_same(
    end_lsn: LSN,
    commit_lsn: LSN,
    is_open: bool,  # noqa: FBT001 - Hypothesis gives arguments by place
    seq: int,
) -> None:
    position = ResumePosition(
        end_lsn=end_lsn,
        commit_lsn=commit_lsn,
        ordinal=1,
        open=is_open,
        seq=seq,
        committed_at_us=0,
        schema_id=0,
        owner="",
        at_us=0,
    )
    assert records.decode(ResumePosition, records.encode(position), TOPIC) == position


def test_the_documented_examples_are_read() -> None:
    """The contract's own JSON, so that the two cannot drift apart."""
    contract = (Path(__file__).parents[2] / "docs" / "EVENTS.md").read_text(encoding="utf-8")
    blocks = [block.encode() for block in re.findall(r"```json\n(.*?)```", contract, re.DOTALL)]
    kinds: tuple[type[Any], ...] = (
        ResumeIdentity, ResumePosition, FrontierRecord, FollowerRecord, SchemaRecord, DDLRecord,
    )  # fmt: skip
    assert len(blocks) == 1 + len(kinds)
    for kind, block in zip(kinds, blocks[1:], strict=True):
        record: Record = records.decode(kind, block, TOPIC)
        assert json.loads(records.encode(record)) == json.loads(block)


def test_a_field_that_a_reader_may_ignore_is_ignored() -> None:
    more = json.loads(records.encode(POSITION)) | {"mood": "good"}
    assert records.decode(ResumePosition, json.dumps(more).encode(), TOPIC) == POSITION


@pytest.mark.parametrize("record", ALL, ids=lambda record: type(record).__name__)
def test_a_newer_format_is_refused(record: Record) -> None:
    """Even if its fields would not fit: the error is about the format, not about a field."""
    known = records.newest_format(type(record))
    newer = json.dumps({"format": known + 1, "seq": "of another kind"}).encode()
    with pytest.raises(ConfigError) as raised:
        records.decode(type(record), newer, TOPIC)
    assert TOPIC in raised.value.what
    assert f"format {known + 1}; this version reads up to {known}" in raised.value.what
    assert "or a newer one" in raised.value.hint
    assert raised.value.exit_code is Exit.CONFIG
    assert raised.value.policy is Policy.HALT


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"null",
        b"5",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"format": 1}',
        b'{"format": "1"}',
        b'{"format": 2.5}',
        records.encode(POSITION)[:-1],
        records.encode(POSITION) + b"x",
        records.encode(POSITION).replace(b'"0/16E9088"', b'"nowhere"'),
        records.encode(POSITION).replace(b'"0/16E9088"', b'"-1/0"'),
        records.encode(POSITION).replace(b'"0/16E9088"', b"24023176"),
        records.encode(POSITION).replace(b'"seq":42', b'"seq":"42"'),
        records.encode(IDENTITY),
    ],
)
def test_garbage_is_refused_with_the_topic_and_a_remedy(garbage: bytes) -> None:
    with pytest.raises(ConfigError) as raised:
        records.decode(ResumePosition, garbage, TOPIC)
    assert f"topic {TOPIC} holds a ResumePosition that can't be read" in raised.value.what
    assert "log.prefix" in raised.value.hint
    assert raised.value.exit_code is Exit.CONFIG


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(value: bytes) -> None:
    for kind in (ResumeIdentity, ResumePosition, FrontierRecord, SchemaRecord):
        with pytest.raises(ConfigError):
            records.decode(kind, value, TOPIC)


def test_keys_name_pipeline_and_part() -> None:
    assert records.resume_key("shop", "identity") == b'{"pipeline":"shop","part":"identity"}'
    assert records.frontier_key("shop") == b'{"pipeline":"shop"}'
    assert records.schema_key(7) == b'{"schema_id":7}'


def test_a_frontier_record_gives_the_frontier() -> None:
    ends = (
        PartitionEnd("shop.public.users", 0, 1017, 3),
        PartitionEnd("shop.public.users", 3, 2, 1),
    )
    expected = Frontier(1, FRONTIER.lsn, FRONTIER.seq, FRONTIER.committed_at_us, ends)
    assert FRONTIER.frontier() == expected


def test_a_kinds_annotations_are_not_evaluated_for_each_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That takes thirty times as long as decoding it."""
    value = records.encode(IDENTITY)
    first = records.decode(ResumeIdentity, value, TOPIC)
    monkeypatch.setattr("msgspec.structs.fields", lambda _: pytest.fail("evaluated again"))
    assert records.decode(ResumeIdentity, value, TOPIC) == first


def test_threads_may_read_the_first_record_of_a_kind_at_once() -> None:
    """In a process of its own: without the lock msgspec ends it by SIGSEGV, soon."""
    done = subprocess.run([sys.executable, "-c", _FIRST_READERS], timeout=60, check=False)
    assert done.returncode == 0


_FIRST_READERS = """
import sys, threading, types
from cdc.log import records

CODE = '''
from __future__ import annotations
import msgspec
class Part(msgspec.Struct):
    a: int | None = None
class Kind(msgspec.Struct):
''' + "".join(f"    f{n}: int | list[str] | None = None\\n" for n in range(30)) + '''
    parts: list[Part] = []
'''
sys.setswitchinterval(1e-6)
failed = []
threading.excepthook = failed.append
for n in range(60):
    module = sys.modules[f"kind{n}"] = types.ModuleType(f"kind{n}")
    exec(CODE, module.__dict__)
    start = threading.Barrier(4)

    def read():
        start.wait()
        for _ in range(20):
            assert records.decode(module.Kind, b'{"f1":1,"parts":[{"a":2}]}', "t").parts[0].a == 2

    threads = [threading.Thread(target=read) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
sys.exit(len(failed))
"""
