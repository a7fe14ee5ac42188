"""Rebuild a follower: shadow build a generation, compare it, switch to it, keep the old one.

The order of steps makes it safe to kill it anywhere and start it again: the shadow build is not
visible until it holds everything that the log has, readers see the old state until then, and
nothing of the old state is deleted until the user requests it (`drop_old`). When started again it
continues the shadow build that it finds.

There are two comparisons. One is with the truth, read from the log (or the mirror) a second time,
without the sink: a key or seq that differs means that the build is wrong, and readers do not get
it. The other is with the old generation, values included: differences are reported, because they
show what was wrong in the old generation.

A generation as of an LSN never advances. Its number is above `AS_OF_ABOVE`, so that it is neither
continued nor switched to.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from cdc import failpoints
from cdc.errors import CDCError, ConfigError, MiscountedError, StoreLostError, SwitchedError
from cdc.operate.readable import listed
from lockstep.jobs.apply.opening import AS_OF_ABOVE
from lockstep.jobs.generations.comparing import Differences, Holding, KeyDifference
from lockstep.sinks.contract import Alterable, Applied, Forgetful, ReadByGenerations, discard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cdc.events import LSN
    from lockstep.sinks.contract import Generations, Version

# How many times the generations are compared before a difference counts, because the old one keeps
# changing.
_COMPARISONS: Final = 3
# How many times the build catches up with the old generation at most; it usually takes one or two.
_TURNS: Final = 100
_NAMED: Final = 5
# How many differing keys of a table the result lists: all of a large table may differ.
_LISTED: Final = 1_000


class DivergedError(CDCError):
    """The build does not hold what its source has."""


class Builder(Protocol):
    """Advances a generation; the way depends on the follower's source."""

    # Whether a row has the same seq in every build; otherwise the truth has seq 0.
    keeps_seqs: bool

    def tables(self) -> Iterable[str]:
        """Return the names of all tables or documents that the follower has, or will have."""
        ...

    def knows(self, applied: Applied) -> bool:
        """Return whether a frontier is one of this log, and not of one that it has replaced."""
        ...

    def prepare(self, sink: Generations, generation: int, tables: frozenset[str] | None) -> int:
        """Make sure that all rows can be read; return the seq from which on the build is complete.

        Called again after a kill.
        """
        ...

    def read_again(self, sink: Generations, generation: int, tables: frozenset[str] | None) -> int:
        """Do as `prepare` does, for an empty generation, with the rows as the source has them."""
        ...

    def expect_past(self) -> None:
        """Raise ConfigError if past states can't be built, because rows were never in the source.

        They can be read again, but only as they are now.
        """
        ...

    def forward(self, sink: Generations, generation: int, until: LSN | None) -> Applied:
        """Open it and apply everything up to now, or up to the last frontier not above `until`."""
        ...

    def versions(self, applied: Applied) -> Sequence[Version]:
        """Return the newest version, at a frontier, of each table that the follower has."""
        ...

    def truth(self, version: Version, applied: Applied) -> Holding | None:
        """Return the keys and seqs that a table has at a frontier; None if unknown."""
        ...

    def altered_at(self, version: Version, applied: Applied) -> int:
        """Return the seq at which DDL has changed a table's rows last, up to a frontier; or 0."""
        ...

    def with_ends(self, applied: Applied, tables: frozenset[str]) -> Applied:
        """Return a store's frontier with the ends of the tables at it, which it may have lacked."""
        ...


class Compared(NamedTuple):
    """The result of comparing a table with the old generation."""

    table: str
    rows: int
    differ: int  # how many keys
    differences: tuple[KeyDifference, ...]  # the first of them


class _Found(NamedTuple):
    rows: int
    differences: Differences


class RebuildOutcome(NamedTuple):
    """The result of a rebuild."""

    generation: int
    applied: Applied
    former: int | None
    tables: tuple[Compared, ...] = ()


