"""Read rows back from Redis by key: for values that were not sent, and for comparison."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from sinks.redis.calls import GONE, Filling, Laid, Operation
from sinks.redis.client import Call, Client
from sinks.redis.state import floor_field


def stored_rows(
    client: Client, laid: Laid, filling: Filling, keys: Sequence[bytes]
) -> dict[bytes, tuple[int, bytes]]:
    """Return the seq of each existing row, and its stored columns as JSON.

    The columns are empty for a row without a place, whose place has another row, or whose value is
    missing.
    """
    table, names = laid.version.name, laid.names
    slots = [laid.slot(key) for key in keys]
    aside = [b"" if filling.seen else names.aside(filling.build, slot) for slot in slots]
    at = [
        names.companions(filling.build, table, slot) + key
        for slot, key in zip(slots, keys, strict=True)
    ]
    if laid.layout.form == "plain":
        places = [before + laid.shaper.place(key) for before, key in zip(aside, keys, strict=True)]
        asked = [(b"GET", name) for pair in zip(at, places, strict=True) for name in pair]
        answers = client.ask_all(asked, [slot for slot in slots for _ in range(2)])
        found = zip(keys, answers[::2], answers[1::2], strict=True)
        return {key: (int(v[:16], 16), row or b"") for key, v, row in found if _is_there(v)}
    stored = client.ask_all([(b"HMGET", name, b"seq", b"place", b"kept") for name in at], slots)
    there = [n for n, (_, place, _) in enumerate(stored) if place is not None]
    values = _values(client, laid, filling, [(slots[n], *stored[n][:2]) for n in there])
    rows = {
        key: (int(version[:16], 16), b"")
        for key, (version, _, _) in zip(keys, stored, strict=True)
        if _is_there(version)
    }
    for n, value in zip(there, values, strict=True):
        if value is not None:
            rows[keys[n]] = (rows[keys[n]][0], laid.shaper.row(value, stored[n][2]))
    return rows


def _is_there(version: bytes | None) -> bool:
    return version is not None and version[16:] != GONE


def news(client: Client, laid: Laid, filling: Filling, operations: Sequence[Operation]) -> int:
    """Return how many of one server's operations will apply: the stored row is older or missing."""
    plain = laid.layout.form == "plain"
    field = floor_field(filling.build, laid.version.name)
    asked = [(b"HGET", laid.names.main, field)] + [
        (b"GET", keys[1]) if plain else (b"HGET", keys[0], b"seq") for _, keys, _ in operations
    ]
    floor, *stored = client.ask_all(asked, [0] * len(asked))
    return sum(
        given[0] > max(floor or b"", seq or b"")
        for (_, _, given), seq in zip(operations, stored, strict=True)
    )


def _values(
    client: Client, laid: Laid, filling: Filling, places: Sequence[tuple[int, bytes, bytes]]
) -> list[list[bytes] | None]:
    """Return the parts of the values at places; None if the row is no longer there."""
    names, layout = laid.names, laid.layout
    if layout.moves == "claims" or layout.form == "text":
        return [[] for _ in places]  # the kept columns suffice
    read = b"HGETALL" if layout.form == "hash" else b"GET"
    asked, slots = [], []
    for slot, _, place in places:
        before = b"" if filling.seen else names.aside(filling.build, slot)
        asked.append((read, before + place))
        asked.append((b"GET", names.holders(filling.build, laid.version.name, slot) + place))
        slots += [slot, slot]
    answers = client.ask_all(asked, slots)
    found: list[list[bytes] | None] = []
    for (_, version, _), value, holder in zip(places, answers[::2], answers[1::2], strict=True):
        gone = not value or (layout.moves and holder != version)
        found.append(None if gone else _parts(value))
    return found


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


def takes(
    laid: Laid, filling: Filling, guard: Sequence[bytes], floor: bytes, names: Sequence[bytes]
) -> Iterator[Call]:
    """Yield calls that delete the rows of these companions if they are below a floor."""
    plain, form = laid.layout.form == "plain", laid.layout.form.encode()
    table, build = laid.version.name, filling.build
    by_slot: defaultdict[int, list[tuple[bytes, bytes]]] = defaultdict(list)
    for name in names:
        key = key_of(name, table)
        if key is not None:
            by_slot[laid.slot(key)].append((name, laid.shaper.place(key) if plain else b""))
    for slot, mine in by_slot.items():
        main = laid.names.sentinel(slot) if laid.names.cluster else laid.names.main
        values = b"" if filling.seen else laid.names.aside(build, slot)
        holders = laid.names.holders(build, table, slot)
        head = [*guard, floor, form, values, holders, laid.layout.moves.encode()]
        places = [place for _, place in mine] if plain else []
        yield Call(slot, [main, *(name for name, _ in mine)], head + places)


def forgets(
    laid: Laid, filling: Filling, guard: Sequence[bytes], found: Sequence[bytes]
) -> Iterator[Call]:
    """Yield calls that delete these values if their companions were evicted."""
    names, table, build = laid.names, laid.version.name, filling.build
    by_slot: defaultdict[int, tuple[list[bytes], list[bytes]]] = defaultdict(lambda: ([], []))
    for name in found:
        place = name[max(name.find(laid.placer.head), 0) :]
        keys, slot = laid.placer.keys(place, laid.version.key), names.slot(place)
        if keys:
            touched, counts = by_slot[slot]
            companions = names.companions(build, table, slot)
            touched += [name, *(companions + key for key in keys)]
            counts.append(b"%d" % len(keys))
    for slot, (touched, counts) in by_slot.items():
        main = names.sentinel(slot) if names.cluster else names.main
        yield Call(slot, [main, *touched], [*guard, *counts])
