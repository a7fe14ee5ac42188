"""Logs: one JSON object per line on stderr, or a readable line where stderr is a terminal.

Fields name objects, counts, sizes and LSNs. Row values are never logged, at any level: logs are
passed on more freely than data. So for an exception a line has its location, never its message
(`cdc.runtime.bugs`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import TextIO

from cdc.errors import CDCError, indented, printable
from cdc.events import LSN
from cdc.runtime import bugs

_COLOURS = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "1;31"}


def setup_logging(
    level: str = "info", *, as_json: bool | None = None, stream: TextIO | None = None
) -> None:
    """Send every `cdc.*` logger's records to stderr; with `as_json` None the terminal decides.

    Calling it again replaces the earlier setup.
    """
    stream = stream or sys.stderr
    if as_json is None:
        as_json = not stream.isatty()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter(colours=_colours(stream)))
    root = logging.getLogger("cdc")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def _colours(stream: TextIO) -> bool:
    """Whether lines may be coloured: on a terminal that shows it (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class JsonFormatter(logging.Formatter):
    """One JSON object per record, keys in a fixed order, newlines escaped."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": _time(record).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            "fields": _fields(record),
        }
        if record.exc_info:
            line["traceback"] = bugs.where(record.exc_info[1])
        # The standard library's: a log line must be written whatever a field holds.
        text = json.dumps(line, default=str, ensure_ascii=False)
        if text.isprintable():
            return text
        return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


class LineFormatter(logging.Formatter):
    """A line: time, level, event, then the fields as `name=value`."""

    def __init__(self, *, colours: bool = False) -> None:
        super().__init__()
        self._colours = colours

    def _in(self, colour: str, text: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colours else text

    def format(self, record: logging.LogRecord) -> str:
        level, dim = record.levelname.lower(), "2"
        fields = " ".join(
            f"{self._in(dim, f'{name}=')}{printable(str(value))}"
            for name, value in _fields(record).items()
        )
        time = _time(record).astimezone().strftime("%H:%M:%S.%f")[:-3]
        label = self._in(_COLOURS[level], f"{level:<7}")
        line = f"{self._in(dim, time)} {label} {printable(record.getMessage())}"
        line = f"{line}  {fields}" if fields else line
        if record.exc_info:
            line += "\n" + bugs.where(record.exc_info[1])
        return line


class MessageFormatter(logging.Formatter):
    """The standard library's lines, of which no name within a message can start one."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as the base class
        return indented(super().formatMessage(record))


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = dict(getattr(record, "fields", {}))
    for name, value in fields.items():
        if isinstance(value, LSN):
            fields[name] = str(value)
        elif isinstance(value, CDCError):
            fields[name] = {"class": type(value).__name__, "what": value.what, "hint": value.hint}
    return fields
