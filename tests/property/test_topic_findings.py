"""Whatever happens to one topic, `verify` names it; what is as expected gives no finding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import GapError
from cdc.log.expected import EpochError, Expected, Retained, verify
from cdc.log.offsets import Observed, OffsetSpan

_NAMES = ("p.a.t", "p.a.u", "p.cdc.frontier", "p.cdc.schemas", "p.cdc.resume")
_MANY = 1_000
Log = tuple[Expected, Observed]


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """Return expectations, and topics that meet them."""
    counts = draw(st.dictionaries(st.sampled_from(_NAMES), st.integers(1, 3), min_size=1))
    expected = Expected(partitions=counts)
    spans = {}
    for topic, count in counts.items():
        expected.topic_ids[topic] = f"id of {topic}"
        for number in range(count):
            end = draw(st.integers(1, _MANY))
            retained = draw(st.integers(1, end))
            stable = draw(st.integers(0, end + 3))
            first = 0 if topic.endswith("schemas") else draw(st.integers(0, retained - 1))
            spans[topic, number] = OffsetSpan(first, stable, end + draw(st.integers(0, 3)))
            expected.ends[topic, number] = end
            if draw(st.booleans()):
                expected.retained[topic, number] = Retained(retained, 0.0)
    topics = {topic: (f"id of {topic}", count) for topic, count in counts.items()}
    return expected, Observed(topics, frozenset(), frozenset(), spans)


def delete(topic: str, log: Log) -> Log:
    expected, observed = log
    topics = {name: its for name, its in observed.topics.items() if name != topic}
    spans = {each: span for each, span in observed.spans.items() if each[0] != topic}
    return expected, Observed(topics, frozenset({topic}), frozenset(), spans)


def recreate(topic: str, log: Log) -> Log:
    return log[0], log[1]._replace(topics={**log[1].topics, topic: ("another", _count(topic, log))})


def add_partition(topic: str, log: Log) -> Log:
    topic_id, count = log[1].topics[topic]
    return log[0], log[1]._replace(topics={**log[1].topics, topic: (topic_id, count + 1)})


def lose_the_end(topic: str, log: Log) -> Log:
    span = log[1].spans[topic, 0]
    shorter = span._replace(end=log[0].ends[topic, 0] - 1)
    return log[0], log[1]._replace(spans={**log[1].spans, (topic, 0): shorter})


def overwrite(topic: str, log: Log) -> Log:
    return dataclasses.replace(log[0], regressed={(topic, 0): (1, 2)}), log[1]


def empty_too_soon(topic: str, log: Log) -> Log:
    expected, observed = log
    span = observed.spans[topic, 0]
    retained = {**expected.retained, (topic, 0): Retained(span.end, 0.0)}
    spans = {**observed.spans, (topic, 0): span._replace(first=span.end)}
    return dataclasses.replace(expected, retained=retained), observed._replace(spans=spans)


def _count(topic: str, log: Log) -> int:
    return log[1].topics[topic][1]


_DAMAGES: list[Callable[[str, Log], Log]] = [
    *(delete, recreate, add_partition),
    *(lose_the_end, overwrite, empty_too_soon),
]


@given(logs())
def test_topics_that_meet_the_expectations_give_no_finding(log: Log) -> None:
    assert list(verify(*log)) == []


@given(logs(), st.sampled_from(_DAMAGES), st.data())
def test_one_damaged_topic_is_found_and_no_other_is_named(
    log: Log, damage: Callable[[str, Log], Log], data: st.DataObject
) -> None:
    topic = data.draw(st.sampled_from(sorted(log[0].partitions)))
    found = list(verify(*damage(topic, log)))
    assert found
    assert all(f"topic {topic}" in each.what for each in found)
    loses_no_event = damage is add_partition or (
        damage is empty_too_soon and not topic.endswith(("schemas", "frontier"))
    )
    assert {type(each) for each in found} == {EpochError if loses_no_event else GapError} or (
        # The beginning of the topic of table versions is checked in addition to its retention.
        damage is empty_too_soon and topic.endswith("schemas")
    )


@given(logs(), st.sampled_from(_DAMAGES), st.data())
def test_less_that_is_answered_gives_no_further_finding(
    log: Log, damage: Callable[[str, Log], Log], data: st.DataObject
) -> None:
    """A broker that does not answer proves nothing."""
    topic = data.draw(st.sampled_from(sorted(log[0].partitions)))
    expected, observed = damage(topic, log)
    silent = data.draw(st.sets(st.sampled_from(sorted(log[0].partitions))))
    less = Observed(
        {name: its for name, its in observed.topics.items() if name not in silent},
        observed.missing - silent,
        frozenset(silent),
        {each: span for each, span in observed.spans.items() if each[0] not in silent},
    )
    all_found = {each.what for each in verify(expected, observed)}
    assert {each.what for each in verify(expected, less)} <= all_found


@given(logs())
def test_what_was_observed_is_expected_from_then_on(log: Log) -> None:
    expected, observed = log
    expected.add_observed(observed)
    assert list(verify(expected, observed)) == []
    for (topic, number), span in observed.spans.items():
        shorter = {**observed.spans, (topic, number): span._replace(end=span.end - 1)}
        assert list(verify(expected, observed._replace(spans=shorter)))
