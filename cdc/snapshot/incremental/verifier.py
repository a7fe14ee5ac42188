"""Verify which of the stream's messages one session accepts.

A message whose prefix is ours is accepted only if `cdc.source.authority` can prove who wrote it,
and only once: accepted commands are recorded in the log, together with the transaction that they
came in, until their signature is too old to be accepted. Anything else is counted and ignored; no
content of a message raises an error here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from cdc.log import names, records
from cdc.log.follower_reports import CANARY
from cdc.snapshot.incremental.records import CommandRecord, command_key
from cdc.source import authority, column_changes
from cdc.source.authority import OtherPipelineError, Scope, UnknownKeyError, UnprovenError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.decode.messages import LogicalMessage
    from cdc.sequence.sequencer import Sequencer
    from cdc.source.authority import Refusals, TriggerKey
    from cdc.source.column_changes import ColumnChange

    Record = tuple[str, bytes, bytes | None]
    TriggerKeys = dict[str, dict[str, TriggerKey]]

# Far longer than a signature is valid, so that a clock that is stepped back does not revive one.
_KEPT_US: Final = 86_400 * 1_000_000
# An unknown key may have been created a moment ago, so the keys are read again: at most this many
# times in a row, then once per this many seconds, because anyone may name any key.
_MOST_READS: Final = 10
_READ_SECONDS: Final = 5.0


class Verifier:
    """Verifies one session's messages."""

    def __init__(
        self,
        config: Config,
        system_identifier: str,
        refusals: Refusals,
        read_keys: Callable[[], TriggerKeys],
    ) -> None:
        """`read_keys` reads the triggers' keys from the source, and may take a while."""
        self._config = config
        self._scope = Scope(config.pipeline, system_identifier)
        self._secret = authority.secret_of(config)
        self._canary_secret = authority.canary_secret(config)
        self._refusals = refusals
        self._read_keys = read_keys
        self._keys: TriggerKeys | None = None
        self._reads, self._read_at = float(_MOST_READS), time.monotonic()
        self._canary_us = 0  # the newest
        self._accepted: dict[str, CommandRecord] = {}
        self._records: list[Record] = []
        self._xid: int | None = None
        self._nonces: set[str] = set()  # of that transaction

    def adopt(self, known: list[CommandRecord]) -> None:
        """Add the commands that earlier sessions accepted."""
        self._accepted |= {each.id: each for each in known}

    @property
    def waiting(self) -> bool:
        return bool(self._records)

    def take(self) -> list[Record]:
        """Return the records for the next Kafka transaction, once."""
        taken, self._records = self._records, []
        return taken

    def refuse(
        self, kind: str, reason: str, message: LogicalMessage, *, quiet: bool = False
    ) -> None:
        """Count a message that is rejected."""
        self._refusals.refuse(kind, reason, str(message.lsn), quiet=quiet)

    # -- canaries ----------------------------------------------------------------------------------

    def admit(self, message: LogicalMessage) -> LogicalMessage | None:
        """Return what is published of a message that claims to be ours; None: nothing."""
        if message.prefix != CANARY or message.transactional:
            self.refuse("other", "a reserved prefix", message)
            return None
        try:
            signed = authority.proven(
                self._canary_secret, authority.CANARY_PURPOSE, self._scope, message.content
            )
        except UnprovenError as error:
            # Without a secret those of an earlier process look like forged ones.
            quiet = isinstance(error, OtherPipelineError) or self._secret is None
            self.refuse("canary", error.reason, message, quiet=quiet)
            return None
        if signed.at_us > time.time_ns() // 1_000 + authority.CLOCK_US:
            self.refuse("canary", "from the future", message)
            return None
        if signed.at_us <= self._canary_us:
            self.refuse("canary", "sent before", message)
            return None
        self._canary_us = signed.at_us
        return replace(message, content=str(signed.at_us).encode())

    # -- tables whose columns have changed ---------------------------------------------------------

    def column_change(self, message: LogicalMessage) -> ColumnChange | None:
        """Return the table that a daemon has announced; None if none has.

        Announced again it changes nothing: what counts is the catalog.
        """
        purpose = column_changes.PURPOSE
        try:
            signed = authority.proven(self._canary_secret, purpose, self._scope, message.content)
            return column_changes.decode(signed.body)
        except UnprovenError as error:
            # Without a secret those of an earlier process look like forged ones.
            quiet = isinstance(error, OtherPipelineError) or self._secret is None
            self.refuse(purpose, error.reason, message, quiet=quiet)
        except msgspec.MsgspecError:
            self.refuse(purpose, "not readable", message)
        return None

    # -- commands ----------------------------------------------------------------------------------

    def command(self, message: LogicalMessage, at: Sequencer) -> bytes | None:
        """Return the body of a command that is to be executed now; None: it is not."""
        try:
            signed = authority.proven(
                self._secret, authority.COMMAND_PURPOSE, self._scope, message.content
            )
        except UnprovenError as error:
            self.refuse(
                "command", error.reason, message, quiet=isinstance(error, OtherPipelineError)
            )
            return None
        if not authority.is_timely(signed.at_us, at.transaction_us):
            self.refuse("command", "too old", message)
            return None
        if (known := self._accepted.get(signed.id)) is not None:
            if known.lsn != str(message.lsn):
                self.refuse("command", "sent before", message)
            return None
        self._remember(
            CommandRecord(
                pipeline=self._config.pipeline,
                id=signed.id,
                lsn=str(message.lsn),
                at_us=at.transaction_us,
            )
        )
        return signed.body

    def _remember(self, record: CommandRecord) -> None:
        topic, pipeline = names.snapshot_topic(self._config.prefix), self._config.pipeline
        for number, known in list(self._accepted.items()):
            if record.at_us - known.at_us > _KEPT_US:
                del self._accepted[number]
                self._records.append((topic, command_key(pipeline, number), None))
        self._accepted[record.id] = record
        self._records.append((topic, command_key(pipeline, record.id), records.encode(record)))

    # -- what triggers write -----------------------------------------------------------------------

    def may_be_proven(self, purpose: str, message: LogicalMessage, at: Sequencer) -> bool:
        """Whether the key that the message names is unknown, and the keys may be read now."""
        if self._keys is not None:
            try:
                self._by_key(purpose, message, at)
            except UnknownKeyError:
                pass
            except UnprovenError:
                return False
            else:
                return False
        now = time.monotonic()
        self._reads = min(_MOST_READS, self._reads + (now - self._read_at) / _READ_SECONDS)
        self._read_at = now
        if self._reads < 1:
            return False
        self._reads -= 1
        return True

    def read_keys(self) -> None:
        self._keys = self._read_keys()

    def by_trigger(self, purpose: str, message: LogicalMessage, at: Sequencer) -> bytes | None:
        """Return the body of a message that a trigger of ours wrote; None if none did."""
        try:
            signed = self._by_key(purpose, message, at)
        except UnprovenError as error:
            self.refuse(purpose, error.reason, message)
            return None
        if self._xid != at.xid:
            self._xid = at.xid
            self._nonces.clear()
        if signed.id in self._nonces:
            self.refuse(purpose, "sent before", message)
            return None
        self._nonces.add(signed.id)
        return signed.body

    def _by_key(
        self, purpose: str, message: LogicalMessage, at: Sequencer
    ) -> authority.TriggerMessage:
        return authority.verified_trigger_message(
            (self._keys or {}).get(purpose, {}),
            purpose,
            message.content,
            xid=at.xid or 0,
            committed_at_us=at.transaction_us,
        )
