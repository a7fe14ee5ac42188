"""A row's events → its versions, in the form of `cdc history`. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import msgspec

OPS: Final = {"c": "insert", "u": "update", "d": "delete", "r": "read", "t": "truncate"}


class VersionSource(msgspec.Struct, kw_only=True):
    """What a version takes of an event's `source`."""

    seq: int
    commit_lsn: str
    ts_us: int
    tx: int | None = msgspec.field(default=None, name="txId")
    unchanged: tuple[str, ...] = ()


class RowEvent(msgspec.Struct, kw_only=True):
    """What a version takes of an event; readers add what else they need."""

    op: str
    source: VersionSource
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None


def version_fields(
    event: RowEvent, known: dict[str, Any] | None, lost: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the fields of the version that an event makes of the `known` row, None if none is.

    The columns `lost` are in no event that was read. `unknown` names those without a value.
    """
    source, before = event.source, None
    if event.op != "c" and (known or event.before):
        before = {**(known or {}), **(event.before or {})}  # it may be the key alone
    after, unknown = _filled(event, known or {}, lost)
    return {
        "at": iso(source.ts_us),
        "lsn": source.commit_lsn,
        "transaction": source.tx,
        "seq": source.seq,
        "op": OPS.get(event.op, event.op),
        "before": before,
        "after": after,
        "unknown": unknown,
    }


def _filled(
    event: RowEvent, known: dict[str, Any], lost: tuple[str, ...]
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Return the row after an event, and the columns whose values are not known."""
    if event.after is None:
        return None, ()
    unsent = event.source.unchanged
    unknown = tuple(dict.fromkeys((*(each for each in unsent if each not in known), *lost)))
    after = {
        name: known[name] if name in unsent else value
        for name, value in event.after.items()
        if name not in unknown
    }
    return after, unknown


def iso(at_us: int) -> str:
    """Return a time in microseconds since 1970 as ISO 8601, in UTC."""
    return datetime.fromtimestamp(at_us / 1e6, UTC).isoformat()
