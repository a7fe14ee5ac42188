"""Update the lock files: every package of an install, pinned, with its sha256 sums.

One file is valid for every Python from 3.11 on and every machine, by markers. It names no index.
Needs uv, which nothing else does: pip install uv.
"""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The build backend is locked too: the project is installed without build isolation.
BUILD = "hatchling\neditables\n"
# Each has the same versions as those above it. The files for images need no build backend.
LOCKS = {
    "requirements.lock": ["local", "console", "keyring"],
    "requirements-daemon.lock": ["console", "keyring"],
    "requirements-followers.lock": ["spark", "redis", "opensearch", "sql", "keyring"],
    "requirements-dev.lock": [
        *(
            "local",
            "spark",
            "migrations",
            "redis",
            "opensearch",
            "sql",
            "console",
            "webhook",
            "tracing",
            "keyring",
            "dev",
        ),
    ],
}
# Installed in addition to either of the two if the machine has no Java.
JAVA_LOCK = "requirements-java.lock"


def main() -> None:
    uv = shutil.which("uv")
    if uv is None:
        sys.exit("uv is not on PATH; it writes the lock files: .venv/bin/pip install uv")
    for name, extras in LOCKS.items():
        wanted = ["pyproject.toml", *(part for extra in extras for part in ("--extra", extra))]
        images = name in ("requirements-daemon.lock", "requirements-followers.lock")
        _compile(uv, name, "" if images else BUILD, *wanted)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    _compile(uv, JAVA_LOCK, "\n".join(project["optional-dependencies"]["java"]))


def _compile(uv: str, name: str, also: str, *wanted: str) -> None:
    options = ["--universal", "--python-version", "3.11", "--generate-hashes"]
    options += [] if "--keep" in sys.argv else ["--upgrade"]
    # pip takes the newest of `name[extra]` where only `name` is pinned, and then misses its hash.
    options += ["--no-strip-extras"]
    options += ["--no-annotate", "--no-header", "--no-emit-index-url", "-o", name]
    before = list(LOCKS)[: list(LOCKS).index(name)] if name in LOCKS else ["requirements.lock"]
    for each in before:
        options += ["-c", each]
    command = [uv, "pip", "compile", "--quiet", *wanted, "-", *options]
    subprocess.run(command, cwd=ROOT, input=also, text=True, check=True)
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    print(f"{name}: {sum(not line[0].isspace() for line in lines)} packages")


if __name__ == "__main__":
    main()
