"""What `cdc setup` and `cdc teardown` do about the migrations, reported step by step.

None is needed: what is not permitted is a warning with a workaround, and everything else continues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.errors import ConfigError, PermissionDeniedError
from cdc.operate.commands.steps import CommandStep, Did
from cdc.operate.facts import enabled_migrations
from cdc.publication import migrations
from cdc.source.connection import connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.source.connection import Connection


class Migration(NamedTuple):
    name: str
    enabled: bool
    revision: str | None  # None: not applied


def survey(config: Config) -> list[Migration]:
    with connect(config) as connection:
        revisions = migrations.applied(connection)
    wanted = enabled_migrations(config)
    return [Migration(name, name in wanted, revisions.get(name)) for name in migrations.NAMES]


def up(config: Config, names: list[str]) -> Iterator[CommandStep]:
    """Apply these; what our role may not do is a warning."""
    for name in names:
        try:
            before = _revision(config, name)
            migrations.upgrade(config, name)
            same = _revision(config, name) == before
        except PermissionDeniedError as error:
            yield CommandStep(Did.WARN, _denied(name, error))
            continue
        if same:
            yield CommandStep(Did.LEFT, f"the {migrations.spoken(name)} exists")
        else:
            yield CommandStep(Did.DONE, f"created the {migrations.spoken(name)}")


def down(config: Config, names: list[str]) -> Iterator[CommandStep]:
    """Remove those that are applied."""
    for name in names:
        try:
            if _revision(config, name) is None:
                yield CommandStep(Did.LEFT, f"there is no {migrations.spoken(name)}")
                continue
            migrations.downgrade(config, name)
        except PermissionDeniedError as error:
            yield CommandStep(Did.WARN, _denied(name, error, down=True))
            continue
        yield CommandStep(Did.DONE, f"removed the {migrations.spoken(name)}")


def tear_down(config: Config, connection: Connection) -> Iterator[CommandStep]:
    """Remove what is applied, unless another pipeline of this database may use it."""
    try:
        applied = list(migrations.applied(connection))
    except PermissionDeniedError as error:
        yield CommandStep(
            Did.WARN, f"what may be in the schema {migrations.SCHEMA} is kept: {error.what}"
        )
        return
    if not applied:
        return
    if other := migrations.other_slots(connection, config.slot):
        spoken = ", ".join(migrations.spoken(name) for name in applied)
        yield CommandStep(
            Did.LEFT,
            f"the {spoken} may be another pipeline's too (slot {other[0]}) and is kept; `cdc"
            " migrations down` removes it nevertheless",
        )
        return
    try:
        yield from down(config, applied)
    except ConfigError as error:  # without Alembic
        spoken = ", ".join(migrations.spoken(name) for name in applied)
        what = f"the {spoken} stays: {error.what}; `cdc migrations down` removes it"
        yield CommandStep(Did.WARN, what)


def _revision(config: Config, name: str) -> str | None:
    with connect(config) as connection:
        return migrations.applied(connection).get(name)


def _denied(name: str, error: PermissionDeniedError, *, down: bool = False) -> str:
    words = "sql --down" if down else "sql"
    return (
        f"not permitted, and not needed: {error.what}; a role that may can run what"
        f" `cdc migrations {words} {name}` prints"
    )
