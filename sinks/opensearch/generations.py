"""Generations of a follower in OpenSearch: the one that readers see, and shadow builds.

All are in the follower's single record, so that a switch is one change of it, followed by one
request that moves the aliases. Between the two, readers see that something is being applied; and if
the process dies there, the next `open` finishes the switch.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cdc.errors import ConfigError, StoreLostError
from lockstep.sinks.contract import Applied
from lockstep.sinks.opensearch.dead import DeadLetterIndex, LetterOwner
from lockstep.sinks.opensearch.record import Build, FollowerRecords, IndexRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.sinks.opensearch.indices import Indices

log = logging.getLogger("lockstep.sinks.opensearch")


def generations(record: IndexRecord | None) -> Mapping[int, Applied | None]:
    """Return every generation and its applied frontier."""
    builds = record.builds if record else {}
    return {
        int(n): Applied.from_fields(build.applied) if build.applied else None
        for n, build in builds.items()
    }


def switch(
    records: FollowerRecords, indices: Indices, generation: int, former: Applied | None = None
) -> None:
    """Switch readers to a generation; see `Generations.switch`."""

    def begin(record: IndexRecord) -> bool:
        build = record.build(generation)
        if build is None:
            raise _unknown(records.follower, generation)
        if record.generation == generation:
            return False
        if build.only is not None:
            _share(record.builds[str(record.generation)], build, generation, former)
        record.generation, record.switching = generation, True
        return True

    finish_switch(records, indices, records.change(begin))


def _share(old: Build, new: Build, generation: int, former: Applied | None) -> None:
    """Give the new build the old one's other tables; its frontier is the older of both."""
    if new.applied is not None:
        # Changes up to its frontier come again and are already applied; in a table whose key
        # changed they might be other rows.
        for index in new.indices():
            index.floor = max(index.floor, _seq(new.applied))
    for name in old.tables.keys() - set(new.only or ()):
        new.tables[name] = old.tables.pop(name)
    frontiers = [build.applied for build in (old, new) if build.applied is not None]
    new.reached = max(old.reached, new.reached, *(applied["seq"] for applied in frontiers), 0)
    new.replacing = max(old.replacing, new.replacing)
    # If either part has applied nothing, the result starts at the log's beginning.
    older = min(frontiers, key=_seq) if len(frontiers) == 2 else None  # noqa: PLR2004 - both
    if older is not None and older is old.applied:
        older = Applied.from_fields(older).replaced_by(former).fields
    new.applied = older and {**older, "generation": generation}
    new.letters += old.letters
    new.only = None


def _seq(applied: dict[str, Any]) -> int:
    seq: int = applied["seq"]
    return seq


def finish_switch(records: FollowerRecords, indices: Indices, record: IndexRecord) -> IndexRecord:
    """Move the aliases to the current generation, if a switch was not finished."""
    if not record.switching:
        return record
    tables = record.builds[str(record.generation)].tables
    indices.refresh(sorted(table.now.name for table in tables.values()))
    to = {table.alias: table.now.name for table in tables.values()}
    aliases = to.keys() | {
        table.alias for build in record.builds.values() for table in build.tables.values()
    }
    held = indices.shown(aliases)
    indices.show((alias, to.get(alias), held[alias]) for alias in sorted(aliases))

    def end(found: IndexRecord) -> bool:
        if not found.switching or found.generation != record.generation:
            return False
        found.switching = False
        return True

    return records.change(end)


def clear_other_aliases(records: FollowerRecords, indices: Indices, record: IndexRecord) -> None:
    """Remove readers' aliases from indices of generations that are not current.

    A writer may have set one there during a switch, before it noticed the switch.
    """
    seen = record.builds[str(record.generation)].indices()
    others = {index.name for index in record.indices()} - {index.name for index in seen}
    if not others:
        return
    held = indices.shown(
        table.alias for build in record.builds.values() for table in build.tables.values()
    )
    strays = {alias: sorted(others.intersection(found)) for alias, found in held.items()}
    # Checked after the aliases were read: these indices may be current by now.
    if any(strays.values()) and records.is_newest():
        with suppress(StoreLostError):  # another copy was faster
            indices.show((alias, None, found) for alias, found in strays.items())


def restore_aliases(records: FollowerRecords, indices: Indices) -> None:
    """Put the aliases of the generation that readers see back where somebody changed them."""
    record = records.known
    if record.switching or record.generation != records.generation:
        return
    tables = records.build.tables.values()
    held = indices.shown(table.alias for table in tables)
    moves = []
    for table in tables:
        # A commit moves the alias from one to the other, and may have died before it recorded that.
        right = [index.name for index in (table.now, table.next) if index is not None]
        here = [name for name in held[table.alias] if name in right]
        if len(here) != 1 or len(held[table.alias]) != 1:
            moves.append((table.alias, (here or right)[0], held[table.alias]))
    if moves and records.is_newest():
        for alias, to, found in moves:
            log.warning("alias %s was at %s, set back to %s", alias, ", ".join(found) or "none", to)
        with suppress(StoreLostError):  # another copy was faster
            indices.show(moves)


def drop(
    records: FollowerRecords, indices: Indices, dead: DeadLetterIndex, generation: int
) -> None:
    """Delete what only that generation has."""

    def remove(record: IndexRecord) -> bool:
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
    owners = [LetterOwner(t.origin, name) for name, t in before.tables.items()] if before else []
    record = records.change(remove)
    named = {index.name for index in record.indices()}
    indices.delete(sorted(present.keys() - named))
    dead.load()
    for owner in owners:
        dead.delete(owner, list(dead.of(owner).items()))


def _unknown(follower: str, generation: int) -> ConfigError:
    return ConfigError(
        f"{follower} has no generation {generation}", hint="see `cdc rebuild` for those it has"
    )
