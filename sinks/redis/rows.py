"""Read rows back from Redis by key: for values that were not sent, and for comparison."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.sinks.redis.calls import DELETED, Operation, StoredTable, TargetBuild
from lockstep.sinks.redis.client import Call, RedisClient
from lockstep.sinks.redis.state import floor_field


def stored_rows(
    client: RedisClient,
    stored_table: StoredTable,
    target: TargetBuild,
    keys: Sequence[bytes],
    *,
    are_seen: bool = False,
) -> dict[bytes, tuple[int, bytes]]:
    """Return the seq of each existing row, and its stored columns as JSON.

    The columns are empty for a row without a place, whose place has another row, or whose value is
    missing. A text, or the member of a collection, that somebody else has removed counts as missing
    only if `are_seen` asks for that.
    """
    table, names = stored_table.version.name, stored_table.names
    slots = [stored_table.slot(key) for key in keys]
    at = [
        names.companions(target.build, table, slot) + key
        for slot, key in zip(slots, keys, strict=True)
    ]
    if stored_table.layout.form == "plain":
        places = [
            stored_table.before(target, slot) + stored_table.shaper.place(key)
            for slot, key in zip(slots, keys, strict=True)
        ]
        asked = [(b"GET", name) for pair in zip(at, places, strict=True) for name in pair]
        answers = client.ask_all(asked, [slot for slot in slots for _ in range(2)])
        found = zip(keys, answers[::2], answers[1::2], strict=True)
        return {key: (int(v[:16], 16), row or b"") for key, v, row in found if _is_there(v)}
    stored = client.ask_all([(b"HMGET", name, b"seq", b"place", b"kept") for name in at], slots)
    there = [n for n, (_, place, _) in enumerate(stored) if place is not None]
    at_places = [(slots[n], *stored[n]) for n in there]
    values = _values(client, stored_table, target, at_places, are_seen=are_seen)
    rows = {
        key: (int(version[:16], 16), b"")
        for key, (version, _, _) in zip(keys, stored, strict=True)
        if _is_there(version)
    }
    for n, value in zip(there, values, strict=True):
        if value is not None:
            rows[keys[n]] = (rows[keys[n]][0], stored_table.shaper.row(value, stored[n][2]))
    return rows


def _is_there(version: bytes | None) -> bool:
    return version is not None and version[16:] != DELETED


def count_newer(
    client: RedisClient,
    stored_table: StoredTable,
    target: TargetBuild,
    operations: Sequence[Operation],
) -> int:
    """Return how many of one server's operations will apply: the stored row is older or missing."""
    plain = stored_table.layout.form == "plain"
    field = floor_field(target.build, stored_table.version.name)
    asked = [(b"HGET", stored_table.names.main, field)] + [
        (b"GET", keys[1]) if plain else (b"HGET", keys[0], b"seq") for _, keys, _ in operations
    ]
    floor, *stored = client.ask_all(asked, [0] * len(asked))
    return sum(
        given[0] > max(floor or b"", seq or b"")
        for (_, _, given), seq in zip(operations, stored, strict=True)
    )


def _values(
    client: RedisClient,
    stored_table: StoredTable,
    target: TargetBuild,
    places: Sequence[tuple[int, bytes, bytes, bytes]],
    *,
    are_seen: bool,
) -> list[list[bytes] | None]:
    """Return the parts of the values at places; None if the row is no longer there."""
    names, layout = stored_table.names, stored_table.layout
    if layout.moves == "claims" or layout.form == "text":
        # The kept columns suffice.
        return _seen(client, stored_table, target, places) if are_seen else [[] for _ in places]
    read = b"HGETALL" if layout.form == "hash" else b"GET"
    asked, slots = [], []
    for slot, _, place, _ in places:
        before = stored_table.before(target, slot)
        asked.append((read, before + place))
        asked.append((b"GET", names.holders(target.build, stored_table.version.name, slot) + place))
        slots += [slot, slot]
    answers = client.ask_all(asked, slots)
    found: list[list[bytes] | None] = []
    for (_, version, _, _), value, holder in zip(places, answers[::2], answers[1::2], strict=True):
        missing = not value or (layout.moves and holder != version)
        found.append(None if missing else _parts(value))
    return found


