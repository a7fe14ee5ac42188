"""Followers' reports, written and read back on a real broker: the newest valid one, at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from cdc.config import Config
from cdc.errors import ConfigError
from cdc.events import LSN
from cdc.log import names, topics, view_requests
from cdc.log.consumer import LogConsumer
from cdc.log.follower_reports import FollowerRecord, Readings, Reports, read
from cdc.log.view_requests import ViewRequest, ViewRequests
from tests.fixtures.daemon import wait_until
from tests.fixtures.reported import reported
from tests.fixtures.servers import KafkaServer, log_alone

Report = Callable[..., FollowerRecord]


@pytest.fixture
def config(kafka_server: KafkaServer, topic_prefix: str, tmp_path: Path) -> Config:
    """A pipeline that is set up, but for the topic of the reports."""
    followers = "followers: {cache: {redis: {url: redis://localhost}}}"
    made = log_alone(kafka_server, topic_prefix, tmp_path, followers)
    own, frontiers = topics.internal_topics(made), names.frontier_topic(made.prefix)
    topics.ensure(topics.admin(made), made, [each for each in own if each.name == frontiers])
    return made


@pytest.fixture
def report(config: Config) -> Report:
    """Make a report of `cache` with some fields changed."""
    return partial(reported, pipeline=config.pipeline)


def test_a_report_is_read_back_as_it_was_written(config: Config, report: Report) -> None:
    assert read(config) == {}  # no topic is no report
    reports = Reports(config)  # makes the topic
    written = report(canary_at_us=9, what="redis is away", hint="start it", lsn=LSN(1 << 63))
    reports.write(written)
    reports.write(report(pipeline="another"))
    reports.flush()
    assert read(config) == {"cache": written}
    facts = topics.describe(topics.admin(config), [topics.followers_topic(config).name])
    assert [each.partitions for each in facts.values()] == [1]


def test_the_newest_report_counts_but_not_an_older_generations(
    config: Config, report: Report
) -> None:
    reports, readings = Reports(config), Readings(config)
    for lsn, generation in ((100, 1), (90, 1), (10, 2), (200, 1)):
        reports.write(report(lsn=LSN(lsn), generation=generation))
    reports.write(report(follower="search"))
    reports.flush()
    assert readings.refresh()["cache"].lsn == 10
    assert set(readings.newest) == {"cache", "search"}
    readings.close()


def test_requests_are_read_by_the_job_that_runs_and_are_no_reports(
    config: Config, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked for before a job started is not obeyed: its view may be declared again."""
    monkeypatch.setattr(view_requests, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(view_requests, "ANSWER_SECONDS", 60.0)
    reports, requests = Reports(config), ViewRequests(config, "cache")

    def ask(key: bytes) -> None:
        reports.send(key, None)
        reports.write(written)
        reports.flush()

    written, key = report(), partial(view_requests.key, config, "cache")
    ask(key(drop="earlier"))
    assert requests.due() == []
    totals = {"pipeline": config.pipeline, "follower": "cache", "drop": "totals"}
    assert msgspec.json.decode(key(drop="totals")) == totals
    ask(key(drop="totals"))
    ask(view_requests.key(config, "search", drop="totals"))
    ask(key(rebuild="names", request="a"))
    ask(key(drop="totals"))
    ask(key(rebuild="names", request="b"))
    ask(key(rebuild="names", request="a"))
    another = msgspec.structs.replace(config, pipeline="another")
    ask(view_requests.key(another, "cache", drop="foreign"))
    of_cache = partial(ViewRequest, config.pipeline, "cache")
    assert requests.due() == [
        of_cache(drop="totals"),
        of_cache(rebuild="names", request="a"),
        of_cache(rebuild="names", request="b"),
    ]
    assert requests.due() == []
    _read_again_after_an_error(requests, monkeypatch)
    requests.close()
    assert read(config) == {"cache": written}


def _read_again_after_an_error(requests: ViewRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was obeyed already is not obeyed again."""

    def fails(*_: object) -> NoReturn:
        raise ConfigError("damaged", hint="")

    with monkeypatch.context() as patched:
        patched.setattr(LogConsumer, "arrivals", fails)
        with pytest.raises(ConfigError, match="damaged"):
            requests.wait(0.1)
    assert requests.due() == []


def test_an_open_reader_sees_each_report_when_it_is_there(config: Config, report: Report) -> None:
    """Also those of a topic that is created, or recreated, after the reader has started."""
    readings, client = Readings(config), topics.admin(config)
    topic = topics.followers_topic(config).name
    assert readings.refresh() == {}
    for _ in range(2):
        reports = Reports(config)
        for number in range(20):
            reports.write(report(seq=number))
            reports.flush()
            # Of a topic that was recreated, the one before has left its last report.
            wait_until(
                lambda: (found := readings.refresh().get("cache")) and found.seq == number,  # noqa: B023 - at once
                f"report {number} is not read",
            )
        topics.delete(client, [topic])
        wait_until(lambda: not topics.describe(client, [topic]), "the topic stays")
    readings.close()


def test_waiting_ends_with_the_next_report(config: Config, report: Report) -> None:
    reports, readings = Reports(config), Readings(config)
    reports.write(report())
    reports.flush()
    readings.refresh()
    reports.write(report(seq=8))
    wait_until(lambda: readings.wait(60.0) and readings.newest["cache"].seq == 8, "it never came")
    readings.close()
