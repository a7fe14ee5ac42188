"""How far the log is, and the verdict: from the log and the source, without the daemon.

The daemon is asked too, at `http.listen`, but only for what only it knows: what it is doing. So a
daemon that hangs, has stopped or was never started appears in the same report.
"""

from __future__ import annotations

import time
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import orjson

from cdc.errors import CDCError, Policy
from cdc.log import reader
from cdc.operate import start_checks
from cdc.operate.findings import Cause, Level
from cdc.operate.followers import FollowersReader, FollowerStatus
from cdc.operate.incomplete_topics import read_incomplete
from cdc.operate.log_status import LogStatus, LogStatusReader
from cdc.operate.retention import Retention, judge
from cdc.operate.verdict import DaemonReport, PipelineFacts, Verdict, verdict
from cdc.operate.webhooks import WebhooksReader, WebhookStatus
from cdc.source.connection import connect, within
from cdc.source.server import OpenTransaction, Server, open_transactions, read_server
from cdc.source.slots import Slot, read_slot

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.log.completeness import IncompleteTopic
    from cdc.log.records import FrontierRecord, SchemaRecord
    from cdc.log.resume import Resume
    from cdc.snapshot.incremental.records import IncrementalRecord
    from cdc.snapshot.initial.records import SnapshotState
    from cdc.source.connection import Connection

_HTTP_TIMEOUT_SECONDS = 2.0
# Over a shorter time a rate means little, and a running daemon measures a better one.
_RATE_SECONDS = 30.0
# Another connection to the source is then made: its name may lead to another server.
SOURCE_SECONDS = 60.0
# After this time without an answer the source counts as away, as it does when connecting.
ANSWER_SECONDS = 10.0

T = TypeVar("T")


class Status(NamedTuple):
    """The current state; None is unknown, and then a problem gives the reason."""

    pipeline: str
    resume: Resume | None
    frontier: FrontierRecord | None
    server: Server | None
    slot: Slot | None
    daemon: dict[str, Any] | None  # the body of /readyz
    snapshot: SnapshotState | None
    followers: list[FollowerStatus]
    incremental_snapshots: list[IncrementalRecord]
    incomplete_topics: list[IncompleteTopic]
    holders: tuple[OpenTransaction, ...] = ()  # which hold the slot's restart LSN back
    schemas: tuple[SchemaRecord, ...] = ()  # every table version, oldest first
    webhooks: tuple[WebhookStatus, ...] = ()
    verdict: Verdict = Verdict(Level.OK, "")

    @property
    def retention(self) -> Retention | None:
        """Return the slot's retention, with a forecast where the log was not written recently.

        The rate is then the average since the log's last write; a running daemon measures its own.
        """
        if self.slot is None:
            return None
        if self.server is None or self.resume is None:
            return Retention(self.slot)
        position = self.resume[1]
        seconds = time.time() - position.at_us / 1e6
        if seconds < _RATE_SECONDS:
            return Retention(self.slot)
        rate = max(0, self.server.wal_lsn - position.end_lsn) / seconds
        return Retention(self.slot, rate, seconds)

    @property
    def refused_messages(self) -> str:
        """Return what the daemon refused of messages that claim to be the pipeline's; or ""."""
        found = (self.daemon or {}).get("refused_messages") or []
        return ", ".join(f"{each['count']} ({each['kind']}: {each['reason']})" for each in found)

    @property
    def lag_bytes(self) -> int | None:
        """Return the WAL between the WAL's end and what the log holds."""
        if self.server is None or self.resume is None:
            return None
        return max(0, self.server.wal_lsn - self.resume[1].end_lsn)

    def fields(self) -> dict[str, Any]:
        now_us = time.time_ns() // 1_000
        fields: dict[str, Any] = {
            "pipeline": self.pipeline,
            "ok": self.verdict.level is Level.OK,
            "verdict": self.verdict.fields(),
            "lag_bytes": self.lag_bytes,
            "lag_seconds": self.daemon.get("lag_seconds") if self.daemon else None,
            "resume": None,
            "frontier": None,
            "source": None,
            "slot": None,
            "snapshot": None,
            "daemon": self.daemon,
            "followers": [each.fields() for each in self.followers],
            "webhooks": [each.fields() for each in self.webhooks],
            "incremental_snapshots": [
                each.summary for each in self.incremental_snapshots if each.active
            ],
            "incomplete_topics": [each.fields() for each in self.incomplete_topics],
            "problems": [
                {"what": each.what, "hint": each.remedy, "exit_code": each.exit_code}
                for each in self.verdict.of(Level.FAILED)
            ],
            "warnings": [each.what for each in self.verdict.of(Level.DEGRADED)],
        }
        if retention := self.retention:
            fields["slot"] = {
                **retention.slot._asdict(),
                "lost_in_seconds": retention.lost_in_seconds,
                "held_by": [each._asdict() for each in self.holders],
            }
        if self.resume:
            identity, position = self.resume
            fields["resume"] = {
                "epoch": identity.epoch,
                "end_lsn": position.end_lsn,
                "seq": position.seq,
                "open": position.open,
                "committed_at_us": position.committed_at_us,
                "age_seconds": round(max(0, now_us - position.at_us) / 1e6, 3),
                "owner": position.owner,
            }
        if self.snapshot:
            names = ("stage", "generation", "rows", "bytes", "seconds", "owner")
            at_work = (self.daemon or {}).get("snapshot") or {}
            fields["snapshot"] = {name: getattr(self.snapshot, name) for name in names} | at_work
        if self.frontier:
            keep = ("lsn", "seq", "committed_at_us")
            fields["frontier"] = {name: getattr(self.frontier, name) for name in keep}
        if self.server:
            fields["source"] = {
                "database": self.server.database,
                "version": self.server.version_text,
                "timeline": self.server.timeline,
                "wal_lsn": self.server.wal_lsn,
            }
        return fields


