"""Open the console in a browser, where one shows it to the person who started the demo.

A browser that is started over ssh, in CI or without a desktop would show the page to nobody, or
take the terminal. The environment variable BROWSER chooses another program, as Python's webbrowser
documents it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.request
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_ELSEWHERE: Final = ("CI", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")
_DESKTOP: Final = ("DISPLAY", "WAYLAND_DISPLAY")
_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.2


def is_seen(environ: Mapping[str, str], platform: str) -> bool:
    """Return whether a person would see a browser that a process with this environment starts."""
    if any(environ.get(name) for name in _ELSEWHERE):
        return False
    return platform == "darwin" or any(environ.get(name) for name in _DESKTOP)


def open_when_served(url: str) -> None:
    """Open the page as soon as it is served; return at once. Nothing happens where that fails."""
    threading.Thread(target=_open, args=[url], name="browser", daemon=True).start()


def _open(url: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while not _is_served(url):
        if time.monotonic() > deadline:
            return
        time.sleep(_PAUSE_SECONDS)
    # In a process of its own: browsers print, and one that runs in a terminal would take ours.
    subprocess.run(  # noqa: S603 - Python's own module
        [sys.executable, "-m", "webbrowser", url],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
    )


def _is_served(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_PAUSE_SECONDS * 5):  # noqa: S310 - our own address
            return True
    except OSError:
        return False
