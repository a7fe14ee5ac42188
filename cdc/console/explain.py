"""The versions of a row: by `cdc history` where there is an archive, else from the topic's end.

One runs at a time. The archive's reader needs packages that the console does not, and may use much
memory; a process can be ended. A search of the topic has a limit of time (`key_search`), and asks
its index (`key_indexer`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from cdc.console import commands
from cdc.console.feed import exact
from cdc.console.key_search import KeySearch

if TYPE_CHECKING:
    from pathlib import Path

    from cdc.config import Config
    from cdc.console.key_indexer import KeyIndexer

# A row with more versions than this is one for the command line.
_MOST_VERSIONS: Final = 500


class Explainer:
    def __init__(
        self, config: Config, config_path: Path, indexer: KeyIndexer | None = None
    ) -> None:
        self._config, self._config_path = config, config_path
        self._indexer = indexer
        self._turn = asyncio.Semaphore(1)

    async def versions(self, table: str, key: str, before: str = "") -> dict[str, Any]:
        """Return the newest versions of a row, oldest first, and how many there are.

        Without an archive also `searched`: how far back they are complete, and as `before` where a
        further search continues. Integers that a browser would round are text. Raises ConfigError
        where table or key is not in the log, UnavailableError where it takes too long or the
        brokers do not answer.
        """
        async with self._turn:
            if self._config.archive.path is None:
                search = KeySearch(self._config, table, key, before, self._indexer)
                answer = await asyncio.to_thread(search.run)
                return answer | {"versions": exact(answer["versions"])}
            words = ("history", "--json", "--", table, key)
            found = await commands.listed(self._config_path, words)
        versions = exact(found[-_MOST_VERSIONS:])
        return {"count": len(found), "versions": versions, "searched": None}
