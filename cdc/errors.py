"""Errors state what happened, on which object, at which LSN, and what to do; never row values.

Every error of ours is a `CDCError` with a hint. What is done about it is decided only here: its
class has the policy (retry, stop) and the process's exit code, and `cdc.daemon.process` acts on
them. Foreign errors are translated in the module that owns the client that raises them.
"""

from __future__ import annotations

import re
from enum import Enum, IntEnum
from typing import Final


class Policy(Enum):
    """What the daemon does about an error."""

    BACKOFF = "backoff"  # transient: discard the connections, wait with jitter, start again
    # Refused by a server that accepted us before, as while a password is rotated: report it, retry
    # at long intervals, and halt if it is not fixed. At the start of the process it is HALT.
    SLOW = "slow"
    HALT = "halt"  # a person is needed: stop, exit with the error's code


class Exit(IntEnum):
    """Exit codes, from sysexits.h where it has one. A supervisor must not restart on CONFIG."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNAVAILABLE = 69
    BUG = 70
    TEMPORARY = 75
    PERMISSION = 77
    CONFIG = 78


class CDCError(Exception):
    """An error with a remedy. Halts unless its class says otherwise: a blind retry hides gaps."""

    policy = Policy.HALT
    exit_code = Exit.BUG

    def __init__(self, what: str, *, hint: str) -> None:
        what, hint = indented(what), indented(hint)
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what}\n  what to do: {self.hint}"


class _RemediedError(CDCError):
    """An error of a kind that has one remedy, unless another one is given."""

    remedy: str

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what, hint=hint or self.remedy)


class ProtocolError(_RemediedError):
    """Bytes from the walsender that do not match pgoutput's grammar. Never skipped."""

    remedy = "report it with the Postgres version; nothing was confirmed, so nothing is lost"


class InvariantError(_RemediedError):
    """A state that our own code must never reach."""

    remedy = "this is a bug in Lockstep: report it with the log"


class ConfigError(CDCError):
    """The configuration is wrong or does not fit the log or the database."""

    exit_code = Exit.CONFIG


class NoAnswerError(ConfigError):
    """A view has no answer at a frontier, because of a row's value; a later one may have one."""

    policy = Policy.BACKOFF


class GapError(CDCError):
    """Continuing would lose changes: the slot, the log and the source do not fit together."""

    exit_code = Exit.CONFIG


class MiscountedError(GapError):
    """A topic does not hold the events that the frontiers count."""


class CompactedError(MiscountedError):
    """Kafka's compaction has removed older events of keys from the range that is read."""


class PermissionDeniedError(CDCError):
    """Postgres or Kafka answers and refuses us."""

    policy = Policy.SLOW
    exit_code = Exit.PERMISSION


class UnavailableError(CDCError):
    """A server cannot be reached or closed the connection; trying again may work."""

    policy = Policy.BACKOFF
    exit_code = Exit.UNAVAILABLE


class SilentError(UnavailableError):
    """Postgres sends nothing for longer than its timeout: it is down, or encodes a huge row."""


class UnreadableError(UnavailableError):
    """A broker's copy of some records can't be decoded; that of another broker may be sound."""


class SpoolError(CDCError):
    """A streamed transaction can't be written to or read from the spool: disk full, or broken."""

    policy = Policy.BACKOFF
    exit_code = Exit.TEMPORARY


class RereadError(_RemediedError):
    """What a transaction streamed is in doubt: the next session gets it complete, at its commit."""

    policy = Policy.BACKOFF
    exit_code = Exit.TEMPORARY
    remedy = "the daemon reads it again by itself, at its commit"


class SlotBusyError(CDCError):
    """Another process streams from our slot (SQLSTATE 55006): wait as its standby."""

    policy = Policy.BACKOFF
    exit_code = Exit.TEMPORARY


class FencedError(CDCError):
    """Another producer took our transactional id, or the broker timed our transaction out.

    Not proof of a second writer: the pipeline restarts from the resume record, and the slot, which
    only one process can hold, decides which one continues.
    """

    policy = Policy.BACKOFF
    exit_code = Exit.TEMPORARY


class SnapshotLostError(_RemediedError):
    """The exported snapshot no longer exists: its coordinator or its database has stopped."""

    policy = Policy.BACKOFF
    exit_code = Exit.TEMPORARY
    remedy = "the coordinator starts a new generation by itself"


