"""Compare the topics' events with what the frontiers count, before a store is emptied.

A topic may lack events in its middle: Kafka has compacted it, for example. A follower notices when
it reads them, which is too late for a store that has no second generation.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from cdc.log import names
from cdc.log.partitions import OffsetRange
from cdc.log.ranges import RangeReader
from lockstep.jobs.apply.reading import miscounted
from lockstep.jobs.cuts.tail import CutTail
from lockstep.sinks.contract import StoreState

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.errors import MiscountedError
    from lockstep.sinks.contract import Applied

_POLL_SECONDS = 0.1


def first_miscount(config: Config, name: str, applied: Applied) -> MiscountedError | None:
    """Return the error for the first partition that has more or fewer events than are counted.

    Reads what the follower would read after a frontier, up to now. Raises GapError if it can't.
    """
    dead = names.dead_topic(config.prefix)
    with (
        closing(CutTail(config, name, StoreState(applied, applied.seq), None)) as cuts,
        closing(RangeReader(config)) as log,
    ):
        while True:
            cut = cuts.next(_POLL_SECONDS)
            if cut is None:
                if cuts.has_caught_up:
                    return None
                continue
            counted = {
                (part.topic, part.partition): part for part in cut.parts if part.topic != dead
            }
            found = dict.fromkeys(counted, 0)
            for place, messages in log.pieces(
                {place: OffsetRange(part.start, part.end) for place, part in counted.items()}
            ):
                found[place] += sum(each.value() is not None for each in messages)
            for place, part in counted.items():
                if found[place] != part.events:
                    return miscounted(config, cut, part, found[place])
