"""Read views that are declared in files of their own: `views/order_totals.sql`.

The view has the file's name, the file is its `sql`, and its other fields are in comment lines at
the beginning, `-- key: order_id`, lists separated by commas. A comment of another form is only a
comment. The values are checked as those of the configuration are, with the file and the line as
their origin.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_OPTION: Final = re.compile(r"--\s*([a-z_]+):\s*(.*?)\s*")
# A query is some ten lines: a larger file is not one.
_MAX_BYTES: Final = 1_000_000
SQL: Final = "sql"
PYTHON: Final = ".py"  # `cdc.config.view_code`


class Given(NamedTuple):
    """A field of a view, as its file has it."""

    view: str
    field: str  # SQL for the query itself
    text: str
    origin: str  # `views/order_totals.sql:2`


class ViewFileError(Exception):
    """A folder or file that can't be read; its text is a finding."""


def files(folder: Path) -> list[Path]:
    """Return the files that may declare a view; raise UnreadableError for a missing folder."""
    try:
        return sorted(each for each in folder.iterdir() if each.suffix in {".sql", PYTHON})
    except OSError as error:
        raise ViewFileError(f"cannot read the folder {folder}: {error.strerror}") from error


def text_of(file: Path) -> str:
    """Return a file's text; raise UnreadableError."""
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise ViewFileError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ViewFileError(f"{file}: not UTF-8 text") from error
    if len(data) > _MAX_BYTES:
        raise ViewFileError(f"{file}: larger than {_MAX_BYTES} bytes; not a query")
    return text


def read(file: Path) -> Iterator[Given]:
    """Yield what a file with SQL gives, its query last; raise UnreadableError."""
    lines = text_of(file).splitlines(keepends=True)
    start = 0
    for number, line in enumerate(lines):
        if line.strip() and not line.lstrip().startswith("--"):
            break
        if found := _OPTION.fullmatch(line.strip()):
            yield Given(file.stem, found[1], found[2], f"{file}:{number + 1}")
        start = number + 1
    # It becomes a part of other queries, which a semicolon would end.
    query = "".join(lines[start:]).strip().removesuffix(";").rstrip()
    yield Given(file.stem, SQL, query, f"{file}:{max(1, min(start + 1, len(lines)))}")
