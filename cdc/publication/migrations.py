"""Apply and remove the migrations in `migrations/`, on a connection of ours.

Alembic and SQLAlchemy are needed only where a migration is wanted: a pipeline without any never
imports them. Each migration is a branch of its own and one transaction, so that one that is not
permitted leaves nothing and does not prevent others.
"""

from __future__ import annotations

import io
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import sql

from cdc.errors import ConfigError
from cdc.source.connection import connect, translate, translated
from cdc.source.slots import read_slots

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from alembic.config import Config as AlembicConfig

    from cdc.config import Config

NAMES: Final = ("signal_table", "heartbeat_table", "ddl_audit")
SCHEMA: Final = "lockstep"
_VERSIONS: Final = f"{SCHEMA}.alembic_version"
# Not to_regclass, which asks for rights on the schema.
_VERSION_TABLE: Final = b"""
SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'lockstep' AND c.relname = 'alembic_version'
"""
_READ: Final = b"SELECT version_num FROM lockstep.alembic_version"
# For the migrations that sign what they write.
_KEYS: Final = {"signal_table": "signal_key", "ddl_audit": "ddl_key"}
# Whether each migration's objects exist, are enabled (`O` or `A` of a trigger), and usable by our
# role.
_WORKING: Final = b"""
SELECT 'signal_table', t.tgenabled IN ('O', 'A') AND EXISTS (
  SELECT FROM pg_class k WHERE k.relnamespace = n.oid AND k.relname = 'signal_key'
  AND has_table_privilege(k.oid, 'SELECT')) FROM pg_trigger t
JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'lockstep' AND c.relname = 'signal' AND t.tgname = 'tell'
UNION ALL
SELECT 'heartbeat_table',
  has_table_privilege(c.oid, 'INSERT') AND has_table_privilege(c.oid, 'UPDATE')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'lockstep' AND c.relname = 'heartbeat'
UNION ALL
SELECT 'ddl_audit', count(*) = 2 AND EXISTS (
  SELECT FROM pg_class k JOIN pg_namespace n ON n.oid = k.relnamespace
  WHERE n.nspname = 'lockstep' AND k.relname = 'ddl_key' AND has_table_privilege(k.oid, 'SELECT'))
FROM pg_event_trigger
WHERE evtname IN ('lockstep_ddl', 'lockstep_ddl_drop') AND evtenabled IN ('O', 'A')
"""
# As env.py comments the schema that it creates: a schema that a user created stays.
_SCHEMA_COMMENT: Final = "made by cdc setup"
_PARENTS: Final = Path(__file__).parents


def folder() -> Path:
    """Return the scripts' folder: next to `cdc` in a checkout, inside it in an installation."""
    installed = _PARENTS[1] / "migrations"
    return installed if installed.is_dir() else _PARENTS[2] / "migrations"


def applied(connection: psycopg.Connection) -> dict[str, str]:
    """Return the revision of each migration that is applied, by its name."""
    with translated(f"reading {_VERSIONS}"):
        if connection.execute(_VERSION_TABLE).fetchone() is None:
            return {}
        rows = connection.execute(_READ).fetchall()
    return {name: row[0] for name in NAMES for row in rows if row[0].rpartition("_")[0] == name}


def working(connection: psycopg.Connection) -> dict[str, bool]:
    """Return which of them exist and are enabled, by the catalogs alone."""
    with translated("reading triggers and rights"):
        return dict(connection.execute(_WORKING).fetchall())


def newest() -> dict[str, str]:
    """Return the newest revision of each; its scripts are named `NAME_1`, `NAME_2`."""
    scripts = [path.stem for path in (folder() / "versions").glob("*_*.py")]
    return {
        name: max(
            (each for each in scripts if each.rpartition("_")[0] == name),
            key=lambda each: int(each.rpartition("_")[2]),
        )
        for name in NAMES
    }


def other_slots(connection: psycopg.Connection, slot: str) -> list[str]:
    """Return this database's slots, except `slot`, that another Lockstep pipeline may have."""
    with translated("reading the database's name"):
        row = connection.execute("SELECT current_database()::text").fetchone()
    assert row is not None, "a SELECT without FROM gives a row"
    return [
        each.name
        for each in read_slots(connection)
        if not (each.is_foreign(row[0]) or each.temporary or each.name == slot)
    ]


def upgrade(config: Config, name: str) -> None:
    """Apply the migration `name`, or upgrade it to its newest revision."""
    with _alembic(config, f"creating the {spoken(name)}") as (command, settings):
        command.upgrade(settings, f"{name}@head")


