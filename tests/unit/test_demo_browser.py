"""Where the demo opens a browser by itself: only where its user sees it."""

from __future__ import annotations

import pytest

from cdc.playground.demo.browser import is_seen


@pytest.mark.parametrize(
    ("environ", "platform", "seen"),
    [
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({}, "darwin", True),
        ({}, "linux", False),
        ({"DISPLAY": ""}, "linux", False),
        ({"DISPLAY": ":0", "CI": "true"}, "linux", False),
        ({"DISPLAY": "localhost:10.0", "SSH_CONNECTION": "a 1 b 22"}, "linux", False),
        ({"SSH_TTY": "/dev/ttys001"}, "darwin", False),
        ({"DISPLAY": ":0", "SSH_TTY": "", "CI": ""}, "linux", True),
    ],
)
def test_a_browser_is_opened_on_a_desktop_and_not_over_ssh_or_in_ci(
    environ: dict[str, str], platform: str, *, seen: bool
) -> None:
    assert is_seen(environ, platform) is seen
