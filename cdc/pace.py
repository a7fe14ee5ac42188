"""How long the daemon's loop waits for what, and how far it goes ahead: each with its reason."""

from __future__ import annotations

from typing import Final

# So much in one turn means that there is a backlog: it is read lazily and goes out in large
# batches. The walsender is two to three times as fast when it is not woken for every row.
BACKLOG_BYTES: Final = 24 << 10
LAZY_SECONDS: Final = 0.001
# While a batch is being sent, what arrives is read so often: seldom enough to cost little, often
# enough that a backlog shows.
GATHER_SECONDS: Final = 0.005
# What may be encoded while nothing can be sent, as a share of a batch: bounds memory.
AHEAD: Final = 4
# A frontier record gets a Kafka transaction of its own when nothing follows for so long.
FRONTIER_SECONDS: Final = 0.02
# Otherwise it rides in a transaction of data, and not in each of a hundred a second: each partition
# more costs a small transaction most of a millisecond, and a frontier covers all before it.
FRONTIER_EVERY_SECONDS: Final = 0.05
# A Kafka transaction is ended by then, far from the broker's timeout, though its last source
# transaction has not arrived whole.
OPEN_SECONDS: Final = 10.0
# How often an idle pipeline moves its resume record, and the slot with it, to the WAL's end.
IDLE_SECONDS: Final = 10.0
# The longest the loop sleeps: feedback and health are looked after in between.
TURN_SECONDS: Final = 0.5
# A stop's grace, below the ten seconds that supervisors give: what is in flight by then is left to
# the next start.
STOP_SECONDS: Final = 8.0
# Of that, so long for the rest of the source transaction being read: what is left is its commit's.
STOP_READING_SECONDS: Final = 4.0