class StatusReader:
    """Reads the current state, until `close`; its connections stay open."""

    def __init__(self, config: Config) -> None:
        """Connect to nothing yet."""
        self._config = config
        self._source: Connection | None = None
        self._source_until = 0.0
        self._log = LogStatusReader(config)
        self._followers: FollowersReader | None = None
        self._webhooks: WebhooksReader | None = None

    def read(self) -> Status:
        """Return the current state. Servers that do not answer are causes, not exceptions."""
        config, unanswered = self._config, _Unanswered()
        server = slot = None
        holders: list[OpenTransaction] = []
        log = LogStatus()
        # The slot first: what it confirms is in the log already, so the log, read later, must hold
        # it.
        with unanswered:
            server, slot, holders = self._of_source(
                lambda sql: (read_server(sql), read_slot(sql, config.slot), open_transactions(sql))
            )
        with unanswered:
            log = self._log.read()
        incomplete = log.completeness.incomplete(None)
        if incomplete and server:
            with unanswered:
                incomplete = self._of_source(
                    lambda sql: read_incomplete(sql, config, log.completeness)
                )
        daemon, resume = daemon_report(config.http.listen, config.pipeline), log.resume
        at_work = daemon is not None and daemon.get("ready")
        if resume and slot and slot.active_pid is None and not at_work and not unanswered:
            try:
                resume = _expect_start(config, slot, resume)
            except CDCError as error:  # a daemon would halt at its start: starting it is no fix
                unanswered.append(_failed("slot", error))
        followers = self._read_followers(server, unanswered) if resume else []
        hooks = self._read_webhooks(unanswered) if resume else ()
        status = Status(
            config.pipeline, resume, log.frontier, server, slot, daemon, log.snapshot, followers,
            list(log.incremental_snapshots), incomplete, tuple(holders), log.schemas, hooks,
        )  # fmt: skip
        facts = PipelineFacts(
            unanswered=tuple(unanswered),
            resume_lsn=resume[1].end_lsn if resume else None,
            resume_age_seconds=max(0.0, time.time() - resume[1].at_us / 1e6) if resume else None,
            lag_bytes=status.lag_bytes,
            slot=slot,
            daemon=DaemonReport.of(daemon) if daemon else None,
            initial_stage=log.snapshot.stage if log.snapshot else None,
            incremental_snapshots=log.incremental_snapshots,
            incomplete_topics=tuple(incomplete),
            followers=tuple(followers),
            webhooks=hooks,
            findings=tuple(judge(server, status.retention, holders)),
            now_us=time.time_ns() // 1_000,
        )
        return status._replace(verdict=verdict(config, facts))

    def _of_source(self, ask: Callable[[Connection], T]) -> T:
        """Return an answer of the source, by a connection that is kept for a while."""
        if self._source is not None and time.monotonic() < self._source_until:
            try:
                return _answer(self._source, ask)
            except CDCError:
                pass  # the connection may have ended: once more, by another
        self._close_source()
        self._source = connect(self._config)
        self._source_until = time.monotonic() + SOURCE_SECONDS
        try:
            return _answer(self._source, ask)
        except CDCError:
            self._close_source()
            raise

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def _read_followers(
        self, server: Server | None, unanswered: _Unanswered
    ) -> list[FollowerStatus]:
        if not self._config.followers and self._config.archive.path is None:
            return []
        with unanswered:
            self._followers = self._followers or FollowersReader(self._config)
            return self._followers.read(server.wal_lsn if server else None)
        return []

    def _read_webhooks(self, unanswered: _Unanswered) -> tuple[WebhookStatus, ...]:
        if not self._config.webhooks:
            return ()
        with unanswered:
            self._webhooks = self._webhooks or WebhooksReader(self._config)
            return tuple(self._webhooks.read())
        return ()

    def close(self) -> None:
        """Close the connections."""
        self._close_source()
        for each in (self._log, self._followers, self._webhooks):
            if each is not None:
                each.close()


