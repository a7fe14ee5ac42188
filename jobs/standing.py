"""Where a follower's store stands, once it is sure that it does so in this very log.

A log that is begun anew, or a database that is restored, has other frontiers at the same places. A
store of the one before must not go on, nor may anybody take its LSN for one of this log.

Nor may it go on where it has not taken all of its tables' events up to its frontier: a table that
was put among the follower's later, or taken out for a while, lacks rows that nobody would miss.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from cdc.errors import ConfigError, GapError
from cdc.log import absence, names, reader
from cdc.log.ranges import Range, RangeReader
from cdc.log.tailing import record_at
from jobs.chosen import Chosen
from jobs.reduce import parsed
from jobs.running import opened, with_remedy
from sinks.contract import Applied

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cdc.config import Config
    from cdc.log.ranges import Place
    from jobs.running import Run
    from sinks.contract import Generations, Standing


def found(run: Run, sink: Generations) -> Standing:
    """Open the store, and tell where it stands; raise GapError where that is of another log.

    Raises ConfigError where it never took events of a table from before that.
    """
    standing = opened(run, sink)
    applied = standing.applied
    try:
        _expect_frontier(run.config, applied)
    except GapError as error:
        run.stands(Applied.beginning(run.config.pipeline, applied.generation))
        raise with_remedy(error, run.name, "where the store stands") from error
    run.stands(applied)
    _expect_taken(run.config, run.name, applied)
    return standing


def _expect_frontier(config: Config, applied: Applied) -> None:
    """Raise GapError where the log says something else of the place that the store stands at."""
    record = record_at(config, applied.place - 1) if applied.place else None
    stands = (applied.epoch, applied.lsn, applied.seq)
    if record and (record.epoch, record.lsn, record.seq) != stands:
        raise GapError(
            f"the store stands at {applied.lsn} (seq {applied.seq}), where this log has"
            f" {record.lsn} (seq {record.seq})",
            hint="it followed another log: one that was set up before, or of a database that was"
            " restored since",
        )


def _expect_taken(config: Config, name: str, applied: Applied) -> None:
    """Raise ConfigError unless all events up to the frontier that the store stands at were taken.

    The first event after the end that the store knows of a partition is newer than its frontier.
    """
    if config.followers[name].documents:
        return  # made from a mirror's tables, of which the mirror's own start makes sure
    resumed = reader.read_resume(config) if applied.place else None
    if resumed is None:
        return
    follows = Chosen(config, config.followers[name]).follows
    topics = {topic: many for topic, many in resumed[0].partitions.items() if follows(topic)}
    left = _left(config, topics, applied)
    with closing(RangeReader(config)) as log:
        firsts = log.firsts(left) if left else {}
    for (topic, _), value in firsts.items():
        if (seq := parsed(value).source.seq) <= applied.seq:
            table = ".".join(names.table_of(config.prefix, topic))
            raise ConfigError(
                f"{table} has changes, from seq {seq} on, that follower {name} at seq"
                f" {applied.seq} never took: the table was not among its tables all the time",
                hint=f"`cdc rebuild {name}` reads all rows again; or take the table out of the"
                " follower's tables",
            )


def _left(config: Config, topics: Mapping[str, int], applied: Applied) -> dict[Place, Range]:
    """Return what of each partition the store has not read, where there is anything."""
    starts: dict[Place, int] = {}
    for topic, many in topics.items():
        ends = applied.ends.get(topic, ())
        starts |= {(topic, n): ends[n] if n < len(ends) else 0 for n in range(many)}
    left = {}
    for place, (low, end) in absence.spans(config, starts).items():
        start = max(low, starts[place])
        if end > start:
            left[place] = Range(start, end)
    return left
