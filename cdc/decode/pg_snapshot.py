"""Which transactions a query saw: `pg_current_snapshot()`. Pure.

The stream has the lower 32 bits of an xid only, so these are compared.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_XIDS: Final = 1 << 32


class PgSnapshot(NamedTuple):
    """The result of `pg_current_snapshot()`, by the 32 bits of an xid that the stream has."""

    xmin: int
    xmax: int
    in_progress: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> PgSnapshot:
        """Return the snapshot that is written as `xmin:xmax:xid,xid,…`."""
        xmin, xmax, running = text.split(":")
        xids = frozenset(int(xid) % _XIDS for xid in running.split(",") if xid)
        return cls(int(xmin) % _XIDS, int(xmax) % _XIDS, xids)

    def sees(self, xid: int) -> bool:
        """Whether a committed transaction was seen; xids wrap around, the nearest one is meant."""
        began_later = (xid - self.xmax) % _XIDS < _XIDS // 2
        return not began_later and xid not in self.in_progress
