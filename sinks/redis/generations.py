"""Generations in Redis: shadow builds, switched in place, dropped; cleanup of a lost one.

A plain GET uses one name for a row, so the switch must give a build the names of the previous one.
Until then its values have shadow names, in the same hash slots. The switch renames them: first
values that only the old build has move to shadow names, then each value of the new one gets its
place, and the old one's moves to a shadow name in the same step. Every step can be repeated, and
`current` is `1>2`, then `1>2+`, so that the next `open` continues the switch; during it writers are
rejected, and readers see it by `applying`. If both builds are at the same frontier, every correct
value stays the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from cdc.errors import ConfigError
from lockstep.sinks.contract import Applied
from lockstep.sinks.redis.calls import Layout
from lockstep.sinks.redis.client import Call, RedisClient, Script
from lockstep.sinks.redis.health import evicts, raise_sentinels
from lockstep.sinks.redis.names import Companion, Names
from lockstep.sinks.redis.rows import key_of
from lockstep.sinks.redis.scripts import ADVANCE_SWITCH, DELETE_ROWS, MOVE_VALUES
from lockstep.sinks.redis.state import (
    ALL,
    LOST,
    Fields,
    build_of,
    builds_of,
    fields_of,
    floor_field,
    frontier_as_json,
    frontier_of,
    generations_of,
    layouts_of,
    sentinel_of,
    sortable,
    step_of,
)
from lockstep.sinks.shapes import Placer, RowShape

UNENDED: Final = b"f" * 16  # above every seq


_ADVANCE_SWITCH, _MOVE_VALUES = Script(ADVANCE_SWITCH), Script(MOVE_VALUES)
_DELETE_ROWS = Script(DELETE_ROWS)


def switch(
    client: RedisClient,
    names: Names,
    prefix: str,
    generation: int,
    shapes: Mapping[str, RowShape],
    former: Applied | None = None,
) -> None:
    """Switch readers to a generation; do nothing if they see it.

    `former` is that of `Generations.switch`. `shapes` are the configuration's: if the previous
    generation was lost with its layout, its remaining values are found by them, and deleted just
    before the new ones appear.
    """
    fields = finish_switch(client, names, prefix, fields_of(client, names))
    while (current := fields.get(b"current", b"")) != b"%d" % generation:
        if b"%d:applied" % generation not in fields:
            raise ConfigError(
                f"generation {generation} of the follower is not built",
                hint="build it first: `cdc rebuild` does",
            )
        if LOST in builds_of(fields, int(current)).values():
            _clear_unknown(client, names, prefix, shapes, fields)
        under_way = b"%b>%d" % (current, generation)
        # Whichever process finishes the switch reads it here.
        joined = b"" if former is None else frontier_as_json(former)
        more = [b"applying", UNENDED, b"%d:former" % generation, joined]
        _advance(client, names, fields, generation, under_way, more)
        fields = finish_switch(client, names, prefix, fields_of(client, names))


def finish_switch(client: RedisClient, names: Names, prefix: str, fields: Fields) -> Fields:
    """Continue a switch that is in progress, and return the follower's key after it.

    Several processes may do so concurrently: one that lags moves nothing, and reads the step that
    the others have reached.
    """
    while b">" in fields.get(b"current", b""):
        _take_step(client, names, prefix, fields)
        fields = fields_of(client, names)
    return fields


def _take_step(client: RedisClient, names: Names, prefix: str, fields: Fields) -> None:
    """Advance a switch by one step.

    In a cluster the sentinels get the step before anything is moved, so that each slot rejects
    writes and moves of an earlier one; the last step is set there before it is set in the
    follower's key, so that a switch that has ended there has ended everywhere.
    """
    current = fields[b"current"]
    old, new = (int(each) for each in current.rstrip(b"+").split(b">"))
    old_builds, new_builds = builds_of(fields, old), builds_of(fields, new)
    complete = ALL in new_builds
    tables = {
        table
        for build in {*old_builds.values(), *new_builds.values()}
        for table in layouts_of(fields, build)
        if complete or table in new_builds
    }
    pairs = [
        (table, build_of(old_builds, table), build_of(new_builds, table))
        for table in sorted(tables)
    ]
    raise_sentinels(client, names, sentinel_of(fields))
    if not current.endswith(b"+"):
        for table, before, after in pairs:
            _move(client, names, prefix, fields, _Move(new, b"old", table, before, before, after))
        _advance(client, names, fields, new, current + b"+", [])
        return
    for table, before, after in pairs:
        _move(client, names, prefix, fields, _Move(new, b"new", table, after, before, after))
    raise_sentinels(client, names, sentinel_of(fields, turns=1))
    _advance(
        client, names, fields, new, b"%d" % new, _switched(fields, old, new, complete=complete)
    )


def _switched(fields: Fields, old: int, new: int, *, complete: bool) -> list[bytes]:
    """Return the follower's fields after the switch.

    If only some tables were rebuilt, the generation is at the older of both frontiers, and rows may
    exist up to the newest that either has reached. The tables that are ahead reject repeated
    changes by their floor: for rows with a previous key, nothing else would.
    """
    frontiers = generations_of(fields)
    applied, before = frontiers[new], frontiers[old]
    reached = int(fields.get(b"%d:reached" % new, b"0"), 16)
    replacing = int(fields.get(b"%d:replacing" % new, b"0"), 16)
    builds, floors = builds_of(fields, new), list[bytes]()
    assert applied is not None
    if not complete:
        for table, build in builds.items():
            field, floor = floor_field(build, table), b"%016xf" % applied.seq
            floors += [field, max(floor, fields.get(field, b""))]
        builds = builds_of(fields, old) | builds
        reached = max(reached, int(fields.get(b"%d:reached" % old, b"0"), 16))
        replacing = max(replacing, int(fields.get(b"%d:replacing" % old, b"0"), 16))
        if before is not None and sortable(before) <= sortable(applied):
            joined = frontier_of(fields.get(b"%d:former" % new, b""))
            applied = before.replaced_by(joined)._replace(generation=applied.generation)
    return [
        *(b"generation", b"%d" % new),
        *(b"%d:builds" % new, msgspec.json.encode(builds)),
        *(b"%d:applied" % new, frontier_as_json(applied)),
        *(b"%d:stand" % new, sortable(applied)),
        *(b"%d:reached" % new, b"%016x" % reached),
        *(b"%d:replacing" % new, b"%016x" % replacing),
        *(b"seq", b"%d" % applied.seq),
        *(b"lsn", str(applied.lsn).encode()),
        *(b"committed_at_us", b"%d" % applied.committed_at_us),
        *(b"applying", b"%016x" % reached if reached > applied.seq else b""),
        *(b"%d:former" % new, b""),
        *floors,
    ]


def _advance(
    client: RedisClient, names: Names, fields: Fields, new: int, becomes: bytes, more: list[bytes]
) -> None:
    """Make one step of a switch; another copy may have made it before."""
    guard = (b"%d:token" % new, fields[b"%d:token" % new], fields[b"current"])
    changed = (b"current", becomes, b"step", step_of(fields, turns=1), *more)
    client.run(_ADVANCE_SWITCH, [Call(names.slot(names.main), (names.main,), (*guard, *changed))])


class _Move(NamedTuple):
    """One table's part of a switch."""

    generation: int  # the one that is switched to
    whose: bytes
    table: str
    build: int  # the build whose places are read
    before: int
    after: int


