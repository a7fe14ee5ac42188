"""The errors of fetching, starting and stopping servers."""

from __future__ import annotations

from cdc.errors import CDCError, Exit


class LocalStackError(CDCError):
    """A server of the embedded stack cannot be fetched, started or stopped."""

    exit_code = Exit.UNAVAILABLE
