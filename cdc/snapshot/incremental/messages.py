"""Our own messages in the stream: verified, and passed to the module that each is for.

What is proven to be ours (`cdc.snapshot.incremental.verifier`) becomes a command, a watermark or a
DDL record. Anything else is counted and ignored.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from cdc.encode import ddl
from cdc.encode.logical_messages import OURS
from cdc.sequence.state import Wanted
from cdc.snapshot.incremental import commands, watermarks
from cdc.source import column_changes
from cdc.source.authority import DDL_PURPOSE, SIGNAL_PURPOSE

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.decode.messages import LogicalMessage, Relation
    from cdc.sequence.sequencer import Sequencer
    from cdc.snapshot.incremental.commands import Command
    from cdc.snapshot.incremental.verifier import Verifier
    from cdc.snapshot.incremental.watermarks import Signer, Watermark
    from cdc.source.column_changes import ColumnChange

    Record = tuple[str, bytes, bytes | None]
    OnWatermark = Callable[[Watermark, int], Relation | None]

log = logging.getLogger("cdc.snapshot.incremental")

_KINDS: Final = {
    watermarks.PREFIX: "watermark",
    commands.COMMAND: "command",
    commands.SIGNAL: SIGNAL_PURPOSE,
    ddl.PREFIX: DDL_PURPOSE,
    column_changes.PREFIX: "columns",
}


class MessageRouter:
    """The messages of one session."""

    def __init__(
        self,
        config: Config,
        sequencer: Sequencer,
        verifier: Verifier,
        signer: Signer,
        on_watermark: OnWatermark,
        on_commands: Callable[[list[Command], int], None],
        on_columns: Callable[[ColumnChange], None],
    ) -> None:
        """Start with none waiting.

        `on_commands` gets the commands of a message, and how many snapshots may then be active;
        `on_columns` a table whose columns have changed, where it may block.
        """
        self._prefix, self._sequencer = config.prefix, sequencer
        # A literal in a statement may be a value of any table's hidden column.
        self._hides = config.hides
        self._verifier, self._signer = verifier, signer
        self._on_watermark, self._on_commands = on_watermark, on_commands
        self._on_columns = on_columns
        self._records: list[Record] = []

    @property
    def waiting(self) -> bool:
        return bool(self._records) or self._verifier.waiting

    def take(self) -> list[Record]:
        taken, self._records = [*self._verifier.take(), *self._records], []
        return taken

    def route(self, message: LogicalMessage, lsn: int) -> Relation | Wanted | None:
        if not message.transactional:
            kind = _KINDS.get(message.prefix, "other")
            self._verifier.refuse(kind, "not transactional", message)
            return None
        match message.prefix:
            case watermarks.PREFIX:
                return self._watermark(message, lsn)
            case commands.COMMAND:
                if (body := self._verifier.command(message, self._sequencer)) is not None:
                    self._command(commands.COMMAND, body, message)
            case commands.SIGNAL:
                return self._by_trigger(SIGNAL_PURPOSE, message)
            case column_changes.PREFIX:
                if (change := self._verifier.column_change(message)) is not None:
                    return Wanted(partial(self._on_columns, change))
            case ddl.PREFIX:
                return self._by_trigger(DDL_PURPOSE, message)
            case prefix if prefix != OURS or message.content:
                # An empty one separates a DDL record from the next change.
                self._verifier.refuse("other", "a reserved prefix", message)
        return None

    def _watermark(self, message: LogicalMessage, lsn: int) -> Relation | None:
        watermark = watermarks.decode(message.content)
        if watermark is None:
            self._verifier.refuse("watermark", "not readable", message)
            return None
        if not self._signer.is_of_session(watermark):
            self._verifier.refuse("watermark", "of another session", message, quiet=True)
            return None
        if not self._signer.is_signed(watermark):
            self._verifier.refuse("watermark", "wrong signature", message)
            return None
        return self._on_watermark(watermark, lsn)

    def _by_trigger(self, purpose: str, message: LogicalMessage) -> Wanted | None:
        def handle() -> None:
            body = self._verifier.by_trigger(purpose, message, self._sequencer)
            if body is None:
                return
            if purpose == DDL_PURPOSE:
                self._ddl(message, body)
            else:
                self._command(commands.SIGNAL, body, message)

        def read_keys_and_handle() -> None:
            self._verifier.read_keys()
            handle()

        if self._verifier.may_be_proven(purpose, message, self._sequencer):
            return Wanted(read_keys_and_handle)
        handle()
        return None

    def _ddl(self, message: LogicalMessage, body: bytes) -> None:
        at = self._sequencer
        record = ddl.record(
            self._prefix, body, lsn=message.lsn, commit_lsn=at.transaction_lsn,
            ordinal=at.ordinal, seq=at.seq, committed_at_us=at.transaction_us, tx_id=at.xid,
            literals=not self._hides,
        )  # fmt: skip
        if record is None:
            self._verifier.refuse("ddl", "not readable", message)
        else:
            self._records.append(record)

    def _command(self, prefix: str, body: bytes, message: LogicalMessage) -> None:
        try:
            self._on_commands(commands.parse(prefix, body), commands.MAX_ACTIVE[prefix])
        except commands.CommandError as error:
            self._verifier.refuse("command", "not readable", message, quiet=True)
            fields = {"prefix": prefix, "lsn": str(message.lsn), "error": str(error)}
            log.warning("a command that can't be read is ignored", extra={"fields": fields})
