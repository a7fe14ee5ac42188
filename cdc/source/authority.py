"""Authenticate messages in the stream: sign them, and verify what was signed.

Every role of a database may call `pg_logical_emit_message` with any prefix and any bytes, so a
message proves nothing by itself. Two kinds of proof exist, and no message is accepted without one:

- What `cdc` and the daemon write carries an HMAC-SHA256 by a key derived from `control.secret`, one
  key per purpose, over the purpose, the pipeline, the server's system identifier, an id, the time
  and the body. So a message for one purpose, pipeline or server is not valid for another.
- What the triggers of `migrations/` write carries a MAC by a key from a table that only its owner
  and the roles that the owner allows may read (`cdc.source.signing_keys`), over the purpose, the
  transaction's xid, the time, a nonce and the body. So it is not valid in another transaction.

The functions raise only `UnprovenError`, whatever bytes they are given, and no reason contains any
part of a message.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cdc.config import Config

log = logging.getLogger("cdc.source.authority")

COMMAND_PURPOSE: Final = "command"
CANARY_PURPOSE: Final = "canary"
DDL_PURPOSE: Final = "ddl"
SIGNAL_PURPOSE: Final = "signal"

# Largest signed message, in bytes: far above what a command with many keys needs, and the most that
# a DDL record takes.
MAX_BYTES: Final = 1 << 20
# Longest time from signing to commit, both by the server's clock: a round trip with a wide margin.
MAX_AGE_US: Final = 300_000_000
# The same for what a trigger signed: a transaction may stay open for long, and its xid is the real
# check. The limit guards against a 32-bit xid that has wrapped around.
MAX_OPEN_US: Final = 30 * 86_400 * 1_000_000
# Tolerated clock difference: a clock that is stepped back, or another server's after a promotion.
CLOCK_US: Final = 60_000_000
_XIDS: Final = 1 << 32

# Without a configured secret the daemon still recognizes its own canaries while this process runs.
_PROCESS_SECRET: Final = secrets.token_bytes(32)
_LOG_SECONDS: Final = 60.0


class UnprovenError(Exception):
    """A message does not prove who wrote it. `reason` is a fixed phrase, no text of the message."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class OtherPipelineError(UnprovenError):
    """A message names another pipeline of the same database."""


class UnknownKeyError(UnprovenError):
    """A trigger's message names a key that was not read yet."""


class Signed(msgspec.Struct, frozen=True):
    """A signed message, as `cdc` and the daemon write it."""

    pipeline: str
    id: str
    at_us: int  # when it was signed, in microseconds since 1970
    body: bytes
    mac: bytes


_decode: Final = msgspec.json.Decoder(Signed).decode


class Scope(NamedTuple):
    """The pipeline and server that a signature is valid for."""

    pipeline: str
    system_identifier: str


class TriggerKey(NamedTuple):
    """A key of the triggers: two blocks of SHA-256, as HMAC derives them from one key."""

    inner: bytes
    outer: bytes


class TriggerMessage(NamedTuple):
    """The content of a trigger's message, once it is proven."""

    id: str
    body: bytes


def secret_of(config: Config) -> bytes | None:
    """Return the secret that commands are signed with; None if none is configured."""
    given = config.control.secret
    return given.encode() if given else None


def canary_secret(config: Config) -> bytes:
    """Return the secret that canaries are signed with: there is always one."""
    return secret_of(config) or _PROCESS_SECRET


def sign(secret: bytes, purpose: str, scope: Scope, at_us: int, body: bytes) -> bytes:
    """Return a message's content."""
    number = secrets.token_hex(16)
    mac = _mac(secret, purpose, scope, number, at_us, body)
    return msgspec.json.encode(Signed(scope.pipeline, number, at_us, body, mac))


def proven(secret: bytes | None, purpose: str, scope: Scope, content: bytes) -> Signed:
    """Return what was signed; raise UnprovenError if the signature can't be verified."""
    if len(content) > MAX_BYTES:
        raise UnprovenError("too large")
    try:
        signed = _decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise UnprovenError("not signed") from None
    if signed.pipeline != scope.pipeline:
        raise OtherPipelineError("of another pipeline")
    if secret is None:
        raise UnprovenError("no control.secret")
    try:
        mac = _mac(secret, purpose, scope, signed.id, signed.at_us, signed.body)
    except ValueError:  # a text that is not Unicode
        raise UnprovenError("not signed") from None
    if not hmac.compare_digest(mac, signed.mac):
        raise UnprovenError("wrong signature")
    return signed


