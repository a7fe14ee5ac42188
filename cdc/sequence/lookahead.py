"""Look ahead in a chunk for relation messages, so that their tables are prepared together.

Postgres describes a table before its first row, and the first transaction over thousands of tables
describes thousands of them within some chunks. One query of the catalog is valid for all
descriptions that arrived before it.
"""

from __future__ import annotations

from typing import Final

from cdc.decode import frames, messages, pgoutput
from cdc.decode.frames import HEADER_SIZE, PAYLOAD
from cdc.errors import ProtocolError

_RELATION, _BLOCK = b"RS"
# How many are prepared at once: bounds a query, and how long the loop waits for it.
_MOST: Final = 1_000


class Upcoming:
    """What is left of one chunk from `at` on."""

    def __init__(self, chunk: bytes, *, streamed: bool) -> None:
        """The frames of a `streamed` transaction, read back when it has committed, carry xids."""
        self._chunk = chunk
        self._streamed = streamed
        self.at = 0

    def relations(self) -> list[messages.Relation]:
        """Return at most `_MOST` relation messages; those in stream blocks are left out.

        A frame that can't be read ends the list: the sequencer will raise its error.
        """
        chunk, at, found = self._chunk, self.at, dict[int, messages.Relation]()
        end = frames.content_end(chunk)
        while at + HEADER_SIZE <= end and len(found) < _MOST:
            _, length, inner, _ = frames.head(chunk, at)
            stop = at + 1 + length
            tag = chunk[at + PAYLOAD] if inner == frames.XLOG_DATA else 0
            if length < HEADER_SIZE - 1 or stop > end or tag == _BLOCK:
                break
            if tag == _RELATION:
                try:
                    message = pgoutput.decode(chunk[at + PAYLOAD : stop], in_stream=self._streamed)
                except ProtocolError:
                    break
                assert isinstance(message, messages.Relation)
                found.setdefault(message.relation_id, message)
            at = stop
        return list(found.values())
