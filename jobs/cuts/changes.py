"""The change events of the log as values, and their net effect. Pure.

`net` returns one change for each key: the event with the highest seq, with the columns that
Postgres did not send taken from earlier events of the same row where these have them. Columns that
stay unknown stay in `unchanged`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from lockstep.jobs.cuts import reduce
from lockstep.jobs.cuts.reduce import NULL, decode_row, decoded, encode_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cdc.log.dead_letters import Pointer


class ChangeSource(reduce.CutSource, gc=False):
    """All that an event says of its origin."""

    transaction: int | None = msgspec.field(default=None, name="txId")
    origin: str | None = None


class _Event(reduce.CutEvent, gc=False):
    source: ChangeSource


class ChangeEvent(NamedTuple):
    """A change event. Rows are JSON objects; `after` lacks the columns in `source.unchanged`."""

    key: bytes | None
    op: str
    source: ChangeSource
    before: bytes | None
    after: bytes | None


_decode: Final = msgspec.json.Decoder(_Event).decode


def event(
    key: bytes | None, value: bytes, letter: Callable[[Pointer], bytes] | None = None
) -> ChangeEvent:
    """Return the event in a record of a table's topic.

    `letter` returns the complete event of a dead letter. Raises ConfigError if the record is none.
    """
    found = decoded(_decode, value)
    if found.source.dead is not None and letter is not None:
        found = decoded(_decode, letter(found.source.dead))
    after = bytes(found.after)
    if after == NULL:
        row = None
    elif found.source.unchanged:
        known = decode_row(after)
        for name in found.source.unchanged:
            known.pop(name, None)
        row = encode_row(known)
    else:
        row = after
    before = bytes(found.before)
    return ChangeEvent(key, found.op, found.source, None if before == NULL else before, row)


def net(events: Iterable[ChangeEvent], floor: int = 0) -> list[ChangeEvent]:
    """Return the newest change of each key, in seq order, without what a truncate removed.

    `floor` is the seq of the newest truncate; that of a table is a change of its own. `before` is
    the row before the first event of the key, as far as the log has it.
    """
    by_key: dict[bytes | None, list[ChangeEvent]] = {}
    for each in events:
        if each.source.seq >= floor:
            by_key.setdefault(each.key, []).append(each)
    found = [each for each in by_key.pop(None, ()) if each.op == "t"][-1:]
    for chain in by_key.values():
        chain.sort(key=_seq_of)
        found.append(_newest(chain))
    found.sort(key=_seq_of)
    return found


def _newest(chain: Sequence[ChangeEvent]) -> ChangeEvent:
    newest, before = chain[-1], chain[0].before
    missing = set(newest.source.unchanged)
    if not missing or newest.after is None:
        return newest._replace(before=before)
    row = decode_row(newest.after)
    # An earlier event describes the same row until one that deleted it; what a create with
    # `unchanged` columns took over was another key's.
    is_create = newest.op == "c"
    for each in reversed(chain[:-1]):
        if is_create or each.after is None or not missing:
            break
        known = decode_row(each.after)
        for name in missing & known.keys():
            row[name] = known[name]
        missing -= known.keys()
        is_create = each.op == "c"
    left = tuple(name for name in newest.source.unchanged if name in missing)
    source = msgspec.structs.replace(newest.source, unchanged=left)
    return newest._replace(before=before, after=encode_row(row), source=source)


def _seq_of(each: ChangeEvent) -> int:
    return each.source.seq
