"""Which tables a cut alters: what the daemon has written where a version changes older rows.

docs/EVENTS.md, "Altered tables". Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from cdc.log.records import ALTERED, Alteration, alteration_of
from lockstep.jobs.cuts.reduce import NULL, CutEvent, encode_row, parsed
from lockstep.sinks.contract import Altered, AlteredColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from lockstep.jobs.cuts.reduce import Bounds, Events
    from lockstep.sinks.contract import Version

KEY = msgspec.json.encode({"prefix": ALTERED})


class _Source(msgspec.Struct):
    seq: int


class _Message(msgspec.Struct):
    content: bytes


class _Event(msgspec.Struct):
    source: _Source
    message: _Message


_decode: Final = msgspec.json.Decoder(_Event).decode


def alterations(
    messages: Events,
    follows: Callable[[str], bool],
    versions: Callable[[str, Collection[int]], Sequence[Version]],
) -> dict[str, list[Altered]]:
    """Return what the messages of a cut alter, in seq order, by the topics that are followed."""
    found: dict[str, list[Altered]] = {}
    for seq, alteration in _decoded(messages):
        topic = alteration.topic
        if follows(topic):
            ids = alteration.previous, alteration.schema_id
            by_id = {each.schema_id: each for each in versions(topic, ids)}
            columns = tuple(
                AlteredColumn(c.name, c.was, (c.missing or "null").encode(), c.as_text)
                for c in alteration.columns
            )
            before, after = (by_id[each] for each in ids)
            found.setdefault(topic, []).append(Altered(seq, before, after, columns))
    return found


def as_altered(
    key: bytes | None, value: bytes, altered: Sequence[Altered]
) -> tuple[bytes | None, bytes, int]:
    """Return an event's key and value as the alterations after it leave them, and its version."""
    event = parsed(value)
    later = [each for each in altered if each.seq > event.source.seq]
    for each in later:
        source = msgspec.structs.replace(
            event.source,
            unchanged=each.renamed(event.source.unchanged),
            schema_id=each.version.schema_id,
        )
        before, after = _row(each, event.before), _row(each, event.after)
        event = CutEvent(event.op, source, before, after)
        key = key and each.key(key)
    return key, encode_row(event) if later else value, event.source.schema_id


def _row(altered: Altered, row: msgspec.Raw) -> msgspec.Raw:
    return row if bytes(row) == NULL else msgspec.Raw(altered.row(bytes(row)))


def altered_last(messages: Events, topic: str) -> int:
    """Return the seq of the last of the messages that alters the rows of a topic; or 0."""
    return max((seq for seq, each in _decoded(messages) if each.topic == topic), default=0)


def _decoded(messages: Events) -> Iterator[tuple[int, Alteration]]:
    """Yield the alterations among messages, with their seqs."""
    for key, value in zip(*messages, strict=True):
        if key == KEY:
            event = _decode(value)
            yield event.source.seq, alteration_of(event.message.content)


def parts(partitions: Sequence[Events], bounds: Bounds) -> Iterator[list[Events]]:
    """Yield the events of a part of a cut, if there are any."""
    found: list[Events] = []
    for keys, values in partitions:
        mine = [
            (key, value)
            for key, value in zip(keys, values, strict=True)
            if bounds.above < parsed(value).source.seq <= bounds.upto
        ]
        if mine:
            found.append(([key for key, _ in mine], [value for _, value in mine]))
    if found:
        yield found
