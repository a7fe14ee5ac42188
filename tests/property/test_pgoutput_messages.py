"""The decoder against every message a writer can write, and against malformed bytes."""

from __future__ import annotations

from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.decode.messages import (
    UNCHANGED,
    Begin,
    BeginPrepare,
    Binary,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    KeyTuple,
    LogicalMessage,
    Message,
    OldTuple,
    Origin,
    Prepare,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    TupleData,
    Type,
    Update,
    Value,
)
from cdc.decode.pgoutput import decode
from cdc.errors import ProtocolError
from cdc.events import LSN
from tests.property.pgoutput_writer import encode

T = TypeVar("T")

EPOCH_US = 946_684_800_000_000

uint32 = st.integers(0, 2**32 - 1)
lsns = st.integers(1, 2**64 - 1).map(LSN)
lsns_or_zero = st.integers(0, 2**64 - 1).map(LSN)
times_us = st.integers(-(2**63) + EPOCH_US, 2**63 - 1 + EPOCH_US)
# Postgres allows any character in a name but zero; surrogates are not characters.
names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=70)
namespaces = names.map(lambda name: name or "pg_catalog")

values: st.SearchStrategy[Value] = st.one_of(
    st.binary(max_size=40), st.none(), st.just(UNCHANGED), st.binary(max_size=40).map(Binary)
)
tuples: st.SearchStrategy[TupleData] = st.lists(values, max_size=8).map(tuple)
olds: st.SearchStrategy[KeyTuple | OldTuple] = st.one_of(
    st.builds(KeyTuple, tuples), st.builds(OldTuple, tuples)
)
columns = st.builds(RelationColumn, st.booleans(), names, uint32, st.integers(-(2**31), 2**31 - 1))


def tuple_of(elements: st.SearchStrategy[T]) -> st.SearchStrategy[tuple[T, ...]]:
    return st.lists(elements, max_size=6).map(tuple)


def changes(xids: st.SearchStrategy[int | None]) -> st.SearchStrategy[Message]:
    identities = st.sampled_from(ReplicaIdentity)
    return st.one_of(
        st.builds(Origin, lsns_or_zero, names),
        st.builds(Relation, uint32, namespaces, names, identities, tuple_of(columns), xids),
        st.builds(Type, uint32, namespaces, names, xids),
        st.builds(Insert, uint32, tuples, xids),
        st.builds(Update, uint32, st.none() | olds, tuples, xids),
        st.builds(Delete, uint32, olds, xids),
        st.builds(Truncate, tuple_of(uint32), st.booleans(), st.booleans(), xids),
        st.builds(LogicalMessage, st.booleans(), lsns_or_zero, names, st.binary(max_size=40), xids),
    )


in_stream = st.one_of(changes(uint32), st.just(StreamStop()))
outside = st.one_of(
    changes(st.none()),
    st.builds(Begin, lsns, times_us, uint32),
    st.builds(Commit, lsns, lsns, times_us),
    st.builds(StreamStart, uint32, st.booleans()),
    st.builds(StreamCommit, uint32, lsns, lsns, times_us),
    st.builds(BeginPrepare, lsns, lsns, times_us, uint32, names),
    st.builds(Prepare, lsns, lsns, times_us, uint32, names),
    st.builds(CommitPrepared, lsns, lsns, times_us, uint32, names),
    st.builds(RollbackPrepared, lsns, lsns, times_us, times_us, uint32, names),
    st.builds(StreamPrepare, lsns, lsns, times_us, uint32, names),
)
serial_aborts = st.builds(StreamAbort, uint32, uint32)
parallel_aborts = st.builds(StreamAbort, uint32, uint32, lsns_or_zero, times_us)
booleans = st.booleans()


@st.composite
def framed(draw: st.DrawFn) -> tuple[Message, bool, bool]:
    """Draw a message with the facts that the caller of `decode` must know about its context."""
    inside, parallel = draw(booleans), draw(booleans)
    if inside:
        return draw(in_stream), inside, parallel
    return draw(outside | (parallel_aborts if parallel else serial_aborts)), inside, parallel


@given(framed())
def test_decode_inverts_encode(case: tuple[Message, bool, bool]) -> None:
    message, inside, parallel = case
    assert decode(encode(message), in_stream=inside, parallel=parallel) == message


@given(framed())
def test_every_strict_prefix_raises(case: tuple[Message, bool, bool]) -> None:
    message, inside, parallel = case
    payload = encode(message)
    for length in range(len(payload)):
        with pytest.raises(ProtocolError):
            decode(payload[:length], in_stream=inside, parallel=parallel)


@given(framed(), st.binary(min_size=1, max_size=9))
def test_every_trailing_byte_raises(case: tuple[Message, bool, bool], trailing: bytes) -> None:
    message, inside, parallel = case
    with pytest.raises(ProtocolError):
        decode(encode(message) + trailing, in_stream=inside, parallel=parallel)


def assert_decodes_faithfully_or_raises(payload: bytes, *, inside: bool, parallel: bool) -> None:
    """Whatever is accepted is understood completely: written again, the bytes are the same."""
    try:
        message = decode(payload, in_stream=inside, parallel=parallel)
    except ProtocolError:
        return
    # These have two spellings: a schema's name, which Postgres shortens, and never sends in full;
    # and a prefix that is not UTF-8.
    escaped = isinstance(message, LogicalMessage) and "\\x" in message.prefix
    assert encode(message) == payload or escaped or b"pg_catalog" in payload


@given(
    tag=st.sampled_from(b"BCORYIUDTMSEcAbPKrpX"),
    rest=st.binary(max_size=200),
    inside=booleans,
    parallel=booleans,
)
def test_random_bytes_decode_faithfully_or_raise(
    *, tag: int, rest: bytes, inside: bool, parallel: bool
) -> None:
    assert_decodes_faithfully_or_raises(bytes([tag]) + rest, inside=inside, parallel=parallel)


@given(framed(), st.data())
def test_mutated_messages_decode_faithfully_or_raise(
    case: tuple[Message, bool, bool], data: st.DataObject
) -> None:
    message, inside, parallel = case
    payload = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
        if not payload:
            break
    assert_decodes_faithfully_or_raises(bytes(payload), inside=inside, parallel=parallel)
