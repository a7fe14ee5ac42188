"""No bytes that a third party writes under our prefixes raise an error or are trusted."""

from __future__ import annotations

import hashlib
import itertools
import json
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.decode import messages, pgoutput
from cdc.decode.messages import LogicalMessage
from cdc.encode import ddl
from cdc.encode.logical_messages import OURS
from cdc.events import LSN
from cdc.log.completeness import Completeness
from cdc.log.follower_reports import CANARY
from cdc.snapshot.incremental import commands, watermarks
from cdc.snapshot.incremental.records import KEPT, TableName
from cdc.snapshot.incremental.topic import IncrementalLog
from cdc.snapshot.incremental.verifier import Verifier
from cdc.source import authority
from cdc.source.authority import (
    CANARY_PURPOSE,
    COMMAND_PURPOSE,
    Refusals,
    Scope,
    TriggerKey,
    UnprovenError,
)
from lockstep.jobs.apply.canaries import sent_at
from tests.property.incremental_world import KEYS, Database, Source, Worker, snapshots
from tests.property.pgoutput_writer import encode
from tests.property.stream import MANY, TIME_US, Session, begin, commit, frame, position
from tests.simulation.run import config

_CONFIG = config(100_000)
_SCOPE = Scope(_CONFIG.pipeline, "7")
_SECRET = authority.secret_of(_CONFIG) or b""
_KEY = TriggerKey(b"i" * 64, b"o" * 64)
_PREFIXES = (
    *(commands.COMMAND, commands.SIGNAL, watermarks.PREFIX, ddl.PREFIX, CANARY),
    *("lockstep.", "lockstep.other", "cdc.", "cdc.other"),
)

_words = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
_shaped = st.fixed_dictionaries(
    {},
    optional={
        "pipeline": st.just(_CONFIG.pipeline) | _words,
        "id": st.text() | _words,
        "at_us": st.just(TIME_US) | _words,
        "body": st.sampled_from(["e30=", ""]) | _words,
        "mac": st.text() | _words,
    },
)
_deep = st.integers(1, 20_000).map(lambda depth: b'{"x":' * depth)
_heads = st.lists(st.binary(max_size=20), min_size=5, max_size=7).map(b" ".join)
_contents = (
    st.binary()
    | _words.map(lambda each: json.dumps(each).encode())
    | _shaped.map(lambda each: json.dumps(each).encode())
    | _deep
    | st.builds(lambda head, body: b"1 k " + head + b"\n" + body, _heads, st.binary())
    | st.integers(authority.MAX_BYTES, authority.MAX_BYTES + 9).map(bytes)
)


def trigger_signed(purpose: str, xid: int, body: bytes, at_us: int = TIME_US) -> bytes:
    """Return what a trigger's function writes."""
    head = b"1 k %d %d 0a" % (xid, at_us)
    inner = hashlib.sha256(_KEY.inner + purpose.encode() + b"\n" + head + b"\n" + body).digest()
    return head + b" " + hashlib.sha256(_KEY.outer + inner).hexdigest().encode() + b"\n" + body


class Hearing:
    """A session that receives messages."""

    def __init__(self) -> None:
        self.refusals = Refusals()
        self.session = Session(position(), KEYS, max_events=MANY)
        keys = {"ddl": {"k": _KEY}, "signal": {"k": _KEY}}
        verifier = Verifier(_CONFIG, "7", self.refusals, lambda: keys)
        verifier.read_keys()
        self.snapshots = snapshots(
            _CONFIG, Worker(), self.session.sequencer, verifier, lambda: Source(Database(Random(0)))
        )
        self.snapshots.adopt(IncrementalLog([], [], []), Completeness())
        self._at = 0x2000

    def receive(
        self, prefix: str, content: bytes, *, transactional: bool = True, xid: int = 771
    ) -> int:
        """Receive a message; return how many events it caused."""
        before, self._at = self.session.sequencer.seq, self._at + 0x100
        message = frame(
            LogicalMessage(transactional, LSN(self._at - 8), prefix, content), self._at - 8
        )
        around = [begin(self._at, xid), message, commit(self._at)] if transactional else [message]
        self.session.feed(around)
        return self.session.sequencer.seq - before


