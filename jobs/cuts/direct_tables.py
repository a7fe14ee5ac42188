"""Which tables' rows have bypassed the log: those that are, or were, copied directly into Delta.

The configuration shows what the next initial snapshot copies so, and the record of the last one
what it has copied so, also if the configuration has changed since. Records of older versions do not
show it. A table that was read again through the stream since then counts, too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cdc.errors import UnavailableError
from cdc.log import names
from cdc.snapshot.initial import topic as initial

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from cdc.config import Config

log = logging.getLogger("lockstep.jobs")


def recorded(config: Config) -> frozenset[str]:
    """Return the topics of the tables that the initial snapshot has copied directly."""
    state = initial.read_state(config)
    return frozenset(state.direct if state else ())


def recorded_if_reachable(config: Config) -> frozenset[str]:
    """Return the same for a reader of the archive alone, which may have no broker any more."""
    try:
        return recorded(config)
    except UnavailableError as error:
        log.warning(
            "which tables were copied directly is known from the configuration alone: %s",
            error.what,
        )
        return frozenset()


def direct(config: Config, topics: Iterable[str], known: Collection[str]) -> list[str]:
    """Return the names of those tables whose rows have bypassed the log; `known` is `recorded`."""
    return [
        names.table_name(config.prefix, topic)
        for topic in topics
        if topic in known
        or config.selection.of(names.table_of(config.prefix, topic)).snapshot == "direct"
    ]
