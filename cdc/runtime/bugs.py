"""Report where a bug is, without the exception's message.

An unexpected exception may quote the data it was working on: those of Arrow, json and Python do,
and logs and terminals travel further than rows may. So a bug is reported as its type and the file,
line and function of each call; of another process's output only lines of that kind are kept.
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import TracebackType

# Stack lines of Python and Java, and their first lines: a type, then its message.
_PLACE: Final = re.compile(
    r"^\s*(?:File \"[^\"]*\", line \d+(?:, in \S+)?|at [\w.$<>/]+\([\w.: ]*\))"
)
_KIND: Final = re.compile(
    r"^\s*(?:Caused by: )?((?:[\w$]+\.)*[A-Z][\w$]*(?:Error|Exception|Exit))\b"
)
# The messages of these types name a module, a class, a file or a host, never data.
_PLAIN: Final = re.compile(
    r"\b(?:ModuleNotFoundError|ImportError|FileNotFoundError|PermissionError|UnknownHostException"
    r"|ConnectException|ClassNotFoundException|NoClassDefFoundError|OutOfMemoryError"
    r"|UnsupportedClassVersionError)\b.*"
)
_LEFT_OUT: Final = "the rest of its output is left out, since it may hold rows' values"


def where(error: BaseException | None) -> str:
    """Return an error's stack, with its type and the types of its causes."""
    lines: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        lines[:0] = [*traceback.format_tb(error.__traceback__), f"{type(error).__name__}\n"]
        error = error.__cause__ or error.__context__
    return "".join(lines)


def places(output: str) -> str:
    """Return the lines of another process's output that show where it failed, and the types."""
    kept, left_out = [], False
    for line in output.splitlines():
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
    """Report an exception that ends this process or one of its threads in this form on stderr."""
    sys.excepthook = ended
    threading.excepthook = lambda args: ended(
        args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
    )


def ended(kind: type[BaseException], error: BaseException, _: TracebackType | None = None) -> None:
    """Print where the exception that ended the process or a thread was raised."""
    if issubclass(kind, KeyboardInterrupt):
        return
    thread = threading.current_thread().name
    sys.stderr.write(f"cdc: a bug in Lockstep, in {thread}:\n{where(error)}")
