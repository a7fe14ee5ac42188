"""The waiting times of the daemon's loop, and how far it reads ahead: each with its reason."""

from __future__ import annotations

from typing import Final

# This much in one iteration means a backlog: it is read lazily and published in large batches. The
# walsender is two to three times as fast when it is not woken for every row.
BACKLOG_BYTES: Final = 24 << 10
LAZY_SECONDS: Final = 0.001
# How often arriving data is read while a batch is being sent, or lingers: rarely enough to cost
# little, often enough to notice a backlog.
GATHER_SECONDS: Final = 0.005
# A batch's size divided by this may be encoded while nothing can be sent: bounds memory.
AHEAD: Final = 4
# A frontier record gets a Kafka transaction of its own when nothing follows for this long.
FRONTIER_SECONDS: Final = 0.02
# Otherwise it is written in a transaction of data, but no more often than this: each partition more
# costs a small transaction most of a millisecond, and a frontier covers everything before it.
FRONTIER_EVERY_SECONDS: Final = 0.05
# A Kafka transaction is ended after this, far below the broker's timeout, even if its last source
# transaction has not arrived completely.
OPEN_SECONDS: Final = 10.0
# How often an idle pipeline moves its resume record, and the slot with it, to the WAL's end.
IDLE_SECONDS: Final = 10.0
# The longest the loop sleeps: feedback and health are updated in between.
TURN_SECONDS: Final = 0.5
# A stop's grace period, below the ten seconds that supervisors allow: what is then in flight is
# left to the next start.
STOP_SECONDS: Final = 8.0
# The part of it for the rest of the source transaction being read; what is left is for its commit.
STOP_READING_SECONDS: Final = 4.0
