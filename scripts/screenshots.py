"""Take the pictures of the console in docs/console/, from the demo.

Needs Chromium and its driver. A console of its own, at which viewers may act, shows the demo's
pipeline; one snapshot is started in it by its button.
"""

import base64
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.fixtures.browser import opened, show_as
from tests.fixtures.console import ConsoleUnderTest

if TYPE_CHECKING:
    from collections.abc import Callable

    from selenium.webdriver import Chrome

ROOT: Final = Path(__file__).resolve().parent.parent
PICTURES: Final = ROOT / "docs" / "console"
# The limit of one picture, in bytes.
MOST_BYTES: Final = 200_000
_TABLE: Final = "public.orders"
_WAIT_SECONDS: Final = 420.0
_LAG_SECONDS: Final = 30.0
# So that charts have a shape.
_FLOW_SECONDS: Final = 45.0


def main() -> None:
    """Run the demo, take the pictures, and stop it."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        command = ("demo", "--home", home, "--seed", "17", "--rate", "20", "--keep")
        demo = subprocess.Popen(
            [sys.executable, "-m", "cdc.cli.main", *command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
        )
        try:
            take(Path(home))
        finally:
            demo.send_signal(signal.SIGINT)
            time.sleep(2)
            demo.send_signal(signal.SIGINT)  # without its proof
            demo.wait(_WAIT_SECONDS)


def take(home: Path) -> None:
    """Take all pictures of the demo in this folder."""
    file = home / "lockstep.yaml"
    wait(file.exists, "the demo does not start")
    console = ConsoleUnderTest(file, home / "console.log", "--allow-actions")
    try:
        with opened() as browser:
            show_as(browser, 1120)
            browser.get(f"http://127.0.0.1:{console.port}/")
            wait(lambda: console.verdict()["level"] == "ok", "the pipeline is not well")
            time.sleep(_FLOW_SECONDS)
            act(browser)
            wait(lambda: is_near(console), "the lag of the followers does not become short")
            picture(browser, "console.png", "header", ".columns")
            picture(browser, "hour.png", "#chart-title", "#chart-title", of_panel=True)
            picture(browser, "actions.png", "#dead-title", "#actions", of_panel=True)
            picture(browser, "changes.png", "#tail-title", "#tail-title", of_panel=True)
            wait(lambda: console.verdict()["level"] == "ok", "the pipeline is not well again")
            show_as(browser, 1120, dark=True)
            picture(browser, "dark.png", "header", ".columns")
            show_as(browser, 320, 640)
            picture(browser, "phone.png", "header", "#flow")
    finally:
        console.close()


def is_near(console: ConsoleUnderTest) -> bool:
    """Return whether all is well, and the lag of every follower is short."""
    if console.verdict()["level"] != "ok":
        return False
    status = console.get("/api/status")[1]["measured"]["status"]
    lags = [each["lag_seconds"] for each in status["followers"]]
    return all(lag is not None and lag < _LAG_SECONDS for lag in lags)


def act(browser: "Chrome") -> None:
    """Press the button for a snapshot, and wait until its command has ended."""
    browser.execute_script(
        "window.confirm = () => true; const row = document.querySelector('[data-action=snapshot]');"
        "const field = row.querySelector('input'); field.value = arguments[0];"
        "field.dispatchEvent(new Event('input')); row.querySelector('button').click();",
        _TABLE,
    )
    ended = "return document.getElementById('acts').innerText.includes('exit code 0')"
    wait(lambda: browser.execute_script(ended), "the action does not end")


def picture(browser: "Chrome", name: str, first: str, last: str, *, of_panel: bool = False) -> None:
    """Take what the page shows from one element to another, or to the panels around them."""
    time.sleep(3)  # two of its refreshes, at the new width
    box: dict[str, Any] = browser.execute_script(
        "const found = (name) => { const each = document.querySelector(name);"
        " const part = arguments[2] ? each.closest('section') ?? each : each;"
        " return part.getBoundingClientRect(); };"
        "const top = found(arguments[0]).top + scrollY;"
        "const bottom = found(arguments[1]).bottom + scrollY;"
        "return { x: 0, y: Math.max(0, top - 8), width: innerWidth, height: bottom - top + 20 };",
        first, last, of_panel,
    )  # fmt: skip
    answer = browser.execute_cdp_cmd(
        "Page.captureScreenshot",
        {"format": "png", "captureBeyondViewport": True, "clip": {**box, "scale": 1}},
    )
    data = base64.b64decode(answer["data"])
    if len(data) > MOST_BYTES:
        sys.exit(f"{name} has {len(data)} bytes, more than {MOST_BYTES}")
    (PICTURES / name).write_bytes(data)


def wait(reached: "Callable[[], object]", what: str) -> None:
    """Return once `reached` is true; end the script where it takes too long."""
    until = time.monotonic() + _WAIT_SECONDS
    while not reached():
        if time.monotonic() > until:
            sys.exit(what)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
