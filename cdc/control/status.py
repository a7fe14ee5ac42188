"""How far the log is, and whether all is well: from the log and the source, without the daemon.

The daemon is asked too, at `http.listen`, but only for what nobody else knows: what it is doing. So
a daemon that hangs, or is gone, or was never started shows in the same report.
"""

from __future__ import annotations

import time
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from cdc.control.findings import Severity, size
from cdc.control.followers import Look, judge
from cdc.control.retention import Retention, judge_holders, judge_idle, judge_slot
from cdc.errors import CDCError, Exit
from cdc.log import reader
from cdc.log.inspection import newest_frontier
from cdc.snapshot import topic
from cdc.source import inspection
from cdc.source.connection import connect

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.control.followers import Standing
    from cdc.log.records import FrontierRecord, ResumeIdentity, ResumePosition
    from cdc.snapshot.records import SnapshotState

_HTTP_TIMEOUT_SECONDS = 2.0
# A daemon at work moves its resume record every few seconds, also when nothing happens.
_STALE_SECONDS = 60.0
# Over less, a rate says little; and a daemon at work measures a better one.
_RATE_SECONDS = 30.0


class Problem(NamedTuple):
    """Something that is wrong, and the exit code that says so."""

    what: str
    hint: str
    exit_code: int = Exit.FAILED


