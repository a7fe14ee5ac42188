"""A follower's frontier in its store, checked against this log.

A log that was recreated, or one of a restored database, has other frontiers at the same places. A
store of the previous log must not continue, and its LSN must not be taken for one of this log.

Nor may it continue if it has not applied all of its tables' events up to its frontier: a table that
was added to the follower later, or removed for a while, would silently lack rows.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from cdc.errors import ConfigError, GapError
from cdc.log import absence, names, reader
from cdc.log.frontier_tail import expect_frontier
from cdc.log.partitions import OffsetRange
from cdc.log.ranges import RangeReader
from lockstep.jobs.apply.opening import open_store
from lockstep.jobs.apply.running import with_remedy
from lockstep.jobs.cuts.chosen import Chosen
from lockstep.jobs.cuts.frontiers import FrontierFinder
from lockstep.jobs.cuts.reduce import parsed
from lockstep.sinks.contract import Applied

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cdc.config import Config
    from cdc.log.partitions import Partition
    from lockstep.jobs.apply.running import FollowerRun
    from lockstep.sinks.contract import Sink, StoreState


def open_in_log(run: FollowerRun, sink: Sink) -> StoreState:
    """Open the store and return its frontier; raise GapError if that is from another log.

    Raises ConfigError if it never applied some of a table's earlier events, and UnavailableError,
    before anything is written to the store, if the pipeline is not set up.
    """
    absence.expect_set_up(run.config)
    state = open_store(run, sink)
    applied = state.applied
    try:
        _expect_frontier(run.config, applied)
    except GapError as error:
        run.opened_at(Applied.beginning(run.config.pipeline, applied.generation))
        raise with_remedy(error, run.name, "at the store's frontier") from error
    if _is_at_no_frontier(run, state):
        run.opened_at_no_frontier(applied.generation)
    else:
        run.opened_at(applied)
    _expect_complete(run.config, run.name, applied)
    return state


def _is_at_no_frontier(run: FollowerRun, state: StoreState) -> bool:
    """Return whether the store lacks rows of its frontier until it has the interrupted cut.

    Its own state can't show that. A rebuild has reported it: the store was emptied, and is filled
    by one cut (`LogBuilder.refill`), or tables were switched that are ahead of the others.
    """
    reported = run.reported
    return (
        reported is not None
        and state.reached > state.applied.seq
        and reported.generation == state.applied.generation
        and (reported.state == "rebuilding" or not reported.lsn)
    )


def is_of_this_log(config: Config, applied: Applied) -> bool:
    """Return whether a store's frontier may be one of this log; False if the log has another."""
    try:
        _expect_frontier(config, applied)
    except GapError:
        return False
    return True


def _expect_frontier(config: Config, applied: Applied) -> None:
    """Raise GapError if the log has another frontier at the store's place."""
    expect_frontier(
        config,
        applied.place,
        (applied.epoch, applied.lsn, applied.seq),
        "the store",
        "it followed another log: one that was set up before, or of a database that was restored"
        " since",
    )


def _expect_complete(config: Config, name: str, applied: Applied) -> None:
    """Raise ConfigError unless all events up to the store's frontier were applied.

    The first event after the end that the store has for a partition must be above its frontier.
    """
    if config.followers[name].is_derived:
        return  # they are built from a mirror, whose own start checks its tables
    resumed = reader.read_resume(config) if applied.place else None
    if resumed is None:
        return
    topics = Chosen(config, config.followers[name]).among(resumed[0].partitions)
    for topic, seq in _never_applied(config, topics, applied).items():
        table = names.table_name(config.prefix, topic)
        raise ConfigError(
            f"{table} has changes, from seq {seq} on, that follower {name} at seq"
            f" {applied.seq} never applied: the table was not always among its tables",
            hint=f"`cdc rebuild {name}` reads all rows again; or remove the table from the"
            " follower's tables",
        )


def _never_applied(config: Config, topics: Mapping[str, int], applied: Applied) -> dict[str, int]:
    """Return topics with events up to a store's frontier that it never applied, and a seq."""
    left = _unread(config, topics, applied)
    with closing(RangeReader(config)) as log:
        firsts = log.first_events(left)
    seqs = {topic: parsed(value).source.seq for (topic, _), value in firsts.items()}
    return {topic: seq for topic, seq in seqs.items() if seq <= applied.seq}


def with_ends(config: Config, topics: Mapping[str, int], applied: Applied) -> Applied:
    """Return a store's frontier as it is once it has rebuilt topics, even if it lacked them.

    For such a topic the store has no ends, or those of an earlier frontier. The log's records have
    them. A partition that no remaining record names is read from its beginning: if it had events
    before the frontier, the follower notices at its start.
    """
    known = topics.keys() <= applied.ends.keys()
    if not applied.place or (known and not _never_applied(config, topics, applied)):
        return applied
    with closing(FrontierFinder(config)) as log:
        placed = log.newest(applied.seq)
        found = log.ends(placed) if placed is not None else {}
    places = [(topic, number) for topic, count in topics.items() for number in range(count)]
    ends, spans = applied.end_of, absence.spans(config, places)
    for place in places:
        ends[place] = max(ends.get(place, 0), found.get(place, 0)) or spans[place][0]
    rebuilt = {
        topic: tuple(ends[topic, number] for number in range(count))
        for topic, count in topics.items()
    }
    return applied._replace(ends={**applied.ends, **rebuilt})


def _unread(
    config: Config, topics: Mapping[str, int], applied: Applied
) -> dict[Partition, OffsetRange]:
    """Return each partition's range that the store has not read, if not empty."""
    ends, left = applied.end_of, {}
    places = [(topic, number) for topic, count in topics.items() for number in range(count)]
    for place, (low, end) in absence.spans(config, places).items():
        start = max(low, ends.get(place, 0))
        if end > start:
            left[place] = OffsetRange(start, end)
    return left
