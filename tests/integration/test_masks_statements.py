"""The audit's records of statements, where columns are hidden."""

from __future__ import annotations

from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.witness import records_of
from tests.integration.test_migrations import statements

_SECRET = "+49-5ecret"


def test_a_hidden_value_in_an_audited_statement_is_in_no_topic(pipeline: NewPipeline) -> None:
    """As a column's default, in an UPDATE next to the DDL, in a comment."""
    line = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, phone text)",
        tables={"public.users": {"mask": {"phone": None}}},
        migrations={"ddl_audit": True},
    )
    line.start().wait_ready()
    line.database.execute(
        f"ALTER TABLE users DROP phone, ADD phone text DEFAULT '{_SECRET}'",
        f"INSERT INTO users VALUES (1, '{_SECRET}'); ALTER TABLE users ADD n int /* {_SECRET} */",
        "ALTER TABLE users ADD seen_last int",
    )
    wait_until(
        lambda: any("seen_last" in (each["statement"] or "") for each in statements(line)),
        "the audit's own is missing",
    )
    audited = [each["statement"] for each in statements(line)]
    assert "ALTER TABLE users DROP phone, ADD phone text DEFAULT ?" in audited
    every = records_of(line, lambda name: name.startswith(line.config.prefix))
    assert len(every) > len(audited)
    assert not any(_SECRET.encode() in (each.value or b"") for each in every)
    assert line.daemon.term() == 0