def _move(client: RedisClient, names: Names, prefix: str, fields: Fields, move: _Move) -> None:
    layout = layouts_of(fields, move.build).get(move.table)
    if layout is None or move.before == move.after:
        return
    mark = b"%d:token" % move.generation
    guard = (mark, fields[mark], fields[b"current"])
    if names.cluster:
        guard = (b"", sentinel_of(fields), b"")
    for places in _places(client, names, prefix, layout, move):
        by_slot: dict[int, list[bytes]] = {}
        for place in places:
            slot = names.slot(place)
            mine = by_slot.setdefault(slot, [names.guard(slot)])
            mine += [
                place,
                names.shadow(move.after, slot) + place,
                names.shadow(move.before, slot) + place,
            ]
        calls = (Call(slot, keys, (*guard, move.whose)) for slot, keys in by_slot.items())
        client.run(_MOVE_VALUES, calls)


def _places(
    client: RedisClient, names: Names, prefix: str, layout: Layout, move: _Move
) -> Iterator[list[bytes]]:
    """Yield the places of a table's rows in a build, some twice."""
    table = move.table
    if layout.moves:
        mark = b"%b>" % table.encode()
        for found in client.scan(names.pattern(move.build, table, b">")):
            yield [name.partition(mark)[2] for name in found]
        return
    place = Placer(layout.shape, prefix, table).place
    for found in client.scan(names.pattern(move.build, table)):
        keys = [key for key in (key_of(name, table) for name in found) if key is not None]
        if layout.form == "plain":
            yield [place(key) for key in keys]
        else:
            slots = [names.slot(name) for name in found]
            stored = client.ask_all([(b"HGET", name, b"place") for name in found], slots)
            yield [each for each in stored if each is not None]