def _mac(secret: bytes, purpose: str, scope: Scope, number: str, at_us: int, body: bytes) -> bytes:
    key = hmac.digest(secret, f"lockstep 1 {purpose}".encode(), "sha256")
    parts = (scope.pipeline, scope.system_identifier, number, str(at_us))
    return hmac.digest(key, _joined([*(each.encode() for each in parts), body]), "sha256")


def _joined(parts: Iterable[bytes]) -> bytes:
    """Return the parts, each after its length, so that different lists give different bytes."""
    return b"".join(len(each).to_bytes(8, "big") + each for each in parts)


def session_mac(key: bytes, content: bytes) -> str:
    """Return the MAC of what one session writes for itself."""
    return hmac.digest(key, content, "sha256")[:16].hex()


def is_timely(at_us: int, committed_at_us: int) -> bool:
    """Whether a command was signed shortly before the transaction that carries it committed."""
    return -CLOCK_US <= committed_at_us - at_us <= MAX_AGE_US


def verified_trigger_message(
    keys: dict[str, TriggerKey], purpose: str, content: bytes, *, xid: int, committed_at_us: int
) -> TriggerMessage:
    """Return what a trigger of ours wrote; raise UnprovenError if it can't be verified.

    The content is `1 KEY XID MICROSECONDS NONCE MAC`, a line feed, and the body.
    """
    if len(content) > MAX_BYTES:
        raise UnprovenError("too large")
    line, _, body = content.partition(b"\n")
    head, _, mac = line.rpartition(b" ")
    words = head.split(b" ")
    if len(line) > 300 or len(words) != 5 or words[0] != b"1":  # noqa: PLR2004 - the line's form
        raise UnprovenError("not signed")
    _, name, signed_xid, at_us, number = words
    key = keys.get(name.decode("latin-1"))
    if key is None:
        raise UnknownKeyError("an unknown key")
    inner = hashlib.sha256(key.inner + b"%b\n%b\n%b" % (purpose.encode(), head, body)).digest()
    expected = hashlib.sha256(key.outer + inner).hexdigest().encode()
    if not hmac.compare_digest(expected, mac):
        raise UnprovenError("wrong signature")
    # Proven: the trigger's function wrote these fields.
    if int(signed_xid) % _XIDS != xid:
        raise UnprovenError("of another transaction")
    if not -CLOCK_US <= committed_at_us - int(at_us) <= MAX_OPEN_US:
        raise UnprovenError("too old")
    return TriggerMessage(number.decode("ascii"), body)


class Refusals:
    """Counts the rejected messages, and logs each kind and reason at most once a minute.

    Kinds and reasons are fixed words, so that no text of a forged message gets into log or metrics.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.counts: dict[tuple[str, str], int] = {}
        self.suspect: dict[tuple[str, str], int] = {}  # without those expected in any pipeline
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}

    def refuse(self, kind: str, reason: str, lsn: str, *, quiet: bool = False) -> None:
        """Count one; log it unless that was done within the last minute.

        `quiet`: it may be another pipeline's or an earlier session's, and is only counted.
        """
        what = kind, reason
        count = self.counts[what] = self.counts.get(what, 0) + 1
        if not quiet:
            self.suspect[what] = self.suspect.get(what, 0) + 1
        at, logged = self._logged.get(what, (float("-inf"), 0))
        if quiet or self._now() - at < _LOG_SECONDS:
            return
        self._logged[what] = self._now(), count
        fields = {"kind": kind, "reason": reason, "lsn": lsn, "count": count - logged}
        log.warning("messages in the stream are not obeyed", extra={"fields": fields})

    def fields(self) -> list[dict[str, object]]:
        """Return the suspect ones, for people: somebody may be forging messages."""
        return [
            {"kind": kind, "reason": reason, "count": count}
            for (kind, reason), count in list(self.suspect.items())
        ]