@given(st.sampled_from(_PREFIXES), _contents, st.booleans())
def test_nothing_unproven_is_obeyed_or_published(
    prefix: str,
    content: bytes,
    transactional: bool,  # noqa: FBT001 - Hypothesis gives it
) -> None:
    hearing = Hearing()
    assert hearing.receive(prefix, content, transactional=transactional) == 0
    assert hearing.snapshots.progress() == []
    assert hearing.snapshots.take() == []
    separates = (prefix, content, transactional) == (OURS, b"", True)  # DDL from what follows it
    assert sum(hearing.refusals.counts.values()) == (0 if separates else 1)


def test_watermarks_of_other_sessions_are_counted_and_no_hint() -> None:
    hearing = Hearing()
    of_another = watermarks.Signer().watermark("a", 1, 2, low=True)
    hearing.receive(watermarks.PREFIX, of_another)
    assert hearing.refusals.counts == {("watermark", "of another session"): 1}
    assert hearing.refusals.fields() == []
    hearing.receive(watermarks.PREFIX, b"forged")
    expected = {"kind": "watermark", "reason": "not readable", "count": 1}
    assert hearing.refusals.fields() == [expected]


@given(st.binary(), st.integers(), st.binary(max_size=40))
def test_what_was_signed_is_known_and_any_change_of_it_is_not(
    body: bytes, at_us: int, other: bytes
) -> None:
    content = authority.sign(_SECRET, COMMAND_PURPOSE, _SCOPE, at_us, body)
    signed = authority.proven(_SECRET, COMMAND_PURPOSE, _SCOPE, content)
    assert (signed.body, signed.at_us) == (body, at_us)
    fields: dict[str, Any] = json.loads(content)
    changes: list[dict[str, Any]] = [
        {"id": "x" + fields["id"]},
        {"at_us": at_us + 1},
        {"body": json.loads(msgspec.json.encode(body + b"!"))},
        {"mac": json.loads(msgspec.json.encode(other))},
    ]
    for change in changes:
        with pytest.raises(UnprovenError):
            authority.proven(_SECRET, COMMAND_PURPOSE, _SCOPE, json.dumps(fields | change).encode())
    for secret, purpose, scope in (
        (_SECRET + b"x", COMMAND_PURPOSE, _SCOPE),
        (_SECRET, CANARY_PURPOSE, _SCOPE),
        (_SECRET, COMMAND_PURPOSE, _SCOPE._replace(system_identifier="8")),
        (_SECRET, COMMAND_PURPOSE, _SCOPE._replace(pipeline="another")),
        (None, COMMAND_PURPOSE, _SCOPE),
    ):
        with pytest.raises(UnprovenError):
            authority.proven(secret, purpose, scope, content)


@given(st.binary(), st.integers(0, 2**32 - 1))
def test_what_a_trigger_signed_is_worth_something_in_its_transaction_only(
    body: bytes, xid: int
) -> None:
    content, keys = trigger_signed("ddl", xid + 2**32, body), {"k": _KEY}

    def reported(
        content: bytes = content, purpose: str = "ddl", xid: int = xid, late_us: int = 5
    ) -> Any:  # noqa: ANN401 - what it returns
        return authority.verified_trigger_message(
            keys, purpose, content, xid=xid, committed_at_us=TIME_US + late_us
        )

    assert reported().body == body
    changes: list[dict[str, Any]] = [
        {"xid": xid ^ 1},
        {"purpose": "signal"},
        {"content": content + b"!"},
        {"content": b"1 k 9" + content[5:]},
        {"late_us": authority.MAX_OPEN_US + 1},
    ]
    for changed in changes:
        with pytest.raises(UnprovenError):
            reported(**changed)


def test_a_command_is_obeyed_once_soon_and_by_its_pipeline() -> None:
    hearing = Hearing()
    start = commands.Command(do="start", id="a", tables=(TableName("public", "wide"),))
    body = commands.encode(start)
    content = authority.sign(_SECRET, COMMAND_PURPOSE, _SCOPE, TIME_US, body)
    hearing.receive(commands.COMMAND, content)
    assert [each.id for each in hearing.snapshots.progress()] == ["a"]
    hearing.receive(commands.COMMAND, content)
    assert hearing.refusals.counts == {("command", "sent before"): 1}
    late = TIME_US - authority.MAX_AGE_US - 1
    hearing.receive(commands.COMMAND, authority.sign(_SECRET, COMMAND_PURPOSE, _SCOPE, late, body))
    assert hearing.refusals.counts["command", "too old"] == 1