def drop(client: RedisClient, names: Names, generation: int) -> None:
    """Delete what only that generation has."""
    fields = fields_of(client, names)
    if not fields:
        return
    if b"%d" % generation in fields[b"current"].rstrip(b"+").split(b">"):
        raise ConfigError(
            f"generation {generation} is what readers see", hint="switch to another one first"
        )
    others = {
        build
        for other in generations_of(fields)
        if other != generation
        for build in builds_of(fields, other).values()
    }
    builds = set(builds_of(fields, generation).values()) - others
    for build in builds:
        for found in client.scan(names.pattern(build, None)):
            slots = [names.slot(name) for name in found]
            client.ask_all([(b"UNLINK", name) for name in found], slots)
    marks = [b"%d:" % generation, *(b"%b:%d:" % (k, b) for b in builds for k in _OF_BUILDS)]
    deleted = [name for name in fields if name.startswith(tuple(marks))]
    if deleted:
        client.ask("HDEL", names.main, *deleted)


_OF_BUILDS: Final = (b"layout", b"key", b"floor", b"buckets")


def clear(client: RedisClient, names: Names, prefix: str, shapes: Mapping[str, RowShape]) -> None:
    """Delete the remains of a follower whose store was lost, and its own key."""
    fields = fields_of(client, names)
    # A missing key, or one created since the loss, does not show which values readers saw.
    known = any(name.endswith(b":applied") for name in fields)
    seen = set(builds_of(fields, int(fields[b"generation"])).values()) if known else None
    tables = set(shapes)
    for found in client.scan(names.every()):
        mine, others = [], []
        for name in found:
            parsed = names.parsed(name)
            if parsed is None or (seen is not None and parsed.build not in seen):
                others.append(name)
                continue
            mine.append((name, parsed))
            tables.add(parsed.table)
        _clear(client, names, prefix, shapes, fields, mine)
        client.ask_all([(b"UNLINK", name) for name in others], [names.slot(n) for n in others])
    if evicts(client) == "allkeys":  # values may have lost their companions
        for table in tables - {name for name, shape in shapes.items() if shape.key}:
            for found in client.scan(names.values(Placer(RowShape(), prefix, table).head, None)):
                slots = [names.slot(name) for name in found]
                client.ask_all([(b"UNLINK", name) for name in found], slots)
    client.ask("DEL", names.main)


def _clear_unknown(
    client: RedisClient, names: Names, prefix: str, shapes: Mapping[str, RowShape], fields: Fields
) -> None:
    """Delete the values, companions and indexes of builds not in the follower's key."""
    known = {build for each in generations_of(fields) for build in builds_of(fields, each).values()}
    for found in client.scan(names.every()):
        parsed = ((name, names.parsed(name)) for name in found)
        mine = [(name, each) for name, each in parsed if each and each.build not in known]
        _clear(client, names, prefix, shapes, fields, mine)
        index = [name for name in found if names.index_build(name) not in {None, *known}]
        client.ask_all([(b"UNLINK", name) for name in index], [names.slot(n) for n in index])


def _clear(
    client: RedisClient,
    names: Names,
    prefix: str,
    shapes: Mapping[str, RowShape],
    fields: Fields,
    found: Iterable[tuple[bytes, Companion]],
) -> None:
    """Delete companions with their values."""
    by_slot: defaultdict[int, list[tuple[bytes, bytes]]] = defaultdict(list)
    for name, parsed in found:
        layout = layouts_of(fields, parsed.build).get(parsed.table)
        shape = layout.shape if layout else shapes.get(parsed.table, RowShape())
        place = Placer(shape, prefix, parsed.table).place(parsed.key)
        by_slot[names.slot(name)].append((name, place))
    calls = (
        Call(slot, [name for name, _ in mine], [place for _, place in mine])
        for slot, mine in by_slot.items()
    )
    client.run(_DELETE_ROWS, calls)
