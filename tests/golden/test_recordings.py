"""The decoder against what servers of each major sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc.decode.messages import (
    UNCHANGED,
    Binary,
    Delete,
    Insert,
    KeyTuple,
    LogicalMessage,
    Message,
    OldTuple,
    Origin,
    StreamAbort,
    StreamPrepare,
    Truncate,
    Type,
    Update,
)
from cdc.decode.pgoutput import decode
from cdc.errors import ProtocolError
from cdc.events import LSN
from tests.golden.reading import RECORDINGS, Recording, decode_all, load
from tests.golden.scenario import SCENARIOS, Scenario
from tests.property.pgoutput_writer import encode

MAJORS = (14, 15, 16, 17, 18)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
RECORDED = [load(path) for path in sorted(RECORDINGS.glob("*.jsonl"))]

every_recording = pytest.mark.parametrize(
    "recording", RECORDED, ids=[f"{one.major}-{one.scenario}" for one in RECORDED]
)
every_major = pytest.mark.parametrize("major", MAJORS)


def scenario_of(recording: Recording) -> Scenario:
    return BY_NAME[recording.scenario]


def messages_of(recording: Recording) -> Iterator[tuple[str, list[Message]]]:
    for step, payloads in recording.payloads.items():
        yield step, decode_all(payloads, parallel=scenario_of(recording).parallel)


def recorded(major: int, scenario: str) -> list[Message]:
    (recording,) = (one for one in RECORDED if (one.major, one.scenario) == (major, scenario))
    return [message for _, messages in messages_of(recording) for message in messages]


def test_every_major_has_every_scenario_that_it_can_play() -> None:
    expected = {
        (major, one.name) for one in SCENARIOS for major in MAJORS if major >= one.min_major
    }
    assert {(one.major, one.scenario) for one in RECORDED} == expected


@every_recording
def test_every_step_brings_the_messages_that_the_scenario_says(recording: Recording) -> None:
    found = {
        step: " ".join(type(message).__name__ for message in messages)
        for step, messages in messages_of(recording)
    }
    assert found == {step.name: step.kinds for step in scenario_of(recording).steps}


@every_recording
def test_written_again_the_bytes_are_the_same(recording: Recording) -> None:
    for step, messages in messages_of(recording):
        assert [encode(message) for message in messages] == recording.payloads[step]


@every_recording
def test_recorded_messages_cut_or_lengthened_are_refused(recording: Recording) -> None:
    parallel = scenario_of(recording).parallel
    for step, messages in messages_of(recording):
        in_stream = False
        for payload, message in zip(recording.payloads[step], messages, strict=True):
            # Cuts inside one long value are all equivalent.
            cuts = {*range(min(len(payload), 300)), len(payload) - 1}
            for broken in (*(payload[:cut] for cut in cuts), payload + b"\0"):
                with pytest.raises(ProtocolError):
                    decode(broken, in_stream=in_stream, parallel=parallel)
            in_stream = {"StreamStart": True, "StreamStop": False}.get(
                type(message).__name__, in_stream
            )


# Not the binary ones: a binary array holds the OID of its element's type, which differs.
@pytest.mark.parametrize("scenario", ["rows", "streamed"])
@every_major
def test_rows_are_the_same_from_every_major(scenario: str, major: int) -> None:
    def rows(of_major: int) -> list[object]:
        found: list[object] = []
        for message in recorded(of_major, scenario):
            match message:
                case Insert(new=new):
                    found.append(new)
                case Update(old=old, new=new):
                    found.append((old, new))
                case Delete(old=old):
                    found.append(old)
                case _:
                    pass
        return found

    assert rows(major) == rows(MAJORS[0])


@every_major
def test_unchanged_toast_is_not_null(major: int) -> None:
    updates = [one for one in recorded(major, "rows") if isinstance(one, Update)]
    kept = [one for one in updates if UNCHANGED in one.new]
    assert [(one.old, one.new) for one in kept[:2]] == [
        (None, (b"1", UNCHANGED, b"1")),
        (KeyTuple((b"1", None, None)), (b"2", UNCHANGED, b"1")),
    ]
    # Under identity full the value is in the old row.
    assert isinstance(kept[2].old, OldTuple)
    assert kept[2].old.values == (b"1", b"y" * 2100, b"0")
    assert kept[2].new == (b"1", UNCHANGED, b"1")


@every_major
def test_a_domain_is_described_by_its_base_type(major: int) -> None:
    types = [one for one in recorded(major, "rows") if isinstance(one, Type)]
    assert [(one.namespace, one.name) for one in types] == [
        ("golden", "mood"),
        ("golden", "_mood"),
        ("pg_catalog", "varchar"),
        ("golden", "spot"),
    ]


@every_major
def test_truncate_lists_the_tables_that_the_cascade_reached(major: int) -> None:
    first, second = (one for one in recorded(major, "rows") if isinstance(one, Truncate))
    assert (len(first.relation_ids), first.cascade, first.restart_identity) == (3, True, True)
    assert (len(second.relation_ids), second.cascade, second.restart_identity) == (1, False, False)


@every_major
def test_binary_values_are_not_taken_for_text(major: int) -> None:
    first = next(one for one in recorded(major, "rows-binary") if isinstance(one, Insert))
    assert first.new[0] == Binary((1).to_bytes(4, "big"))


@every_major
def test_a_streamed_origin_is_known_before_its_lsn(major: int) -> None:
    (plain,) = (one for one in recorded(major, "rows") if isinstance(one, Origin))
    (streamed,) = (one for one in recorded(major, "streamed") if isinstance(one, Origin))
    assert plain.commit_lsn == LSN.parse("0/ABCDEF")
    assert streamed.commit_lsn == LSN(0)


@every_major
def test_a_streamed_message_names_the_top_transaction_not_its_subtransaction(major: int) -> None:
    block = recorded(major, "streamed")
    (message,) = (one for one in block if isinstance(one, LogicalMessage))
    aborted = next(one for one in block if isinstance(one, StreamAbort))
    neighbour = block[block.index(message) - 1]
    assert isinstance(neighbour, Delete)
    assert message.xid == aborted.xid
    assert neighbour.xid not in (None, aborted.xid, aborted.subxid)


@pytest.mark.parametrize("major", MAJORS[2:])
def test_a_parallel_abort_says_where_and_when(major: int) -> None:
    parallel = [one for one in recorded(major, "parallel") if isinstance(one, StreamAbort)]
    serial = [one for one in recorded(major, "streamed") if isinstance(one, StreamAbort)]
    assert len(parallel) == len(serial) == 2
    assert all(one.abort_lsn and one.abort_time_us for one in parallel)
    assert all(one.abort_lsn is None and one.abort_time_us is None for one in serial)


@pytest.mark.parametrize("major", MAJORS[1:])
def test_a_streamed_transaction_can_be_prepared(major: int) -> None:
    (prepared,) = (one for one in recorded(major, "prepared") if isinstance(one, StreamPrepare))
    assert prepared.gid == "golden 3"
