"""Where a bug is, without its words.

An exception that nobody foresaw may quote what it was working on: Arrow's, json's and Python's own
name values, and logs and terminals travel further than rows may. So of a bug is told its type, and
file, line and function of each call; of another process' output only the lines that say such.
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import TracebackType

# Python's and Java's lines of a stack, and their first lines: a type, then its words.
_PLACE: Final = re.compile(
    r"^\s*(?:File \"[^\"]*\", line \d+(?:, in \S+)?|at [\w.$<>/]+\([\w.: ]*\))"
)
_KIND: Final = re.compile(
    r"^\s*(?:Caused by: )?((?:[\w$]+\.)*[A-Z][\w$]*(?:Error|Exception|Exit))\b"
)
# Of these the words name a module, a class, a file or a host, never what was worked on.
_PLAIN: Final = re.compile(
    r"\b(?:ModuleNotFoundError|ImportError|FileNotFoundError|PermissionError|UnknownHostException"
    r"|ConnectException|ClassNotFoundException|NoClassDefFoundError|OutOfMemoryError"
    r"|UnsupportedClassVersionError)\b.*"
)
_LEFT_OUT: Final = "what else it said is left out, since it may hold rows' values"


def where(error: BaseException | None) -> str:
    """Return where an error comes from, and its type and those of its causes."""
    lines: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        lines[:0] = [*traceback.format_tb(error.__traceback__), f"{type(error).__name__}\n"]
        error = error.__cause__ or error.__context__
    return "".join(lines)


def places(said: str) -> str:
    """Return of another process' output what says where it failed, and by which types."""
    kept, left_out = [], False
    for line in said.splitlines():
        if place := _PLACE.match(line):
            kept.append(place[0].rstrip())
        elif plain := _PLAIN.search(line):
            kept.append(plain[0].strip())
        elif kind := _KIND.match(line):
            kept.append(kind[1])
        else:
            left_out |= bool(line.strip())
    return "\n".join([*kept, *([f"({_LEFT_OUT})"] if left_out else [])])


def install() -> None:
    """Let what ends this process or one of its threads be told so on stderr."""
    sys.excepthook = ended
    threading.excepthook = lambda args: ended(
        args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
    )


def ended(kind: type[BaseException], error: BaseException, _: TracebackType | None = None) -> None:
    """Say where what ended the process, or a thread, is."""
    if issubclass(kind, KeyboardInterrupt):
        return
    thread = threading.current_thread().name
    sys.stderr.write(f"cdc: a bug in Lockstep, in {thread}:\n{where(error)}")
