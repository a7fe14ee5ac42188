"""What may watch the transactions that the sequencer publishes, and add to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cdc.decode.messages import LogicalMessage, Relation
    from cdc.sequence.state import Wanted


class TransactionObserver(Protocol):
    """Called for each transaction in the stream's order.

    It sees row changes only of the relations that it asked for (`Sequencer.observe`), and no change
    that the log already holds.
    """

    def on_begin(self, commit_lsn: int, xid: int | None) -> None:
        """See that a transaction begins, also one that the log holds; no xid: a message alone."""

    def on_change(self, relation_id: int, payload: bytes) -> None:
        """See a row message of pgoutput, without an xid, before its event is published."""

    def on_truncate(self, relation_id: int) -> None:
        """See that a table was emptied, before the event is published."""

    def on_message(self, message: LogicalMessage, lsn: int) -> Relation | Wanted | None:
        """Handle a message whose prefix starts with `OURS`; it is not published.

        The result is what the pipeline does before the stream continues; None outside a
        transaction, where no message of ours is written.
        """

    def verified(self, message: LogicalMessage) -> LogicalMessage | None:
        """Return what is published of a message whose prefix starts with `PUBLISHED_OURS`.

        None if it is not proven to be ours.
        """

    def on_commit(self) -> None:
        """Publish more in the transaction, which ends after this."""
