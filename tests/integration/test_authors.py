"""What docs/ARCHIVE.md shows for psycopg and SQLAlchemy signs changes, as `cdc history` prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import psycopg
from sqlalchemy import create_engine, event, text
from sqlalchemy.orm import Session

from lockstep.jobs.archiving.versions import history
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline

_PAGE: Final = Path(__file__).parents[2] / "docs" / "ARCHIVE.md"


def snippets() -> dict[str, str]:
    """Return the page's Python, by the library that its first line names."""
    found = re.findall(r"```python\n# (\w+):.*\n((?:.*\n)*?)```", _PAGE.read_text("utf-8"))
    return {library: code for library, code in found}  # noqa: C416 - groups of a match


def test_the_documented_snippets_name_the_author_of_a_change(
    pipeline: NewPipeline, tmp_path: Path
) -> None:
    found = snippets()
    assert found.keys() == {"psycopg", "SQLAlchemy"}
    made = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text)",
        archive={"path": str(tmp_path / "archive"), "every_seconds": 0},
    )
    made.start().wait_ready()
    names: dict[str, Any] = {"json": json, "event": event, "text": text, "Session": Session}
    with made.database.connect() as connection, connection.transaction():
        connection.execute("INSERT INTO users VALUES (7, 'a')")
        signing = {"connection": connection, "user": "ada", "ticket": "T-1"}
        exec(found["psycopg"], names | signing)  # noqa: S102 - our own page
    given: dict[str, Any] = names | {"current_user": lambda: "grace"}
    exec(found["SQLAlchemy"], given)  # noqa: S102 - as above
    engine = create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(made.database.dsn)
    )
    try:
        with Session(engine) as session:
            for name in ("b", "c"):
                session.execute(text("UPDATE users SET name = :name"), {"name": name})
                session.commit()
    finally:
        event.remove(Session, "after_begin", given["sign"])
        engine.dispose()
    made.database.execute("UPDATE users SET name = 'd'")
    Archived(made).reach()
    authors = [each.author for each in history(made.config, "public.users", "7")]
    assert authors == [{"by": "ada", "why": "T-1"}, {"by": "grace"}, {"by": "grace"}, None]
