"""The messages of the streaming replication protocol around XLogData. Pure.

https://www.postgresql.org/docs/current/protocol-replication.html
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from cdc.decode.cursor import POSTGRES_EPOCH_US
from cdc.errors import ProtocolError
from cdc.events import LSN

_KEEPALIVE: Final = Struct(">QqB")
_STATUS_UPDATE: Final = Struct(">cQQQqB")


class PrimaryKeepalive(NamedTuple):
    """Sent by the server when it is idle, and when it needs an answer."""

    wal_end: LSN
    reply_requested: bool

    @classmethod
    def decode(cls, body: bytes) -> PrimaryKeepalive:
        """Read the message after its type byte. Raises ProtocolError."""
        if len(body) != _KEEPALIVE.size:
            raise ProtocolError(f"a keepalive of {len(body)} bytes")
        wal_end, _clock, reply = _KEEPALIVE.unpack(body)
        return cls(LSN(wal_end), bool(reply))


def status_update(written: LSN, applied: LSN, clock_us: int, *, reply_requested: bool) -> bytes:
    """Return the client's message of how far it is: Postgres may discard WAL below `applied`.

    `clock_us` is since 1970.
    """
    clock = clock_us - POSTGRES_EPOCH_US
    return _STATUS_UPDATE.pack(b"r", written, applied, applied, clock, reply_requested)
