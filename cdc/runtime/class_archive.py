"""Archives of the classes that a JVM loads while it starts, so that later ones start faster.

Java's class data sharing: a JVM writes what it has loaded and checked into a file when it ends, and
later ones with the same Java and class path map that file. Kafka, OpenSearch and Spark then start
with half to two thirds of the CPU time. A JVM ignores a file that is not its own.

Standard library only, like `cdc.runtime.java`.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from cdc.runtime.java import Java

# A JVM warns of each class that can't be in an archive, and of an archive that it ignores.
_QUIET: Final = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")


def file_name(name: str, java: Java, class_path: str) -> str:
    """Return the name of the archive of a program, of this Java and this class path."""
    release = java.program.resolve().parent.parent / "release"
    try:
        version = release.read_bytes()
    except OSError:
        version = str(java.program.resolve().stat().st_mtime_ns).encode()
    digest = hashlib.sha256(b"\0".join((version, str(java.program).encode(), class_path.encode())))
    return f"{name}-{digest.hexdigest()[:8]}.jsa"


def making(archive: Path) -> tuple[str, ...]:
    """Return the flags of a JVM that writes an archive when it ends by itself or by SIGTERM."""
    return (f"-XX:ArchiveClassesAtExit={archive}", *_QUIET)


def using(archive: Path) -> tuple[str, ...]:
    """Return the flags of a JVM that uses an archive; none if Java could not write it."""
    found = archive.exists() and archive.stat().st_size > 0
    return (f"-XX:SharedArchiveFile={archive}", *_QUIET) if found else ()
