"""Points where a test kills the process: between every two stages.

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
    "after_export",  # the snapshot is exported, not used or recorded yet
    "after_plan",  # the log holds the plan
    "after_leftovers",  # the log holds some deletes of rows that no longer exist
    "before_handover",
    "after_handover",  # the log records that it is done, and where the stream continues
)
# In a task of a snapshot, in the order a range passes them.
SNAPSHOT_NAMES: Final = (
    "before_range_commit",
    "after_range_commit",  # the log holds it, not reported yet
)
# While a follower changes the rows of a table that DDL has altered.
ALTER_NAMES: Final = ("follow_altered",)  # some rows are written
# Around a chunk of an incremental snapshot, in their order.
CHUNK_NAMES: Final = (
    "before_low",
    "after_low",  # its low watermark is written
    "after_select",
    "before_high",  # its rows are in memory only
    "after_high",
)
# In a follower's job, in the order a cut passes them.
FOLLOWER_NAMES: Final = (
    "follow_opened",  # the store has returned its applied frontier
    "follow_cut",  # the cut is known
    "follow_read",
    "follow_reduced",
    "follow_started",  # the store has recorded that a write is in progress
    "follow_written",  # one table is written
    "follow_committed",  # the store is at the frontier, not reported yet
    "follow_reported",
)
# In a Kafka transaction of a follower in topics.
TOPIC_NAMES: Final = (
    "topic_sent",  # a cut's rows are acknowledged, its frontier is not written
    "topic_flushed",  # a transaction's records are all acknowledged, it is not committed
)
# In a cut of a follower with views.
VIEW_NAMES: Final = ("view_written",)  # some rows are written, the store is not at the frontier
# When executors have written all rows of a view, and the store is not at the frontier.
VIEW_BUILD_NAMES: Final = ("view_built",)
# While the rows of a view are deleted, once in each of three cuts, or computed again: in two.
VIEW_REQUEST_NAMES: Final = (
    "view_request_written",  # the store has the cut's changes, and no frontier of it
    "view_request_step",  # the store is at the frontier
)
# In a follower's rebuild, in their order; those of a follower's job come between the first two.
REBUILD_NAMES: Final = (
    "rebuild_started",  # its number is known, nothing of it exists
    "rebuild_proved",  # it holds what the log holds, readers see the old one
    "rebuild_switching",  # the coming switch is reported, readers see the old one
    "rebuild_switched",  # readers see it, not reported yet
)
# In the archive's job, in the order a cut passes them.
ARCHIVE_NAMES: Final = (
    "archive_opened",  # the table has returned its position
    "archive_cut",  # the cut is known
    "archive_written",  # its files are written, no commit names them
    "archive_committed",
    "archive_joined",  # joined files are written, no commit names them
)
# In a compaction of the archive, in their order.
COMPACT_NAMES: Final = (
    "compact_planned",  # nothing is written
    "compact_file",  # a file is written, no commit names it
    "compact_written",
    "compact_committed",  # readers see the base, older ones are not deleted
)
# While a store is filled from the archive, in their order.
RESTORE_NAMES: Final = (
    "restore_started",  # the store has recorded that a write is in progress
    "restore_written",  # one table is written
    "restore_committed",  # the store is at the archived frontier
)
# In a replay of the past, in the order a window passes them.
REPLAY_NAMES: Final = (
    "replay_sent",  # all of it is acknowledged, not committed
    "replay_committed",
)
# While a row is erased from archive and bases, in their order.
ERASE_NAMES: Final = (
    "erase_file",  # a file is written again, no commit names it
    "erase_committed",  # the archive has no bytes of it, replaced files and bases do
    "erase_base",  # bases neither
    "erase_deleted",  # a replaced file is deleted
    "erase_checkpoint",  # Delta's log can be read without old commits
    "erase_stated",  # the newest commit has the digests of that checkpoint
    "erase_forgotten",  # an old commit is deleted
)
# While a row is erased from topics.
ERASE_TOPICS_NAMES: Final = ("erase_emptied",)  # its records are deleted, no new epoch has started
# While a row is erased from a lake's mirrors, in their order.
ERASE_MIRRORS_NAMES: Final = (
    "erase_mirror",  # mirrors are written again, the frontiers name the versions before
    "erase_frontier",  # the frontiers name the new versions, older ones are still there
)

_name, _, _count = os.environ.get("LOCKSTEP_FAILPOINT", "").partition(":")
_left = int(_count or 1)


def reach(name: str) -> None:
    """Kill the process if the environment names this failpoint and this is the time it names."""
    global _left  # noqa: PLW0603 - one process, one failpoint
    if name != _name:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
