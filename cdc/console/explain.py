"""Every version of a row, by `cdc history` in a process of its own.

The archive's reader needs packages that the console does not, and may use much memory; a process
can be ended. One runs at a time.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import orjson

from cdc.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from pathlib import Path

_TIMEOUT_SECONDS: Final = 60.0
_HINT: Final = "what to do: "
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
            command = ("-m", "cdc.cli.main", "history", "-c", str(self._config_path.absolute()))
            process = await asyncio.create_subprocess_exec(
                sys.executable, *command, "--json", "--", table, key,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                out, err = await asyncio.wait_for(process.communicate(), _TIMEOUT_SECONDS)
            except TimeoutError as error:
                raise UnavailableError(
                    f"cdc history did not end within {_TIMEOUT_SECONDS:.0f} s",
                    hint="run it in a terminal",
                ) from error
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if not out.startswith(b"["):
            raise error_of(err)
        found = orjson.loads(out)
        return {"count": len(found), "versions": found[-_MOST_VERSIONS:]}


def error_of(err: bytes) -> ConfigError:
    """Return the command's own error, which is two lines: who and what, and what to do."""
    lines = err.decode(errors="replace").splitlines()
    for what, hint in pairwise(lines):
        if hint.startswith(_HINT):
            return ConfigError(what.partition(": ")[2], hint=hint.removeprefix(_HINT))
    return ConfigError("cdc history has failed", hint="run it in a terminal")
