"""Report into the log how a webhook is in this process, for `cdc status` and the console.

In a thread of its own: neither does a broker that does not answer delay deliveries, nor does a
delivery that takes long delay a report.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.errors import CDCError
from cdc.log import group_records, records, topics
from cdc.log.follower_reports import REPORT_SECONDS, Reports
from cdc.log.group_records import WebhookReport, report_key

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from cdc.config import Config
    from cdc.log.group_records import WebhookState

log = logging.getLogger("cdc.deliver.reporter")

# An error that does not occur again for so long is over: longer than a start and what it waits for.
_OVER_SECONDS: Final = 60.0


class DeliveryCounts(NamedTuple):
    """What a webhook has done since it began, and how it is."""

    delivered: int = 0
    given_up: int = 0
    held: int = 0
    failing: int = 0  # keys
    away: str = ""  # why the receiver does not answer; empty if it does
    refused: str = ""  # why it refused something last
    moved_at_us: int = 0  # when something was last delivered or given up, or was there to deliver


class _Failure(NamedTuple):
    """An error after which a webhook starts again."""

    error: CDCError
    since_us: int  # of the first one without a pause
    until: float  # monotonic; over then, if it does not occur again


class Reporter:
    """Reports what `counts` returns until the `with` ends: by an error that halts, or well."""

    def __init__(self, config: Config, name: str, counts: Callable[[], DeliveryCounts]) -> None:
        self._config, self._name, self._counts = config, name, counts
        self._owner = f"{socket.gethostname()}:{os.getpid()}"
        self._state: WebhookState = "delivering"
        self._since_us = _now_us()
        self._halted: CDCError | None = None
        self._failure: _Failure | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"webhook {name} reports")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        self._halted = error if isinstance(error, CDCError) else None
        self._over.set()
        self._thread.join()

    def failed(self, error: CDCError) -> None:
        """Note an error after which the webhook starts again."""
        known = self._lasting()
        since_us = known.since_us if known else _now_us()
        self._failure = _Failure(error, since_us, time.monotonic() + _OVER_SECONDS)

    def _lasting(self) -> _Failure | None:
        failure = self._failure
        return failure if failure and time.monotonic() < failure.until else None

    def _run(self) -> None:
        reports: Reports | None = None
        while True:
            over = self._over.is_set()
            try:
                if reports is None:
                    reports = Reports(self._config, topics.groups_topic(self._config))
                    self._clear(reports)
                report = self._report()
                ended = over and self._halted is None
                # A process that ends well leaves no report, so the topic stays small.
                reports.send(report_key(report), None if ended else records.encode(report))
                if over:
                    reports.flush()
            except CDCError as error:
                log.warning("the webhook %s can't report: %s", self._name, error.what)
            if over:
                return
            self._over.wait(REPORT_SECONDS)

    def _clear(self, reports: Reports) -> None:
        """Delete the reports of processes that no longer run."""
        for each in group_records.read_once(self._config).reports_of(self._name):
            if not each.runs:
                reports.send(report_key(each), None)

    def _report(self) -> WebhookReport:
        counts, halted, failure = self._counts(), self._halted, self._lasting()
        error = halted or (failure.error if failure else None)
        state: WebhookState = "halted" if halted else "away" if counts.away else "delivering"
        if state != self._state:
            self._state, self._since_us = state, _now_us()
        return WebhookReport(
            pipeline=self._config.pipeline,
            webhook=self._name,
            owner=self._owner,
            state=state,
            since_us=self._since_us,
            moved_at_us=counts.moved_at_us,
            delivered=counts.delivered,
            given_up=counts.given_up,
            held=counts.held,
            failing=counts.failing,
            what=error.what if error else counts.away or counts.refused,
            hint=error.hint if error else "",
            failed_since_us=failure.since_us if failure else None,
            at_us=_now_us(),
        )


def _now_us() -> int:
    return time.time_ns() // 1_000
