"""Places where a test kills the process: between every two stages.

`LOCKSTEP_FAILPOINT=after_commit:3` makes the process kill itself with SIGKILL the third time it
reaches `after_commit`. Without the variable a failpoint is one comparison, once a batch.
"""

from __future__ import annotations

import os
import signal
from typing import Final

# In the order a change passes them. Tests run over all of them.
NAMES: Final = (
    "after_slot",  # the slot is ours, the producer not yet
    "after_fence",  # older writers are fenced, the resume record is not read
    "after_receive",
    "after_sequence",
    "after_begin",
    "after_produce",  # the data is with the producer, the resume record is not
    "before_commit",
    "after_flush",  # all of it is acknowledged, none of it committed
    "in_turn",  # the batch before it is committed, it is not
    "after_commit",  # the log holds it, the daemon has not taken note
    "before_confirm",
    "after_confirm",
    "before_frontier",  # a transaction of its own for a frontier record
)

# In the coordinator of an initial snapshot, in their order.
COORDINATOR_NAMES: Final = (
    "after_export",  # the snapshot is exported, nobody has been told
    "after_plan",  # the log holds the plan
    "after_gone",  # the log holds some deletes of what has gone
    "before_handover",
    "after_handover",  # the log says that it is done, and where the stream goes on
)
# In a task of a snapshot, in the order a range passes them.
SNAPSHOT_NAMES: Final = (
    "in_range",  # some of its rows are with the producer
    "before_range_commit",
    "after_range_commit",  # the log holds it, nobody has been told
)
# Around a chunk of a live snapshot, in their order.
LIVE_NAMES: Final = (
    "before_low",
    "after_low",  # its window is open in the stream
    "after_select",
    "before_high",  # its rows are in memory only
    "after_high",
)
# In a follower's job, in the order a cut passes them.
FOLLOWER_NAMES: Final = (
    "follow_opened",  # the store has said where it stands
    "follow_cut",  # the cut is known
    "follow_read",
    "follow_reduced",
    "follow_begun",  # the store knows that it is being written
    "follow_written",  # one table is
    "follow_committed",  # the store stands at the frontier, nobody has been told
    "follow_reported",
)
# In a follower's rebuild, in their order; those of a follower's job come between the first two.
REBUILD_NAMES: Final = (
    "rebuild_begun",  # its number is known, nothing of it is there
    "rebuild_proved",  # it holds what the log says, readers see the old one
    "rebuild_switching",  # all have been told, readers see the old one
    "rebuild_switched",  # readers see it, nobody has been told
)

_name, _, _count = os.environ.get("LOCKSTEP_FAILPOINT", "").partition(":")
_left = int(_count or 1)


def reach(name: str) -> None:
    """Kill the process if this is the place and the time the environment names."""
    global _left  # noqa: PLW0603 - one process, one failpoint
    if name != _name:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
