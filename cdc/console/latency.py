"""How late events are in the log, in a bounded number of buckets that add up. Pure."""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

# From one bucket to the next: a percentile is right to a tenth.
_STEP: Final = math.log(1.2)
# A day; what is later counts as that.
_MOST: Final = math.ceil(math.log(86_400_000) / _STEP)


class Lateness(Counter[int]):
    """Counts of events by bucket of milliseconds."""

    def note(self, milliseconds: float) -> None:
        self[min(_MOST, max(0, round(math.log(max(1.0, milliseconds)) / _STEP)))] += 1

    def percentile(self, share: float) -> float | None:
        """Return the milliseconds within which this share of the events was; None without any."""
        wanted = share * self.total()
        seen = 0
        for bucket in sorted(self):
            seen += self[bucket]
            if seen >= wanted:
                return round(math.exp(bucket * _STEP), 1)
        return None