def read_status(config: Config) -> Status:
    """Return the current state. Servers that do not answer are causes, not exceptions."""
    with closing(StatusReader(config)) as reader:
        return reader.read()


def _answer(source: Connection, ask: Callable[[Connection], T]) -> T:
    with within(source, ANSWER_SECONDS):
        return ask(source)


class _Unanswered(list[Cause]):
    """The servers that did not answer in a `with` block, which ends there, as causes."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, CDCError):
            self.append(_failed("server", error))
        return isinstance(error, CDCError)


def _failed(about: str, error: CDCError) -> Cause:
    return Cause(Level.FAILED, about, error.what, error.hint, exit_code=error.exit_code)


def _expect_start(config: Config, slot: Slot, known: Resume) -> Resume:
    """Return the newest resume record; raise the error with which a daemon would halt.

    It is read for itself: it is compared with the slot, so it must not be an old one. Nor must it
    be where it seems to halt: a stranger's open transaction hides what is newer.
    """
    resume = reader.read_resume(config) or known
    try:
        start_checks.verify_start(config, slot, resume)
    except CDCError as error:
        newest = reader.read_last_resume(config) if error.policy is Policy.HALT else None
        if newest is None or newest == resume:
            raise
        start_checks.verify_start(config, slot, newest)
        return newest
    return resume


def daemon_report(listen: str, pipeline: str) -> dict[str, Any] | None:
    """Return the body of its /readyz; None where none of the pipeline answers in two seconds."""
    host, _, port = listen.rpartition(":")
    if not listen or port == "0":
        return None
    # A daemon that listens on all addresses is reached on loopback.
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host.strip("[]"))  # noqa: S104
    connection = HTTPConnection(host, int(port), timeout=_HTTP_TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/readyz")
        body = orjson.loads(connection.getresponse().read())
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()
    if not isinstance(body, dict) or "state" not in body:
        return None
    # An older daemon does not say whose it is.
    return body if body.get("pipeline", pipeline) == pipeline else None
