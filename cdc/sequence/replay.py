"""Compare what Postgres sends again with what the log holds: both must have the same history.

A server whose files were restored from a backup sends other transactions than those that the log
holds, at LSNs that the log has passed: skipped as known, they would be lost. Its slot was restored
with its files, so it starts before the log's end. What it sends from there to that end is compared:
the log's last transaction must come, with its xid and commit time, and none may come after it. The
same holds for a message outside any transaction, such as a canary, by its LSN.

Nothing is confirmed to Postgres until that is done: the slot's old position is the evidence. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.errors import GapError
from cdc.events import LSN

if TYPE_CHECKING:
    from cdc.log.records import ResumePosition

# The xid, in a resume record, of a message outside any transaction.
NO_TRANSACTION = 0


class HistoryError(GapError):
    """Postgres sends another history than the log's.

    One session does not prove it: the slot's position is read over another connection, and a crash
    of the server between the two sets it back. So the daemon halts when a second session finds it.
    """


class SessionReplay:
    """What a session must be sent before it reaches the end of the log. `proven`: it was."""

    def __init__(self, resume: ResumePosition, begins_at: int, origin: str) -> None:
        """`begins_at` is the slot's position; `origin` selects which transactions it sends.

        A record of an older version, or one written while other transactions were sent, has nothing
        to compare.
        """
        self._commit_lsn: int = resume.commit_lsn
        # A transaction that the log holds in part ends after the record's end.
        self.end_lsn: int = resume.commit_lsn + 1 if resume.open else resume.end_lsn
        self._open = resume.open
        self._xid, self._us = resume.xid, resume.committed_at_us
        # A transaction is sent where its commit record starts at the slot's position or after it.
        # A message's LSN is its record's end.
        first = begins_at if resume.xid else begins_at + 1
        self._awaited = resume.xid is not None and first <= resume.commit_lsn
        self.proven = resume.xid is None or resume.origin != origin

    def transaction(self, commit_lsn: int, us: int, xid: int | None) -> None:
        """Compare the begin of a transaction. Raises HistoryError if the histories differ."""
        if commit_lsn == self._commit_lsn and self._xid:
            # No record has the time of a split transaction before its end.
            same = xid == self._xid and (self._open or us == self._us)
            if not same:
                raise self._apart(
                    f"Postgres sends transaction {xid} where the log holds transaction {self._xid}"
                )
            self._awaited = False
        elif commit_lsn >= self.end_lsn:
            self.reached()
        elif commit_lsn > self._commit_lsn and not self._open:
            raise self._apart(
                f"Postgres sends transaction {xid}, committed at {LSN(commit_lsn)}, which the log"
                " does not hold"
            )

    def message(self, lsn: int) -> None:
        """Note a message outside any transaction."""
        if lsn == self._commit_lsn and self._xid == NO_TRANSACTION:
            self._awaited = False

    def reached(self) -> None:
        """Note that all up to the end of the log was sent. Raises HistoryError if it was not."""
        if self._awaited:
            last = f"transaction, {self._xid}," if self._xid else "change, a message,"
            raise self._apart(f"the log's last {last} is not in what Postgres sends")
        self.proven = True

    def _apart(self, what: str) -> HistoryError:
        return HistoryError(
            f"{what}: the log holds the stream up to {LSN(self.end_lsn)}, its last transaction"
            f" committed at {LSN(self._commit_lsn)}, and this server has another history, as one"
            " whose files were restored from a backup",
            hint="the log holds changes that the database no longer has, and lacks others: point"
            " source.dsn at the server that the log comes from; or `cdc teardown --topics`, then"
            " `cdc setup` and a snapshot start over",
        )
