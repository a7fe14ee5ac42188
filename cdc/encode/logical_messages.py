"""Logical messages → keys and events.

What `pg_logical_emit_message` wrote, in Debezium's shape: `op` is `m`, and a `message` member with
prefix and base64 content replaces a row's images. The key is the prefix, as in Debezium.
"""

from __future__ import annotations

from binascii import b2a_base64
from typing import TYPE_CHECKING, Final

from orjson import dumps

from cdc import __version__

if TYPE_CHECKING:
    from cdc.decode.messages import LogicalMessage


# Messages whose prefix starts with this are the pipeline's own: they are in no topic and take no
# ordinal.
OURS: Final = "lockstep."
# The same for those that the pipeline itself publishes, once it is proven that they are its own.
PUBLISHED_OURS: Final = "cdc."


class MessageEncoder:
    """The encoder of a pipeline's logical messages."""

    def __init__(self, database: str, name: str) -> None:
        source = {
            "version": __version__,
            "connector": "postgresql",
            "name": name,
            "snapshot": "false",
            "db": database,
            "schema": "",
            "table": "",
        }
        self._source = dumps(source)[:-1]

    def event(
        self, message: LogicalMessage, lsn: int, seq: int, ordinal: int, tx: bytes, times: bytes
    ) -> tuple[bytes, bytes]:
        """Return key and value; the message's content may be any bytes."""
        key = b'{"prefix":%b}' % dumps(message.prefix)
        content = b2a_base64(message.content, newline=False)
        return key, (
            b'{"source":%b,%b,"lsn":%d,"ordinal":%d,"seq":%d},"op":"m",%b,"transaction":null,'
            b'"message":{"prefix":%b,"transactional":%b,"content":"%b"}}'
        ) % (
            self._source, tx, lsn, ordinal, seq, times, dumps(message.prefix),
            b"true" if message.transactional else b"false", content,
        )  # fmt: skip
