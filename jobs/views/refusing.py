"""What a view may not contain: refused by name, with the reason or what to write instead."""

from __future__ import annotations

from typing import Final

from cdc.errors import ConfigError

# The hint for what no rule knows.
SEE_THE_LIST: Final = "docs/VIEWS.md lists what a view can have"


class UnsupportedError(ConfigError):
    """A view has something whose answer would not, or not provably, be Postgres' own."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"a view can't have {what}", hint=hint)