def downgrade(config: Config, name: str) -> None:
    """Remove what the migration `name` created; the schema too, once empty, if it is ours."""
    with _alembic(config, f"removing the {spoken(name)}") as (command, settings):
        command.downgrade(settings, f"{name}@base")
    with connect(config) as connection:
        if not applied(connection):
            _clear(connection)


def spoken(name: str) -> str:
    """Return the migration's name in words."""
    return name.replace("_", " ").replace("ddl", "DDL")


def as_sql(config: Config, names: list[str], *, down: bool = False) -> str:
    """Return the statements, for a person with the rights that our role lacks."""
    parts = []
    for name in names:
        command, settings, out = *_loaded(), io.StringIO()
        settings.output_buffer = out
        if down:
            command.downgrade(settings, f"{name}@head:{name}@base", sql=True)
        else:
            command.upgrade(settings, f"{name}@head", sql=True)
        parts.append(f"-- {spoken(name)}\n\n{_offline(out.getvalue(), down=down)}")
    return "\n".join(parts if down else [*parts, *_grants(config, names)])


def _grants(config: Config, names: list[str]) -> list[str]:
    """Return the grants that our role needs on them, where its name is known."""
    user = psycopg.conninfo.conninfo_to_dict(config.source.dsn).get("user")
    if not user:
        return []
    role = sql.Identifier(str(user)).as_string()
    lines = [
        "-- what the pipeline's role needs of it\n",
        f"GRANT USAGE ON SCHEMA {SCHEMA} TO {role};",
        f"GRANT SELECT ON {_VERSIONS} TO {role};",
    ]
    for name, table in _KEYS.items():
        if name in names:
            lines.append(f"GRANT SELECT ON {SCHEMA}.{table} TO {role};")
    if "heartbeat_table" in names:
        lines.append(f"GRANT SELECT, INSERT, UPDATE ON {SCHEMA}.heartbeat TO {role};")
    return [*lines, ""]


def _offline(script: str, *, down: bool) -> str:
    """Return Alembic's script adapted to a database that may hold other branches' versions."""
    create = f"CREATE TABLE {_VERSIONS}"
    kept = [line for line in script.split("\n") if not line.startswith(f"DROP TABLE {_VERSIONS}")]
    if down:
        kept = [line for line in kept if not line.startswith("CREATE SCHEMA")]
    return "\n".join(kept).replace(create, create.replace("TABLE", "TABLE IF NOT EXISTS"))


def _clear(connection: psycopg.Connection) -> None:
    with translated(f"removing the schema {SCHEMA}"):
        connection.execute(f"DROP TABLE IF EXISTS {_VERSIONS}".encode())
        row = connection.execute(
            "SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = %s",
            (SCHEMA,),
        ).fetchone()
        if row is None or row[0] != _SCHEMA_COMMENT:
            return
        try:
            connection.execute(f"DROP SCHEMA {SCHEMA}".encode())
        except psycopg.errors.DependentObjectsStillExist:
            return  # the schema holds objects that are not ours


@contextmanager
def _alembic(config: Config, doing: str) -> Iterator[tuple[ModuleType, AlembicConfig]]:
    """Yield Alembic's commands, on a connection of ours, in one transaction."""
    command, settings = _loaded()
    import sqlalchemy  # noqa: PLC0415 - only where a migration is wanted

    def creator() -> psycopg.Connection:
        connection = connect(config)
        connection.autocommit = False
        return connection

    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://",
        creator=creator,
        poolclass=sqlalchemy.pool.NullPool,
        use_native_hstore=False,
    )
    try:
        with engine.begin() as connection:
            settings.attributes["connection"] = connection
            yield command, settings
    except sqlalchemy.exc.DBAPIError as error:
        if not isinstance(error.orig, psycopg.Error):
            raise
        raise translate(error.orig, doing) from error


def _loaded() -> tuple[ModuleType, AlembicConfig]:
    try:
        from alembic import command, config  # noqa: PLC0415 - only where a migration is wanted
    except ImportError as error:
        raise ConfigError(
            "there are migrations to do, and Alembic is not installed",
            hint="pip install 'lockstep-cdc[migrations]'; for none, set the options below"
            " `migrations` to false before `cdc setup`: the pipeline needs none of it",
        ) from error
    settings = config.Config()
    # A percent sign would be read as a reference.
    settings.set_main_option("script_location", str(folder()).replace("%", "%%"))
    settings.set_main_option("path_separator", "os")
    return command, settings
