"""`cdc demo` from an empty folder to its closing line, as a newcomer runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from cdc.playground.demo.schema import OLD_ROWS
from tests.fixtures.spark import need_java

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.slow
_SAME: Mapping[str, str] = {}


@contextmanager
def demo(
    home: Path, *options: str, followers: bool = False, environ: Mapping[str, str] = _SAME
) -> Iterator[subprocess.Popen[str]]:
    """Run the demo in `home`; however it ends, nothing of it is left."""
    chosen = "--followers" if followers else "--no-followers"
    argv = [sys.executable, "-m", "cdc.cli.main", "demo", "--home", str(home), chosen, *options]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, **environ},
    ) as child:  # fmt: skip
        try:
            yield child
        finally:
            child.kill()
            wait_until_nothing_runs(home)


def outcome(home: Path, *options: str, followers: bool = False) -> dict[str, Any]:
    with demo(home, "--json", *options, followers=followers) as child:
        out, err = child.communicate(timeout=600)
        assert child.returncode == 0, err
        result: dict[str, Any] = json.loads(out)
        assert left_running(home) == []
    assert result["equal"] is True
    assert result["findings"] == []
    return result


def left_running(home: Path) -> list[str]:
    """Return the command lines of processes that work in `home`."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        if process.pid != os.getpid() and (
            any(str(home) in word for word in words)
            or (process.info["cwd"] or "").startswith(str(home))
        ):
            found.append(" ".join(words))
    return found


def wait_until_nothing_runs(home: Path) -> None:
    deadline = time.monotonic() + 60
    while left := left_running(home):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def read_until(child: subprocess.Popen[str], text: str) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        if text in line:
            return
    pytest.fail(f"the demo ended before it printed {text!r}")


@pytest.mark.long("five minutes of chaos")
@pytest.mark.timeout(900)
def test_killed_with_everything_else_the_followers_equal_the_database(tmp_path: Path) -> None:
    """Stores and views at one LSN: each killed round ends when the followers have caught up."""
    need_java()
    result = outcome(tmp_path / "demo", "--for", "25s", "--chaos", "--seed", "7", followers=True)
    rows = result["followers"]
    assert rows.keys() == {"mirror", "cache", "search", "timelines", "totals", "totals_sql"}
    assert rows["mirror"] > rows["cache"] == rows["search"] > 100
    assert rows["timelines"] > rows["totals"] == rows["totals_sql"] > 100
    assert "followers" in {kill["what"] for kill in result["kills"]}
    assert 0 < result["first_change_seconds"] < result["every_store_seconds"]
    assert [each.partition(": ")[0] for each in result["examples"]] == [
        "timelines",
        "totals",
        "totals_sql",
    ]


@pytest.mark.commit("README's first command")
def test_the_log_equals_the_database_and_nothing_is_left(tmp_path: Path) -> None:
    """Eight tables, every event counted, every server stopped, the folder cleared."""
    result = outcome(tmp_path / "demo", "--for", "6s", "--seed", "7")
    assert result["tables"] == 8
    assert result["initial"] == OLD_ROWS
    assert result["changes"] > 10
    assert not (tmp_path / "demo" / "data").exists()


@pytest.mark.long("a second demo")
def test_the_console_opens_in_the_browser_once_it_is_served(tmp_path: Path) -> None:
    opened, program = tmp_path / "opened", tmp_path / "browser"
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys, urllib.request\n"
        "with urllib.request.urlopen(sys.argv[1], timeout=20) as answer:\n"
        f"    open({str(opened)!r}, 'w').write(f'{{sys.argv[1]}} {{answer.status}}')\n"
        "print('noise')\n"
    )
    program.chmod(0o700)
    desktop = dict.fromkeys(("CI", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY"), "")
    desktop |= {"DISPLAY": ":9", "BROWSER": f"{program} %s"}
    with demo(tmp_path / "demo", environ=desktop) as child:
        assert child.stdout is not None
        line = next(each for each in child.stdout if "watch it in a browser" in each)
        deadline = time.monotonic() + 60
        while not opened.exists() or not opened.read_text():
            assert time.monotonic() < deadline, "no browser is started"
            time.sleep(0.1)
        assert opened.read_text() == f"{line.split()[-1]} 200"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
        assert "noise" not in out


@pytest.mark.long("chaos")
@pytest.mark.timeout(400)
def test_it_still_does_after_kills_of_daemon_broker_and_postgres(tmp_path: Path) -> None:
    result = outcome(tmp_path / "demo", "--for", "30s", "--chaos", "--seed", "11")
    assert len(result["kills"]) >= 2
    assert all(kill["recovered_seconds"] is not None for kill in result["kills"])


@pytest.mark.long("a second demo")
def test_ctrl_c_ends_with_the_proof(tmp_path: Path) -> None:
    with demo(tmp_path / "demo") as child:
        read_until(child, "changes in the log")
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
        assert "the log equals the database" in out.splitlines()[-1]
        assert left_running(tmp_path / "demo") == []


@pytest.mark.long("a second demo; test_local_stack has servers tied to their process")
def test_a_killed_demo_takes_everything_with_it(tmp_path: Path) -> None:
    """Servers, daemon and generator; and the next demo in the folder runs as the first one did."""
    home = tmp_path / "demo"
    with demo(home) as child:
        read_until(child, "changes in the log")
        child.kill()
        wait_until_nothing_runs(home)
    assert (home / "data").exists()
    outcome(home, "--for", "2s")
