"""Run `cdc` for the page, each command in a process of its own, as a person would in a terminal.

So the page has no second way to do anything: what a command checks, records and prints is the same.
"""

from __future__ import annotations

import asyncio
import os
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import orjson

from cdc.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_HINT: Final = "what to do: "
_TIMEOUT_SECONDS: Final = 60.0


async def start(config_path: Path, words: Sequence[str], **env: str) -> asyncio.subprocess.Process:
    """Start `cdc` with these words; its output and its errors are pipes."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cdc.cli.main", *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "LOCKSTEP_CONFIG": str(config_path), **env},
    )  # fmt: skip


async def listed(config_path: Path, words: Sequence[str]) -> list[Any]:
    """Return the JSON list that a command prints.

    Raises ConfigError with what the command says, UnavailableError where it takes too long.
    """
    process = await start(config_path, words)
    try:
        out, err = await asyncio.wait_for(process.communicate(), _TIMEOUT_SECONDS)
    except TimeoutError as error:
        raise UnavailableError(
            f"cdc {words[0]} did not end within {_TIMEOUT_SECONDS:.0f} s",
            hint="run it in a terminal",
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not out.startswith(b"["):
        raise error_of(words[0], err)
    found: list[Any] = orjson.loads(out)
    return found


def error_of(command: str, err: bytes) -> ConfigError:
    """Return the command's own error, which is two lines: who and what, and what to do."""
    lines = err.decode(errors="replace").splitlines()
    for what, hint in pairwise(lines):
        if hint.startswith(_HINT):
            return ConfigError(what.partition(": ")[2], hint=hint.removeprefix(_HINT))
    return ConfigError(f"cdc {command} has failed", hint="run it in a terminal")
