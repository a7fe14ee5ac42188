"""The demo's own folder: created for every run, removed after it, never another program's.

A folder is the demo's when it has the demo's marker file. Any other that holds files is refused,
since each run starts by clearing its folder. One demo at a time runs in one folder.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

from cdc.errors import ConfigError, LocalStackError
from cdc.playground.servers.home import Home
from cdc.playground.servers.stack import LocalStack
from cdc.runtime.file_lock import file_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_MARK: Final = "lockstep-demo"
_LOCK: Final = "demo.lock"
_KEPT: Final = {_MARK, _LOCK, "lock"}


@contextmanager
def claimed(folder: Path, *, keep: Callable[[], bool]) -> Iterator[Home]:
    """Yield the folder, empty; empty it again at the end, unless its data is to `keep`.

    What an error leaves stays there for inspection, until the next run clears it.

    Raises ConfigError for a folder that is not the demo's, or in which a demo runs.
    """
    folder = folder.absolute()
    mark = folder / _MARK
    if folder.exists() and not mark.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} holds files that are not the demo's",
            hint="the demo clears its folder: give --home a new or an empty one",
        )
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()
    with ExitStack() as held:
        try:
            held.enter_context(file_lock(folder / _LOCK, timeout_seconds=0.2))
        except LocalStackError as error:
            raise ConfigError(
                f"a demo runs in {folder} already",
                hint="stop it (Ctrl-C where it runs), or give this one another folder: --home",
            ) from error
        home = Home(folder)
        # What a killed earlier run has left.
        LocalStack(folder).down()
        _clear(folder)
        home.make()
        yield home
        if not keep():
            _clear(folder)


def _clear(folder: Path) -> None:
    for each in folder.iterdir():
        if each.name in _KEPT:
            continue
        if each.is_dir():
            shutil.rmtree(each, ignore_errors=True)
        else:
            each.unlink(missing_ok=True)
