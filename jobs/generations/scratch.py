"""A lake as of a frontier that the follower's own lake no longer has, built from base and archive.

It has the follower's settings, in another folder, and is at that one frontier: read it like any
lake. Without a folder it is a temporary one, deleted when the process ends.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from cdc.errors import ConfigError
from lockstep.jobs.apply import stores
from lockstep.jobs.compacting import restoring
from lockstep.jobs.compacting.restoring import Restoring

if TYPE_CHECKING:
    from cdc.config import Config
    from lockstep.jobs.cuts.frontiers import Position
    from lockstep.sinks.contract import Applied

# So that they exist until the process ends: readers of a lake read it later than it is opened.
_FOLDERS: Final[list[tempfile.TemporaryDirectory[str]]] = []


def lake_at(config: Config, path: str, wanted: Position, folder: str | None) -> tuple[str, Applied]:
    """Build the lake at `path` as of the last frontier not above `wanted`; return its path.

    Raises ConfigError if no follower has this lake, or the archive does not have all of its tables.
    """
    name = next(
        (
            name
            for name, follower in config.followers.items()
            if follower.delta and (follower.delta.path or "").rstrip("/") == path.rstrip("/")
        ),
        None,
    )
    if name is None:
        raise ConfigError(
            f"no follower of {config.pipeline} has the lake {path}",
            hint="give the configuration of the pipeline that fills it",
        )
    follower = config.followers[name]
    assert follower.delta is not None, "it was found by its lake"
    start = restoring.start_of(config, name, wanted)
    if folder is None:
        _FOLDERS.append(tempfile.TemporaryDirectory(prefix="lockstep-as-of-"))
        folder = _FOLDERS[-1].name
    sink = stores.sink(config, name, replace(follower, delta=replace(follower.delta, path=folder)))
    with closing(sink):
        state = sink.open()
        if state is None:
            filling = Restoring(config, name, start, None, lambda _: None)
            return folder, filling.fill(sink, 1, joins=False)
    wanted_seq = start.state.past.seq
    if (state.applied.seq, state.reached) != (wanted_seq, wanted_seq):
        raise ConfigError(
            f"{folder} has another state: that of seq {state.applied.seq}",
            hint="give each state a folder of its own",
        )
    return folder, state.applied
