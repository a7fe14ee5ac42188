"""The error for which a benchmark reports no figure."""

from __future__ import annotations

from cdc.errors import CDCError, Exit


class BenchmarkError(CDCError):
    """Something measured broke, or what arrived is not what was sent: there is no figure."""

    exit_code = Exit.FAILED
