"""Apply a cut that has been read: reduce each table, then write the result.

In a store that writes piece by piece a cut can be interrupted anywhere, and is then applied again
from its start to the same end. Every change can be computed again from the log, with one exception:
a row under a new key whose columns were not sent takes them from the row under the old key, which
the same cut deletes. So such rows are written first, each before the change that replaces the row
it takes from. Where keys were exchanged in a cycle there is no such order: if such a cut is
interrupted, the follower rebuilds its store from scratch.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from cdc import failpoints
from cdc.errors import StoreLostError
from lockstep.jobs.apply.altering import alter
from lockstep.jobs.cuts.in_order import in_order
from lockstep.jobs.cuts.reduce import Bounds, NeedsOrderError, Reduced, completed, newest
from lockstep.sinks.contract import Alterable, Change, Changes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from lockstep.jobs.cuts.in_order import Letter
    from lockstep.jobs.cuts.reduce import Events
    from lockstep.sinks.contract import Altered, Sink, Version

# Returns versions of a topic's table, by number; the last is the newest.
Versions: TypeAlias = "Callable[[str, Collection[int]], tuple[Version, ...]]"


class TornError(StoreLostError):
    """The store exists, but an interrupted cut can't be completed in it."""


class TableChanges(NamedTuple):
    """One table's changes in a cut, to be written in this order."""

    changes: Changes
    first: tuple[Changes, ...]  # to be written before `changes`, each before the next


class Applying:
    """Applies cuts to a sink."""

    def __init__(self, sink: Sink, versions: Versions) -> None:
        self._sink, self._versions = sink, versions
        self._histories = sink.histories()

    def reduce(
        self,
        topic: str,
        partitions: Sequence[Events],
        bounds: Bounds,
        *,
        name: str,
        letter: Letter,
        quick: Reduced | bool = True,
        torn: bool = False,
        newest_id: int | None = None,
    ) -> TableChanges:
        """Return the cut's changes to the table `name`, from its events in `partitions`.

        `partitions` has all of its events, or the next complete piece of them by seq. `quick` is
        what `newest` returns, if that is known; False: the piece is known to need `in_order`.
        `torn`: an interrupted attempt may have written some of it. `newest_id` is the newest
        version that the table has here, if the cut alters it.
        """

        def versions_of(schema_ids: Collection[int]) -> tuple[Version, ...]:
            found = self._versions(topic, schema_ids)
            return tuple(v for v in found if newest_id is None or v.schema_id <= newest_id)

        def rows(keys: list[bytes], schema_ids: Collection[int]) -> Mapping[bytes, bytes]:
            return self._sink.rows(versions_of(schema_ids)[-1], keys)

        reduced: Reduced | None = None
        if quick and name not in self._histories:
            with suppress(NeedsOrderError):
                found = quick if isinstance(quick, Reduced) else newest(partitions, bounds)
                reduced = completed(found, rows) if self._sink.complete_rows else found
        reduced = reduced or in_order(
            partitions,
            bounds,
            letter=letter,
            rows=rows,
            complete_rows=self._sink.complete_rows,
            every=name in self._histories,
        )
        versions = versions_of(reduced.schema_ids)
        groups = list(_groups(reduced, name, torn=torn)) if name not in self._histories else []
        moved = {change.key for group in groups for change in group}
        rest = reduced.changes
        if moved:
            rest = [change for change in rest if change.key not in moved]
        return TableChanges(
            Changes(versions, rest, reduced.truncated),
            tuple(Changes(versions, group) for group in groups),
        )

    def alter(
        self,
        topic: str,
        events: Callable[[Bounds], Iterable[Sequence[Events]]],
        bounds: Bounds,
        altered: Sequence[Altered],
        *,
        letter: Letter,
        quick: bool = True,
        torn: bool = False,
    ) -> None:
        """Write a table that the cut alters: each part between two alterations, then the next one.

        `events` gives a part's events, in complete pieces by seq.
        """
        above = bounds.above
        for each in [*altered, None]:
            part = Bounds(above, each.seq if each else bounds.upto)
            newest_id = each.before.schema_id if each else None
            for piece in events(part):
                table = self.reduce(
                    topic,
                    piece,
                    part,
                    name=altered[-1].version.name,
                    letter=letter,
                    quick=quick,
                    torn=torn,
                    newest_id=newest_id,
                )
                self.write_table(table)
            if each is not None:
                alter(self._sink, each)
                above = each.seq

    def begin(
        self, upto: int, versions: Iterable[Version], altered: Iterable[Sequence[Altered]] = ()
    ) -> None:
        """Begin the cut, with the versions of all its tables and of those that it alters.

        A sink that alters its tables itself learns later versions when it does.
        """
        wanted = list(versions)
        for its in altered:
            first, name = its[0].before, its[-1].version.name
            if isinstance(self._sink, Alterable):
                wanted = [v for v in wanted if v.name != name or v.schema_id <= first.schema_id]
                wanted.append(first)
            else:
                wanted += [first, *(each.version for each in its)]
        self._sink.begin(upto, sorted(wanted, key=lambda each: each.schema_id))
        failpoints.reach("follow_started")

    def write(self, upto: int, tables: Sequence[TableChanges]) -> Iterator[TableChanges]:
        """Begin the cut and write the tables; yield each one after it is written."""
        self.begin(upto, [each for table in tables for each in table.changes.versions])
        for table in tables:
            self.write_table(table)
            yield table

    def write_table(self, table: TableChanges) -> None:
        """Write a table of a cut that was started."""
        for changes in (*table.first, table.changes):
            self._sink.write(changes)


def _groups(reduced: Reduced, name: str, *, torn: bool) -> Iterator[list[Change]]:
    """Yield the rows that take values from other keys' stored rows, in an order safe to interrupt.

    A row is written once no other row still takes values from the row that it replaces.
    """
    left = dict(reduced.taken)
    changes = {change.key: change for change in reduced.changes if change.key in left}
    while left:
        wanted = {key for keys in left.values() for key in keys}
        free = [key for key in left if key not in wanted]
        if not free:
            if torn:
                raise TornError(
                    f"a cut in which keys of {name} were exchanged was interrupted",
                    hint="the follower builds its store again, as another generation",
                )
            free = list(left)
        yield [changes[key] for key in free]
        for key in free:
            del left[key]
