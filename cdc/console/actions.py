"""What a viewer may do where `cdc console --allow-actions` was given: commands, nothing else.

An action is the command that the page showed, run as it was shown: the page sends both, and a
request whose command is another one is refused. Every start and every end is logged with who asked.
"""

from __future__ import annotations

import asyncio
import getpass
import logging
import re
import shlex
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from cdc.console import commands
from cdc.errors import ConfigError, printable

if TYPE_CHECKING:
    from pathlib import Path

    from cdc.config import Config

log = logging.getLogger("cdc.console.actions")

# A rebuild is a Spark job.
_MOST_RUNNING: Final = 4
_KEPT: Final = 20
_OUTPUT_CHARACTERS: Final = 2_000
_MOST_CHARACTERS: Final = 1_000
_STOP_SECONDS: Final = 2.0
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass
class CommandRun:
    """A command that was asked for; `exit_code` is None while it runs."""

    number: int
    command: str
    by: str
    began_ms: int
    ended_ms: int | None = None
    exit_code: int | None = None
    output: str = ""


def words_of(config: Config, action: str, target: str, number: str) -> tuple[str, ...]:
    """Return the words of an action's command after `cdc`; raise ConfigError where it is none."""
    kind, _, name = target.partition(".")
    for given in (target, number, name):
        if given.startswith("-") or len(given) > _MOST_CHARACTERS or printable(given) != given:
            raise _refused(f"{given[:40]!r} is no name")
    if action == "snapshot" and target:
        return ("snapshot", "start", target)
    if action in {"pause", "resume", "stop"} and (not number or _ID.fullmatch(number)):
        return ("snapshot", action, *([number] if number else []))
    if action == "rebuild" and target in config.followers:
        return ("rebuild", target)
    if action == "send" and target in config.webhooks and _ID.fullmatch(number):
        return ("webhook", "send", target, number)
    if action == "retry" and target and _ID.fullmatch(number):
        return ("queue", "retry", target, number)
    is_known = bool(name) if kind == "queue" else kind == "webhook" and name in config.webhooks
    if action == "discard" and is_known and _ID.fullmatch(number):
        return (kind, "discard", "--yes", name, number)
    raise _refused(f"{action[:40]!r} is no action with what was given")


def _refused(what: str) -> ConfigError:
    return ConfigError(what, hint="load the page again")


class Actions:
    """The commands that run, and the newest ones that ran."""

    def __init__(self, config: Config, config_path: Path) -> None:
        self._config = config
        self._config_path = config_path
        self._runs = deque[CommandRun](maxlen=_KEPT)
        self._tasks = set[asyncio.Task[None]]()
        self._numbered = 0

    @property
    def is_full(self) -> bool:
        return len(self._tasks) >= _MOST_RUNNING

    def listed(self) -> list[dict[str, Any]]:
        """Return them, the newest first."""
        return [asdict(each) for each in reversed(self._runs)]

    def start(self, asked: dict[str, str], by: str) -> int:
        """Start an action's command; return its number. Raises ConfigError where it is none."""
        words = words_of(self._config, asked["action"], asked["target"], asked["id"])
        command = shlex.join(("cdc", *words))
        if command != asked["command"]:
            raise _refused("the command that was shown is another one")
        self._numbered += 1
        run = CommandRun(self._numbered, command, by, time.time_ns() // 1_000_000)
        self._runs.append(run)
        log.info("an action starts", extra={"fields": {"command": command, "by": by}})
        task = asyncio.create_task(self._run(run, words))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return run.number

    async def _run(self, run: CommandRun, words: tuple[str, ...]) -> None:
        # Cancelled when the server ends. What the log of decisions records as who took them.
        who = f"{getpass.getuser()} by the console, {run.by}"
        process = await commands.start(self._config_path, words, LOGNAME=who)
        try:
            out, err = await process.communicate()
            run.output = (out + err).decode(errors="replace")[-_OUTPUT_CHARACTERS:]
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), _STOP_SECONDS)
                except TimeoutError:
                    process.kill()
                    await process.wait()
            run.exit_code = process.returncode
            run.ended_ms = time.time_ns() // 1_000_000
            fields = {"command": run.command, "by": run.by, "exit_code": run.exit_code}
            log.info("an action has ended", extra={"fields": fields})
