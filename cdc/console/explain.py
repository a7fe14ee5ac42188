"""Every version of a row, by `cdc history`. One runs at a time.

The archive's reader needs packages that the console does not, and may use much memory; a process
can be ended.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from cdc.console import commands

if TYPE_CHECKING:
    from pathlib import Path

# A row with more versions than this is one for the command line.
_MOST_VERSIONS: Final = 500


class Explainer:
    def __init__(self, config_path: Path) -> None:
        self._config_path = config_path
        self._turn = asyncio.Semaphore(1)

    async def versions(self, table: str, key: str) -> dict[str, Any]:
        """Return the newest versions of a row, oldest first, and how many there are.

        Raises ConfigError with what the command says, UnavailableError where it takes too long.
        """
        async with self._turn:
            words = ("history", "--json", "--", table, key)
            found = await commands.listed(self._config_path, words)
        return {"count": len(found), "versions": found[-_MOST_VERSIONS:]}
