"""Open a follower's store, and replace what one has lost.

A store that has less than was reported of it is checked twice before it counts as lost. A store
that can hold several generations is repaired by a shadow build, so that what is left stays readable
until that is complete. Any other starts its next generation in place of the lost one, but only if
everything that it needs can be read again.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from cdc.errors import (
    ConfigError,
    GapError,
    StoppedError,
    StoreLostError,
    UnavailableError,
)
from cdc.events import LSN
from lockstep.jobs.apply.applying import TornError
from lockstep.jobs.apply.refilling import refuse_unfillable
from lockstep.sinks.contract import Applied, Generations, Mountable, StoreState

if TYPE_CHECKING:
    from cdc.log.follower_reports import FollowerRecord
    from lockstep.jobs.apply.running import FollowerRun
    from lockstep.sinks.contract import Sink

log = logging.getLogger("lockstep.jobs.follow")

# The numbers of generations that stay as of one LSN are above, so that none is continued. Delta's
# transactions have room for numbers up to 32,767.
AS_OF_ABOVE: Final = 30_000
# Seconds before a store is checked again for something missing, before it counts as lost.
SURE_SECONDS: Final = 2.0


def open_store(run: FollowerRun, sink: Sink) -> StoreState:
    """Return the store's frontier; a store that lost a part is repaired before.

    Nothing is deleted from it before it is certain that it can be refilled; raises GapError if it
    can't. Raises ConfigError if it follows another pipeline.
    """
    pipeline = run.config.pipeline
    reported = None if run.is_shadow else run.read_report()
    try:
        state = _open_twice(run, sink, reported)
    except StoreLostError as error:
        if run.repair is not None and isinstance(sink, Generations):
            _repair(run, sink, reported, error)
        else:
            _start_next_generation(run, sink, reported, error)
        state = _open(run, sink)
    if state.applied.pipeline != pipeline:
        raise ConfigError(
            f"the store follows the pipeline {state.applied.pipeline}",
            hint="give each pipeline's follower a prefix or a path of its own",
        )
    return state


def _open_twice(run: FollowerRun, sink: Sink, reported: FollowerRecord | None) -> StoreState:
    """Return the store's frontier; raise StoreLostError if a part is missing at two checks."""
    if isinstance(run.error, TornError):
        raise run.error
    try:
        return open_once(run, sink, reported)
    except StoreLostError as error:
        log.warning("%s: %s; checking again", run.name, error.what)
        if run.stopping.wait(SURE_SECONDS):
            raise StoppedError from error
        return open_once(run, sink, reported)


def open_once(run: FollowerRun, sink: Sink, reported: FollowerRecord | None) -> StoreState:
    """Open the store, and return its state; raises `StoreLostError` if it lacks what it had."""
    lsn = _reported_lsn(reported)
    # Checked before the store is opened, because that creates what is missing.
    if reported is not None and lsn and sink.current() is None:
        place = sink.absent() if isinstance(sink, Mountable) else None
        if place is not None:
            raise UnavailableError(
                f"there is nothing at {place}, where the store had everything up to {lsn}",
                hint="mount the volume, or restore the store: until then nothing is written"
                f" there. If it is deleted for good, `cdc rebuild {run.name}` builds it again",
            )
        raise _not_the_reported(reported)
    state = _open(run, sink)
    _expect_reported(reported, state.applied)
    return state


def _repair(
    run: FollowerRun, sink: Sink, reported: FollowerRecord | None, error: StoreLostError
) -> None:
    """Replace what the store has lost; until that is visible to readers it is at no frontier."""
    assert run.repair is not None, "the caller has checked"
    _no_frontier(run, reported, _next_generation(run, sink, reported) - 1)
    run.to("rebuilding", error)
    log.warning("%s: %s; building it again alongside what is left", run.name, error.what)
    run.repair(run, sink, error)


def _no_frontier(run: FollowerRun, reported: FollowerRecord | None, otherwise: int) -> None:
    """Report the store at no frontier, and what it had, which the next start must find again."""
    generation = reported.generation if reported else otherwise
    run.opened_at(Applied.beginning(run.config.pipeline, generation))
    run.had_lsn = _reported_lsn(reported)


def _start_next_generation(
    run: FollowerRun, sink: Sink, reported: FollowerRecord | None, error: StoreLostError
) -> None:
    """Start the next generation in place of the lost one, if it can be refilled."""
    generation = _next_generation(run, sink, reported)
    if run.is_shadow and isinstance(sink, Generations) and sink.current() not in (None, generation):
        run.opened_at(Applied.beginning(run.config.pipeline, generation))
        sink.drop(generation)  # the generation that readers see is not lost
        return
    try:
        refuse_unfillable(run.config, run.name, error)
    except GapError:
        _no_frontier(run, reported, generation)
        raise
    run.opened_at(Applied.beginning(run.config.pipeline, generation))
    run.to("rebuilding", error)
    log.warning("%s: %s; building generation %d", run.name, error.what, generation)
    sink.start_over(generation)


def _open(run: FollowerRun, sink: Sink) -> StoreState:
    """Open the store; one that has applied nothing yet is at the log's beginning."""
    state = sink.open()
    if state is not None and state.applied.pipeline:
        return state
    generation = run.applied.generation if run.is_shadow and run.applied else sink.current() or 1
    beginning = Applied.beginning(run.config.pipeline, generation)
    return StoreState(beginning, 0) if state is None else state._replace(applied=beginning)


def _expect_reported(reported: FollowerRecord | None, at: Applied) -> None:
    """Raise StoreLostError if more was reported than the store or its generation has.

    Reports of an older generation are ignored, and the newest report promises rows that are
    missing. Exception: a rebuild reports a generation just before the switch, so readers may never
    have seen it.
    """
    if reported is None:
        return
    is_lost = reported.generation > at.generation and reported.state != "rebuilding"
    if not at.lsn:
        is_lost = (reported.generation, _reported_lsn(reported)) > (at.generation, LSN(0))
    if is_lost:
        raise _not_the_reported(reported)


def _reported_lsn(reported: FollowerRecord | None) -> LSN:
    """Return the LSN up to which the store held everything, by the newest report."""
    return LSN(0) if reported is None else reported.had_lsn or reported.lsn


def _not_the_reported(reported: FollowerRecord) -> StoreLostError:
    return StoreLostError(
        f"the store is not the one that had generation {reported.generation} up to"
        f" {_reported_lsn(reported)}"
    )


def _next_generation(run: FollowerRun, sink: Sink, reported: FollowerRecord | None) -> int:
    """Return the next number for a lost store: above all that were reported or exist.

    A shadow build keeps its number, because the rebuild identifies it by that.
    """
    if run.is_shadow and run.applied is not None:
        return run.applied.generation
    known = [reported.generation if reported else 1, run.applied.generation if run.applied else 1]
    with suppress(StoreLostError):
        every = sink.generations() if isinstance(sink, Generations) else ()
        known += [number for number in every if number < AS_OF_ABOVE]
        known.append(sink.current() or 1)
    return max(known) + 1