class Status(NamedTuple):
    """What stands now; None is unknown, and then a problem says why."""

    pipeline: str
    resume: tuple[ResumeIdentity, ResumePosition] | None
    frontier: FrontierRecord | None
    server: inspection.Server | None
    slot: inspection.Slot | None
    daemon: dict[str, Any] | None  # the body of /readyz
    problems: list[Problem]
    warnings: list[str]  # what will hurt some day
    snapshot: SnapshotState | None = None
    followers: list[Standing] = []  # noqa: RUF012 - a default that nobody changes

    @property
    def retention(self) -> Retention | None:
        """Return the slot's room, with a forecast where nobody has written to the log of late.

        The rate is then the one since the log ended; a daemon at work measures its own.
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
        """Return the WAL between its end and what the log holds."""
        if self.server is None or self.resume is None:
            return None
        return max(0, self.server.wal_lsn - self.resume[1].end_lsn)

    @property
    def exit_code(self) -> int:
        return max((each.exit_code for each in self.problems), default=Exit.OK)

    def fields(self) -> dict[str, Any]:
        """Return the status as JSON-ready values."""
        now_us = time.time_ns() // 1_000
        fields: dict[str, Any] = {
            "pipeline": self.pipeline,
            "ok": not self.problems,
            "lag_bytes": self.lag_bytes,
            "lag_seconds": self.daemon.get("lag_seconds") if self.daemon else None,
            "resume": None,
            "frontier": None,
            "source": None,
            "slot": None,
            "snapshot": None,
            "daemon": self.daemon,
            "followers": [each.fields() for each in self.followers],
            "problems": [each._asdict() for each in self.problems],
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
    """Return what stands now. Servers that do not answer are problems, not exceptions."""
    problems: list[Problem] = []
    # The slot first: what it confirms was in the log before, so the log read later must hold it.
    server, slot, holders = _source(config, problems)
    resume, frontier, snapshot = _log(config, problems)
    daemon = _daemon(config.http.listen)
    if not problems:
        problems += _judge(config, resume, slot, daemon, snapshot)
    followers = _followers(config, server, problems) if resume else []
    status = Status(
        config.pipeline, resume, frontier, server, slot, daemon, problems, [], snapshot, followers
    )
    threats = list(judge_slot(status.retention)) if status.retention else []
    threats += judge_holders(holders)
    if server and slot:
        threats += judge_idle(server, slot)
    told = [each.what for each in threats if each.severity is Severity.WARNING]
    complaints = list(judge(config, followers))
    told += [each.what for each in complaints if not each.exit_code]
    status.warnings.extend(dict.fromkeys([*told, *((daemon or {}).get("warnings") or [])]))
    if not problems and daemon is None and resume is not None and status.lag_bytes:
        # Nobody says what the daemon is doing, so its traces must.
        age = time.time() - resume[1].at_us / 1e6
        if age > _STALE_SECONDS:
            what = f"a daemon holds the slot, but has written nothing for {age:.0f} s"
            problems.append(Problem(what, "see its log, and /readyz where it serves http"))
    problems.extend(
        Problem(each.what, each.hint, each.exit_code) for each in complaints if each.exit_code
    )
    return status


def _followers(
    config: Config, server: inspection.Server | None, problems: list[Problem]
) -> list[Standing]:
    if not config.followers:
        return []
    look = Look(config)
    try:
        return look.take(server.wal_lsn if server else None)
    except CDCError as error:
        problems.append(Problem(error.what, error.hint, error.exit_code))
        return []
    finally:
        look.close()


def _log(
    config: Config, problems: list[Problem]
) -> tuple[
    tuple[ResumeIdentity, ResumePosition] | None, FrontierRecord | None, SnapshotState | None
]:
    try:
        resume = reader.read_resume(config)
        newest = newest_frontier(config) if resume else None
        return resume, newest, topic.read_state(config)
    except CDCError as error:
        problems.append(Problem(error.what, error.hint, error.exit_code))
        return None, None, None


def _source(
    config: Config, problems: list[Problem]
) -> tuple[inspection.Server | None, inspection.Slot | None, list[inspection.Holder]]:
    try:
        with connect(config) as connection:
            return (
                inspection.server(connection),
                inspection.slot(connection, config.slot),
                inspection.holders(connection),
            )
    except CDCError as error:
        problems.append(Problem(error.what, error.hint, error.exit_code))
        return None, None, []


def _daemon(listen: str) -> dict[str, Any] | None:
    """Return what the daemon says of itself, or None where nobody answers as it would."""
    host, _, port = listen.rpartition(":")
    if not listen or port == "0":
        return None
    # What listens everywhere is reached on loopback.
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


def _judge(
    config: Config,
    resume: tuple[ResumeIdentity, ResumePosition] | None,
    slot: inspection.Slot | None,
    daemon: dict[str, Any] | None,
    snapshot: SnapshotState | None,
) -> list[Problem]:
    """Return what is wrong with a pipeline whose servers all answered."""
    anew = "`cdc doctor` says what can be done"
    if resume is None and slot is None:
        return [Problem(f"the pipeline {config.pipeline} is not set up", "cdc setup", Exit.CONFIG)]
    if resume is None:
        return [Problem("the slot exists, but the log has no resume record", anew, Exit.CONFIG)]
    if slot is None:
        what = f"the slot {config.slot} is gone, and the changes since the log's end with it"
        return [Problem(what, anew, Exit.CONFIG)]
    position = resume[1]
    problems = []
    if slot.wal_status == "lost" or slot.invalidation_reason:
        problems.append(Problem(f"the slot {slot.name} is lost", anew, Exit.CONFIG))
    elif slot.confirmed_flush_lsn is not None and slot.confirmed_flush_lsn > position.end_lsn:
        what = f"a gap: the slot begins at {slot.confirmed_flush_lsn}, the log ends before"
        problems.append(Problem(what, anew, Exit.CONFIG))
    elif slot.wal_status == "unreserved":
        problems.append(Problem(f"the slot {slot.name} is about to be lost", "cdc run, at once"))
    copying = snapshot is not None and snapshot.stage != "done"
    if copying and daemon is not None and daemon.get("ready"):
        return problems
    if slot.active_pid is None:
        kept = size(slot.retained_bytes or 0)
        what = f"no daemon reads from the slot, which keeps {kept} of WAL"
        problems.append(Problem(what, "cdc run"))
    elif daemon is not None and not daemon.get("ready"):
        what = f"the daemon is {daemon.get('state')}: {daemon.get('reason')}"
        problems.append(Problem(what, "see its log; /readyz has the details"))
    return problems