class Rebuild:
    """The rebuild of one follower; `progress` gets its progress.

    `report` is called just before and just after the switch, with the new frontier and the reason,
    if any, why it must not be relied on yet: from then on no report of the old generation may be
    mistaken for the new one's. `reported` is the newest generation that was reported: reports of
    older ones are ignored.
    """

    def __init__(
        self,
        sink: Generations,
        builder: Builder,
        progress: Callable[[str], None],
        report: Callable[[Applied, str], None] = lambda _, __: None,
        reported: int = 0,
    ) -> None:
        self._sink, self._builder, self._progress, self._report = sink, builder, progress, report
        self._reported = reported

    def as_of(self, lsn: LSN) -> RebuildOutcome:
        """Build the state at the last frontier not above an LSN, in a separate generation."""
        self._builder.expect_past()
        number = max([*self._sink.generations(), AS_OF_ABOVE]) + 1
        applied = self._builder.forward(self._sink.at(number), number, lsn)
        return RebuildOutcome(number, applied, self._sink.current())

    def run(self, tables: frozenset[str] | None = None, *, is_lost: bool = False) -> RebuildOutcome:
        """Build a generation, of `tables` only if given, compare it, and switch to it.

        If the old generation is lost, it is not compared.
        """
        if tables is not None:
            _expect_known(tables, self._builder.tables())
        former = self._sink.current()
        number = self._number(former)
        known = self._of_this_log(former, tables) if former != number else None
        build = self._sink.at(number, tables)
        started = self._sink.generations().get(number)
        self._progress(
            f"generation {number}: "
            + (f"continued after {started.lsn}" if started else "shadow build started")
        )
        failpoints.reach("rebuild_started")
        complete_from = self._builder.prepare(build, number, tables)
        old = self._sink.generations().get(known or 0)
        compared: tuple[Compared, ...] = ()
        try:
            if old and not is_lost and max(complete_from, _reached(build)) <= old.seq:
                compared = self._compare(build, number, old, tables)
            applied = self._forward(build, number)
        except MiscountedError as error:
            self._progress(f"{error.what}: the rows are read again")
            build.close()
            build = self._sink.at(number, tables)
            discard(build, number)
            self._builder.read_again(build, number, tables)
            applied = self._forward(build, number)
        self._prove(build, self._versions(applied, tables), applied)
        failpoints.reach("rebuild_proved")
        applied = self._switch(build, number, known, applied, tables)
        build.close()
        return RebuildOutcome(number, applied, former, compared)

    def _of_this_log(self, former: int | None, tables: frozenset[str] | None) -> int | None:
        """Return the generation that readers see, None if it followed another log."""
        old = self._sink.generations().get(former or 0)
        if old is None or self._builder.knows(old):
            return former
        if tables is not None:
            raise ConfigError(
                f"generation {former} followed another log, so none of its tables can be kept",
                hint="rebuild all of them: `cdc rebuild FOLLOWER` without --table",
            )
        self._progress(f"generation {former} followed another log: it is not compared")
        return None

    def drop_old(self) -> list[int]:
        """Delete every generation except the one that readers see; return which were deleted."""
        return drop_old(self._sink)

    def _forward(self, build: Generations, number: int, until: Applied | None = None) -> Applied:
        """Advance the build to a frontier, or to everything up to now, and open it for reading."""
        applied = self._builder.forward(build, number, until and until.lsn)
        build.open()
        return applied

    def _versions(self, applied: Applied, tables: frozenset[str] | None) -> list[Version]:
        """Return the tables with keys that are being built."""
        return [
            version
            for version in self._builder.versions(applied)
            if version.key and (tables is None or version.name in tables)
        ]

    def _number(self, former: int | None) -> int:
        """Return the generation to build: one that an earlier attempt started, or the next."""
        known = [number for number in self._sink.generations() if number < AS_OF_ABOVE]
        least = max(self._reported, (former or 0) + 1)
        started = [number for number in known if number >= least]
        return max(started, default=max([*known, self._reported]) + 1)

    def _prove(self, build: Generations, versions: Sequence[Version], applied: Applied) -> None:
        """Raise unless the generation has exactly the truth's keys and seqs at its frontier."""
        for version in versions:
            wanted = self._builder.truth(version, applied)
            if wanted is None:
                continue
            seqs = self._builder.keeps_seqs
            found = Holding((key, seq * seqs, None) for key, seq, _ in build.contents(version))
            differences = found.differences(wanted, values=False)
            if isinstance(build, Forgetful) and build.forgets(version):
                differences = differences.only_left()
            if differences and not isinstance(build, Alterable):
                # Rows that DDL has changed were written again, with its seq.
                differences = differences.not_altered(self._builder.altered_at(version, applied))
            if differences:
                raise DivergedError(
                    f"generation {applied.generation} does not hold what it was built from:"
                    f" {_described(version.name, differences)}",
                    hint="readers still see the old one; report this with the log, and start over"
                    " with `cdc rebuild FOLLOWER --drop-old` and `cdc rebuild FOLLOWER`",
                )
            self._progress(f"{version.name}: {len(found):,} rows, equal to the log")

    def _compare(
        self, build: Generations, number: int, old: Applied, tables: frozenset[str] | None
    ) -> tuple[Compared, ...]:
        """Advance the build to the old generation's frontier, and compare the two.

        The old generation keeps changing: keys that it changed above that frontier can't be
        compared, and a difference counts only if it is found again, or the old generation did not
        advance.
        """
        reader = self._sink.at(old.generation)
        try:
            reader.open()
        except (StoreLostError, SwitchedError) as error:
            # Lost, or replaced in part by an attempt that died during its switch.
            self._progress(f"generation {old.generation} is not compared: {error.what}")
            return ()
        found: dict[str, _Found] = {}
        for _ in range(_COMPARISONS):
            applied = self._forward(build, number, old)
            for version in self._versions(applied, tables):
                mine, theirs = (self._holding(each, version, applied) for each in (build, reader))
                differences = mine.differences(theirs).up_to(applied.seq)
                if (known := found.get(version.name)) is not None:
                    differences = differences.found_again(known.differences)
                found[version.name] = _Found(len(mine), differences)
            before, old = old, self._sink.generations().get(old.generation) or old
            if old == before or not any(each.differences for each in found.values()):
                break
        reader.close()
        for table, (_, differences) in found.items():
            text = _described(table, differences) if differences else "as before"
            self._progress(f"{table}: {text}")
        return tuple(
            Compared(table, rows, len(differences), differences.first(_LISTED))
            for table, (rows, differences) in found.items()
        )

    def _holding(self, sink: Generations, version: Version, applied: Applied) -> Holding:
        """Return a table; if seqs only show when a row was built, those up to `applied` are 0."""
        bound = 0 if self._builder.keeps_seqs else applied.seq
        return Holding(
            (key, 0 if seq <= bound else seq, value) for key, seq, value in sink.contents(version)
        )

    def _switch(
        self,
        build: Generations,
        number: int,
        former: int | None,
        applied: Applied,
        tables: frozenset[str] | None,
    ) -> Applied:
        """Switch readers to the build, once it is not below the frontier that they see."""
        for _ in range(_TURNS):
            old = self._sink.generations().get(former) if former is not None else None
            if old is None or old.seq <= applied.seq:
                break
            applied = self._forward(build, number)
        if self._sink.current() != number:
            self._report(applied, "readers are about to see another generation")
            failpoints.reach("rebuild_switching")
            if old is not None and tables is not None:
                old = self._builder.with_ends(old, tables)
            self._sink.switch(number, old)
            failpoints.reach("rebuild_switched")
        # Also after an attempt that died during the switch: opening the store finishes it.
        seen, why = self._seen(number, applied)
        self._report(seen, why)
        self._progress(f"readers see generation {number}, at {seen.lsn}" + (why and f": {why}"))
        return seen

    def _seen(self, number: int, built: Applied) -> tuple[Applied, str]:
        """Return the store's frontier, and if it is at none yet, the reason.

        If only some tables were built, the others may be at an older frontier.
        """
        with closing(self._sink.at(number)) as sink:
            state = sink.open()
        seen, reached = (state.applied, state.reached) if state else (None, 0)
        if seen is None or not seen.pipeline:
            seen = Applied.beginning(built.pipeline, number)
        is_torn = reached > seen.seq or (seen.seq, seen.lsn) < (built.seq, built.lsn)
        return seen, "its tables are at different frontiers until the next batch" * is_torn