def _seen(
    client: RedisClient,
    stored_table: StoredTable,
    target: TargetBuild,
    places: Sequence[tuple[int, bytes, bytes, bytes]],
) -> list[list[bytes] | None]:
    """Return nothing of each row whose text, or member, readers see at its place; None if not."""
    form, asked, texts = stored_table.layout.form, list[tuple[bytes, ...]](), list[bytes]()
    for slot, _, place, kept in places:
        before = stored_table.before(target, slot)
        text = stored_table.shaper.filled(kept)
        texts.append(text)
        if form == "text":
            asked.append((b"GET", before + place))
        else:
            asked.append((b"ZSCORE" if form == "zset" else b"SISMEMBER", before + place, text))
    answers = client.ask_all(asked, [slot for slot, *_ in places])
    if form == "text":
        seen = [answer == text for answer, text in zip(answers, texts, strict=True)]
    else:
        seen = [bool(answer) for answer in answers]  # a score or nil, 1 or 0
    return [[] if each else None for each in seen]


def _parts(value: Any) -> list[bytes]:  # noqa: ANN401 - a string or a hash
    return [value] if isinstance(value, bytes) else list(value)


def key_of(name: bytes, table: str) -> bytes | None:
    """Return the key in a companion's name; None if the name belongs to another table."""
    before, found, key = name.partition(b":{")
    mark = table.encode()
    # In a cluster the first brace is the tag's.
    while found and not before.endswith(mark):
        more, found, key = key.partition(b":{")
        before += b":{" + more
    return b"{" + key if found else None


def below_floor(
    stored_table: StoredTable,
    target: TargetBuild,
    guard: Sequence[bytes],
    floor: bytes,
    names: Sequence[bytes],
) -> Iterator[Call]:
    """Yield calls that delete the rows of these companions if they are below a floor."""
    plain, form = stored_table.layout.form == "plain", stored_table.layout.form.encode()
    table, build = stored_table.version.name, target.build
    by_slot: defaultdict[int, list[tuple[bytes, bytes]]] = defaultdict(list)
    for name in names:
        key = key_of(name, table)
        if key is not None:
            by_slot[stored_table.slot(key)].append(
                (name, stored_table.shaper.place(key) if plain else b"")
            )
    for slot, mine in by_slot.items():
        main, values = stored_table.names.guard(slot), stored_table.before(target, slot)
        holders = stored_table.names.holders(build, table, slot)
        moves = stored_table.layout.moves.encode()
        index = stored_table.indexing(target, slot)
        life = stored_table.life if stored_table.names.cluster else b""
        head = [*guard, floor, form, values, holders, moves, *index, life]
        places = [place for _, place in mine] if plain else []
        yield Call(slot, [main, *(name for name, _ in mine)], head + places)


def orphans(
    stored_table: StoredTable, target: TargetBuild, guard: Sequence[bytes], found: Sequence[bytes]
) -> Iterator[Call]:
    """Yield calls that delete these values if their companions were evicted."""
    names, table, build = stored_table.names, stored_table.version.name, target.build
    by_slot: defaultdict[int, tuple[list[bytes], list[bytes]]] = defaultdict(lambda: ([], []))
    for name in found:
        place = name[max(name.find(stored_table.placer.head), 0) :]
        keys, slot = stored_table.placer.keys(place, stored_table.version.key), names.slot(place)
        if keys:
            touched, counts = by_slot[slot]
            companions = names.companions(build, table, slot)
            touched += [name, *(companions + key for key in keys)]
            counts.append(b"%d" % len(keys))
    for slot, (touched, counts) in by_slot.items():
        yield Call(slot, [names.guard(slot), *touched], [*guard, *counts])