class RewrittenError(_RemediedError):
    """A table was rewritten or changed since the snapshot, which no longer sees all its rows.

    TRUNCATE, VACUUM FULL, CLUSTER, DROP and some ALTER TABLE are not MVCC-safe.
    """

    policy = Policy.BACKOFF
    exit_code = Exit.TEMPORARY
    remedy = "the coordinator starts a new generation by itself"


class StoreLostError(_RemediedError):
    """A follower's store holds less than it did: flushed, restored from a backup, or deleted.

    `tables` names the tables that lost data, if all others are certainly complete; None if not.
    """

    policy = Policy.BACKOFF
    exit_code = Exit.TEMPORARY

    remedy = "the follower rebuilds it, as another generation"

    def __init__(self, what: str, *, hint: str = "", tables: frozenset[str] | None = None) -> None:
        super().__init__(what, hint=hint)
        self.tables = tables


class SwitchedError(_RemediedError):
    """Readers see another generation of the follower: the one that was opened is the old one."""

    policy = Policy.BACKOFF
    exit_code = Exit.TEMPORARY
    remedy = "the follower opens its store again and continues there"


class OvertakenError(_RemediedError, UnavailableError):
    """Another copy of the follower is at another cut than this one's: open the store again."""

    remedy = "the follower continues where that cut ends"


class LagError(CDCError, TimeoutError):
    """A follower has not applied in time what was waited for; `lagging` lists which, and why."""

    policy = Policy.BACKOFF
    exit_code = Exit.TEMPORARY
    lagging: tuple[object, ...] = ()


class LocalStackError(CDCError):
    """A server or file for this machine cannot be fetched, started or stopped."""

    exit_code = Exit.UNAVAILABLE


class StoppedError(Exception):
    """The daemon was asked to stop while it had nothing to finish."""


class OutcomeUnknownError(CDCError):
    """A Kafka transaction's outcome is unknown; once it is fenced, the resume record shows it."""

    policy = Policy.BACKOFF
    exit_code = Exit.TEMPORARY


# --- texts of foreign errors, which may hold values ---

# The phrases in a server's or a library's text that name a cause and hold no value.
_CAUSES: Final = re.compile(
    r"connection (?:refused|reset|closed|aborted)|broken pipe|(?:operation )?timed out"
    r"|dns error|failed to lookup address|name or service not known|network is unreachable"
    r"|no route to host|certificate (?:has expired|verify failed)|unknownissuer"
    r"|no such file or directory|permission denied|read-only file system|no space left on device"
    r"|disk quota exceeded|too many open files|too many connections|is a directory"
    r"|access ?denied|no ?such ?bucket|invalid ?access ?key ?id|signature ?does ?not ?match"
    r"|expired ?token|request ?time ?too ?skewed|slow ?down|missing credentials"
    r"|password authentication failed|conflict|cast error|out of memory|resources exhausted"
    r"|\b[45]\d\d (?:bad request|unauthorized|forbidden|not found|method not allowed"
    r"|precondition failed|too many requests|internal server error|bad gateway"
    r"|service unavailable|gateway timeout)",
    re.IGNORECASE,
)
# Straight quotes and those of other languages: servers write in the language of lc_messages.
_QUOTE: Final = "[\"'`\u00ab\u00bb\u201e\u201c\u201d\u2018\u2019]"
_QUOTED: Final = re.compile(f"{_QUOTE}.*{_QUOTE}|{_QUOTE}.*", re.DOTALL)


def gist(error: BaseException) -> str:
    """Return a library's error in short: its type, and the causes that its text names."""
    causes = dict.fromkeys(each.lower() for each in _CAUSES.findall(str(error)))
    return type(error).__name__ + (f" ({', '.join(causes)})" if causes else "")


def printable(text: str) -> str:
    """Return the text as one line: what a terminal would obey is shown as an escape.

    Names in a database hold any character, so a name could otherwise forge a line.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def indented(text: str) -> str:
    """Return text of several lines, of which all but the first are indented; else as `printable`.

    So a name within can't start a line.
    """
    return "\n  ".join(map(printable, text.split("\n  ")))


def unquoted(text: object) -> str:
    """Return a message without what it quotes, in any language's quotation marks."""
    return _QUOTED.sub("…", str(text))
