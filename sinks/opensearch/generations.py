"""Generations of a follower in OpenSearch: the one that readers see, and those built aside.

All stand in the follower's one record, so that a switch is one change of it, with the aliases moved
in one request behind it. Between the two, readers are told that something is being applied; and who
opens the follower next ends what a process that died has left.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cdc.errors import ConfigError, StoreLostError
from sinks.contract import Applied
from sinks.opensearch.dead import DeadLetters, Shelf
from sinks.opensearch.record import Build, Record, Records

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sinks.opensearch.indices import Indices


def generations(record: Record | None) -> Mapping[int, Applied | None]:
    """Return every generation, and the frontier that it stands at."""
    builds = record.builds if record else {}
    return {
        int(n): Applied.told(build.applied) if build.applied else None
        for n, build in builds.items()
    }


def switch(records: Records, indices: Indices, generation: int) -> None:
    """Let readers see a generation."""

    def begin(record: Record) -> bool:
        build = record.build(generation)
        if build is None:
            raise _unknown(records.follower, generation)
        if record.generation == generation:
            return False
        if build.only is not None:
            _share(record.builds[str(record.generation)], build, generation)
        record.generation, record.switching = generation, True
        return True

    finish_switch(records, indices, records.change(begin))


def _share(old: Build, new: Build, generation: int) -> None:
    """Let the new one have the old one's other tables; it stands where the older of both does."""
    if new.applied is not None:
        # What comes again is there already, of a table that had another key maybe as other rows.
        for place in new.places():
            place.floor = max(place.floor, _seq(new.applied))
    for name in old.tables.keys() - set(new.only or ()):
        new.tables[name] = old.tables.pop(name)
    stands = [build.applied for build in (old, new) if build.applied is not None]
    new.reached = max(old.reached, new.reached, *(applied["seq"] for applied in stands), 0)
    # A part that has applied nothing has the whole begin at the log's beginning.
    older = min(stands, key=_seq) if len(stands) == 2 else None  # noqa: PLR2004 - both
    new.applied = older and {**older, "generation": generation}
    new.letters += old.letters
    new.only = None


def _seq(applied: dict[str, Any]) -> int:
    seq: int = applied["seq"]
    return seq


def finish_switch(records: Records, indices: Indices, record: Record) -> Record:
    """Move the aliases to the current generation, where a switch has not been ended."""
    if not record.switching:
        return record
    tables = record.builds[str(record.generation)].tables
    indices.refresh(sorted(table.now.index for table in tables.values()))
    to = {table.alias: table.now.index for table in tables.values()}
    aliases = to.keys() | {
        table.alias for build in record.builds.values() for table in build.tables.values()
    }
    held = indices.shown(aliases)
    indices.show((alias, to.get(alias), held[alias]) for alias in sorted(aliases))

    def end(found: Record) -> bool:
        if not found.switching or found.generation != record.generation:
            return False
        found.switching = False
        return True

    return records.change(end)


def take_from_others(records: Records, indices: Indices, record: Record) -> None:
    """Take readers' aliases from indices of generations that they are not to see.

    A writer that a switch overtook may have put one there, before it was told.
    """
    seen = record.builds[str(record.generation)].places()
    others = {place.index for place in record.places()} - {place.index for place in seen}
    if not others:
        return
    held = indices.shown(
        table.alias for build in record.builds.values() for table in build.tables.values()
    )
    strays = {alias: sorted(others.intersection(found)) for alias, found in held.items()}
    # Asked behind the aliases: by now they might be in the right.
    if any(strays.values()) and records.is_newest():
        with suppress(StoreLostError):  # another copy was quicker
            indices.show((alias, None, found) for alias, found in strays.items())


def drop(records: Records, indices: Indices, dead: DeadLetters, generation: int) -> None:
    """Delete what only that generation has."""

    def remove(record: Record) -> bool:
        if record.generation == generation:
            raise ConfigError(
                f"readers of {records.follower} see generation {generation}",
                hint="switch to another generation first",
            )
        return record.builds.pop(str(generation), None) is not None

    known = records.load()
    present = indices.present()
    if known is None:
        return
    before = known.build(generation)
    shelves = [Shelf(t.origin, name) for name, t in before.tables.items()] if before else []
    record = records.change(remove)
    named = {place.index for place in record.places()}
    indices.delete(sorted(present.keys() - named))
    dead.learn()
    for shelf in shelves:
        dead.take_back(shelf, list(dead.of(shelf).items()))


def _unknown(follower: str, generation: int) -> ConfigError:
    return ConfigError(
        f"{follower} has no generation {generation}", hint="see `cdc rebuild` for those it has"
    )
