"""The role of the containers' daemon: no superuser, and able to set up and run the pipeline."""

from __future__ import annotations

from pathlib import Path

from psycopg.conninfo import make_conninfo

from cdc.operate.doctor.run import examine
from cdc.operate.findings import Severity
from tests.fixtures.converge import converge
from tests.fixtures.daemon import PipelineUnderTest

_SQL = Path(__file__).parents[2] / "compose" / "shop.sql"


def test_the_daemon_of_the_containers_needs_no_superuser(bare: PipelineUnderTest) -> None:
    database = bare.database
    role = f"lockstep_{database.name}"
    made = (
        _SQL.read_text("utf-8")
        .replace("\\getenv password POSTGRES_PASSWORD\n", "")
        .replace(":'password'", "'x'")
        .replace("DATABASE postgres", f"DATABASE {database.name}")
        .replace("ROLE lockstep", f"ROLE {role}")
        .replace("TO lockstep", f"TO {role}")
    )
    database.execute(made)
    try:
        bare.config_file = bare.write(
            "role.yaml",
            source={
                "dsn": make_conninfo(database.dsn, user=role, password="x"),
                "tables": ["public.customers", "public.orders"],
            },
            snapshot={"mode": "initial", "runner": "local"},
        )
        errors = [each for each in examine(bare.config) if each.severity is Severity.ERROR]
        assert {each.check for each in errors} <= {"slot", "publication", "topics", "log"}, errors
        bare.set_up()
        bare.start().wait_ready()
        database.execute("UPDATE orders SET note = 'changed' WHERE id % 3 = 0")
        converge(bare.config)
        with database.connect() as connection:
            found = connection.execute(
                "SELECT rolsuper, rolcreaterole, rolbypassrls FROM pg_roles WHERE rolname = %s",
                [role],
            ).fetchone()
        assert found == (False, False, False)
    finally:
        for daemon in bare.daemons:
            daemon.kill()
        database.execute(
            f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            f" WHERE database = '{database.name}' AND NOT active"
        )
        database.execute(f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")