def test_a_command_that_empties_a_table_takes_no_condition() -> None:
    """Any signer: followers would lose the rest of the table."""
    hearing = Hearing()
    of = (TableName("public", "wide"),)
    for more in ({"where": "n > 1"}, {"keys": (("1",),)}):
        start = commands.Command(do="start", tables=of, empty_first=True, **more)
        body = commands.encode(start)
        hearing.receive(
            commands.COMMAND, authority.sign(_SECRET, COMMAND_PURPOSE, _SCOPE, TIME_US, body)
        )
    assert hearing.snapshots.progress() == []
    assert hearing.refusals.counts == {("command", "not readable"): 2}


def test_signals_start_no_more_snapshots_than_may_be_active(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cdc.snapshot.incremental.records.MOST_KEPT", KEPT)
    hearing = Hearing()
    most, xids = commands.MAX_ACTIVE[commands.SIGNAL], itertools.count(1_000)

    def signal(name: str, tables: int) -> None:
        data = {"data-collections": [f"public.t{number}" for number in range(tables)]}
        body = json.dumps({"id": name, "type": "execute-snapshot", "data": data}).encode()
        xid = next(xids)
        hearing.receive(commands.SIGNAL, trigger_signed("signal", xid, body), xid=xid)

    for number in range(most // 100 - 1):
        signal(f"s{number}", 100)
    signal("last", 99)
    assert len(hearing.snapshots.progress()) == most - 1
    signal("full", 2)
    assert len(hearing.snapshots.progress()) == most
    (refused,) = [each for each in hearing.snapshots.known() if not each.active]
    assert (refused.id, refused.state) == ("full-2", "failed")
    assert "1,000 incremental snapshots are active: no more start" in (refused.why or "")
    hearing.snapshots.take()
    for _ in range(KEPT + 1):
        signal(f"more{next(xids)}", 1)
        hearing.snapshots.take()
    assert len(hearing.snapshots.known()) == most + KEPT, "the log keeps a bounded number"


def test_a_canary_is_published_once_with_its_time_alone() -> None:
    hearing = Hearing()
    secret = authority.canary_secret(_CONFIG)
    content = authority.sign(secret, CANARY_PURPOSE, _SCOPE, TIME_US, b"")
    assert hearing.receive(CANARY, content, transactional=False) == 1
    assert hearing.receive(CANARY, content, transactional=False) == 0
    assert hearing.receive(CANARY, content) == 0, "in a transaction it is nobody's"
    tomorrow = authority.sign(secret, CANARY_PURPOSE, _SCOPE, 2**62, b"")
    assert hearing.receive(CANARY, tomorrow, transactional=False) == 0
    assert hearing.receive("users.own", b"as before", transactional=False) == 1


@given(_contents | st.none())
def test_a_follower_passes_over_what_is_no_canary(value: bytes | None) -> None:
    assert sent_at(value) is None


@given(st.binary().filter(lambda each: b"\0" not in each), st.binary())
def test_a_prefix_of_any_bytes_is_decoded(prefix: bytes, content: bytes) -> None:
    """Text from a database of another encoding arrives unconverted."""
    written = encode(LogicalMessage(True, LSN(9), "PREFIX", content))  # noqa: FBT003 - transactional
    message = pgoutput.decode(written.replace(b"PREFIX", prefix))
    assert isinstance(message, messages.LogicalMessage)
    assert message.content == content
    message.prefix.encode()


def test_refusals_are_counted_and_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    refusals = Refusals(lambda: now[0])
    for _ in range(1_000):
        refusals.refuse("command", "not signed", "0/1")
    assert len(caplog.records) == 1
    now[0] = 61.0
    refusals.refuse("command", "not signed", "0/2")
    assert len(caplog.records) == 2
    assert refusals.counts == {("command", "not signed"): 1_001}
