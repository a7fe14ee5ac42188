"""How far the log is, and the verdict: from the log and the source, without the daemon.

The daemon is asked too, at `http.listen`, but only for what only it knows: what it is doing. So a
daemon that hangs, has stopped or was never started appears in the same report.
"""

from __future__ import annotations

import time
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from cdc.errors import CDCError
from cdc.log import reader
from cdc.log.client import reach
from cdc.log.inspection import newest_frontier
from cdc.operate.doctor import continuity as doctor_meeting
from cdc.operate.followers import Look
from cdc.operate.retention import Retention, judge_holders, judge_idle, judge_slot
from cdc.operate.verdict import Cause, Facts, Initial, Level, Reader, Verdict, verdict
from cdc.snapshot.incremental import topic as live_topic
from cdc.snapshot.initial import due, topic
from cdc.source import server as inspection
from cdc.source.connection import connect

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.records import FrontierRecord, ResumeIdentity, ResumePosition
    from cdc.operate.followers import Standing
    from cdc.snapshot.incremental.records import LiveRecord
    from cdc.snapshot.initial.records import SnapshotState

_HTTP_TIMEOUT_SECONDS = 2.0
# Over a shorter time a rate means little, and a running daemon measures a better one.
_RATE_SECONDS = 30.0


class Status(NamedTuple):
    """The current state; None is unknown, and then a problem gives the reason."""

    pipeline: str
    resume: tuple[ResumeIdentity, ResumePosition] | None
    frontier: FrontierRecord | None
    server: inspection.Server | None
    slot: inspection.Slot | None
    daemon: dict[str, Any] | None  # the body of /readyz
    snapshot: SnapshotState | None
    followers: list[Standing]
    live: list[LiveRecord]
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
    def lag_bytes(self) -> int | None:
        """Return the WAL between the WAL's end and what the log holds."""
        if self.server is None or self.resume is None:
            return None
        return max(0, self.server.wal_lsn - self.resume[1].end_lsn)

    @property
    def exit_code(self) -> int:
        return self.verdict.exit_code

    @property
    def problems(self) -> list[Cause]:
        """What has failed."""
        return self.verdict.of(Level.FAILED)

    @property
    def warnings(self) -> list[str]:
        """What lags, or will fail some day."""
        return [each.what for each in self.verdict.of(Level.DEGRADED)]

    def fields(self) -> dict[str, Any]:
        """Return the status as JSON-ready values."""
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
            "live_snapshots": [each.told for each in self.live if each.active],
            "problems": [
                {"what": each.what, "hint": each.remedy, "exit_code": each.exit_code}
                for each in self.problems
            ],
            "warnings": self.warnings,
        }
        if retention := self.retention:
            fields["slot"] = {
                **retention.slot._asdict(),
                "lost_in_seconds": retention.lost_in_seconds,
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
            told = ("stage", "generation", "rows", "bytes", "seconds", "owner")
            at_work = (self.daemon or {}).get("snapshot") or {}
            fields["snapshot"] = {name: getattr(self.snapshot, name) for name in told} | at_work
        if self.frontier:
            fields["frontier"] = {
                "lsn": self.frontier.lsn,
                "seq": self.frontier.seq,
                "committed_at_us": self.frontier.committed_at_us,
            }
        if self.server:
            fields["source"] = {
                "database": self.server.database,
                "version": self.server.version_text,
                "timeline": self.server.timeline,
                "wal_lsn": self.server.wal_lsn,
            }
        return fields


def read_status(config: Config) -> Status:
    """Return the current state. Servers that do not answer are causes, not exceptions."""
    unanswered: list[Cause] = []
    # The slot first: what it confirms is in the log already, so the log, read later, must hold it.
    server, slot, holders = _source(config, unanswered)
    resume, frontier, snapshot, live = _log(config, unanswered)
    daemon = _daemon(config.http.listen)
    if not unanswered and (refused := _refused(config, resume, slot, daemon)):
        unanswered.append(refused)
    followers = _followers(config, server, unanswered) if resume else []
    status = Status(
        config.pipeline, resume, frontier, server, slot, daemon, snapshot, followers, live
    )
    findings = list(judge_slot(status.retention)) if status.retention else []
    findings += judge_holders(holders)
    if server and slot:
        findings += judge_idle(server, slot)
    facts = Facts(
        unanswered=tuple(unanswered),
        resume_lsn=resume[1].end_lsn if resume else None,
        resume_age_seconds=max(0.0, time.time() - resume[1].at_us / 1e6) if resume else None,
        lag_bytes=status.lag_bytes,
        slot=slot,
        daemon=_reader(daemon),
        initial=_initial(config, snapshot, daemon),
        live=tuple(live),
        followers=tuple(followers),
        findings=tuple(findings),
        now_us=time.time_ns() // 1_000,
    )
    return status._replace(verdict=verdict(config, facts))


def _reader(body: dict[str, Any] | None) -> Reader | None:
    """Return the fields in the body of /readyz; an older daemon's has fewer."""
    if body is None:
        return None
    return Reader(
        state=str(body.get("state")),
        ready=bool(body.get("ready")),
        reason=str(body.get("reason")),
        since_seconds=float(body.get("since_seconds") or 0.0),
        failures=int(body.get("failures") or 0),
        failing_seconds=body.get("failing_seconds"),
        error=str(body.get("error") or ""),
        warnings=tuple(body.get("warnings") or ()),
    )


def _initial(config: Config, state: SnapshotState | None, daemon: dict[str, Any] | None) -> Initial:
    described = str((daemon or {}).get("reason") or "")
    wanted = config.snapshot.mode == "initial"
    return Initial(state.stage if state else None, wanted=wanted, described=described)


def _followers(
    config: Config, server: inspection.Server | None, unanswered: list[Cause]
) -> list[Standing]:
    if not config.followers:
        return []
    look = Look(config)
    try:
        return look.take(server.wal_lsn if server else None)
    except CDCError as error:
        unanswered.append(_unanswered(error))
        return []
    finally:
        look.close()


def _log(
    config: Config, unanswered: list[Cause]
) -> tuple[
    tuple[ResumeIdentity, ResumePosition] | None,
    FrontierRecord | None,
    SnapshotState | None,
    list[LiveRecord],
]:
    try:
        reach(config)
        resume = reader.read_resume(config)
        newest = newest_frontier(config) if resume else None
        live = live_topic.read(config) if resume else []
        state = topic.read_state(config)
        return resume, newest, state and due.outranked(state, resume), live
    except CDCError as error:
        unanswered.append(_unanswered(error))
        return None, None, None, []


def _unanswered(error: CDCError) -> Cause:
    return Cause(Level.FAILED, "server", error.what, error.hint, exit_code=error.exit_code)


def _source(
    config: Config, unanswered: list[Cause]
) -> tuple[inspection.Server | None, inspection.Slot | None, list[inspection.Holder]]:
    try:
        with connect(config) as connection:
            return (
                inspection.server(connection),
                inspection.slot(connection, config.slot),
                inspection.holders(connection),
            )
    except CDCError as error:
        unanswered.append(_unanswered(error))
        return None, None, []


def _daemon(listen: str) -> dict[str, Any] | None:
    """Return the daemon's own report, or None where no daemon answers."""
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
    return body if isinstance(body, dict) and "state" in body else None


def _refused(
    config: Config,
    resume: tuple[ResumeIdentity, ResumePosition] | None,
    slot: inspection.Slot | None,
    daemon: dict[str, Any] | None,
) -> Cause | None:
    """Return why a daemon would halt at its start, where none reads: starting it is no fix."""
    at_work = daemon is not None and daemon.get("ready")
    if resume is None or slot is None or slot.active_pid is not None or at_work:
        return None
    found = doctor_meeting.refusal(config, slot, resume)
    if found is None:
        return None
    return Cause(Level.FAILED, "slot", found.what, found.hint, exit_code=found.exit_code)