def drop_old(sink: Generations) -> list[int]:
    """Delete every generation except the one that readers see; return which were deleted."""
    current = sink.current()
    used = moving = None
    if isinstance(sink, ReadByGenerations):
        used, moving = sink.still_read(), sink.switching()
    if moving is not None:
        raise ConfigError(
            f"the switch to generation {moving} was interrupted, and needs its build",
            hint="start the follower, which finishes it, or repeat that `cdc rebuild`",
        )
    if used is not None:
        raise ConfigError(
            f"generation {current} is at no frontier yet: readers still use generation {used}",
            hint="the follower's next batch brings it to one; then repeat the command",
        )
    dropped = [number for number in sink.generations() if number != current]
    for number in dropped:
        sink.drop(number)
    return dropped


def _reached(build: Generations) -> int:
    """Return the highest seq that rows from an earlier attempt may have."""
    try:
        state = build.open()
    except StoreLostError:
        return 0  # it will be started from scratch
    return max(state.reached, state.applied.seq) if state else 0


def _described(table: str, differences: Differences) -> str:
    """Return a text with how many keys differ and how, and the first of them."""
    only_old, only_new = differences.missing
    named = ", ".join(each.key[:12] for each in differences.first(_NAMED))
    return (
        f"{len(differences):,} keys of {table} differ ({only_new:,} were missing, {only_old:,} too"
        f" many, {len(differences) - only_new - only_old:,} others); digests {named}"
    )


def _expect_known(tables: frozenset[str], known: Iterable[str]) -> None:
    """Raise ConfigError if a follower has no table with such a name."""
    there = sorted(known)
    if unknown := sorted(tables - set(there)):
        raise ConfigError(
            f"the follower has no table {', '.join(unknown)}",
            hint=f"it has {listed(there) or 'none yet'}",
        )
