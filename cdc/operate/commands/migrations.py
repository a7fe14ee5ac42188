"""What `cdc setup` and `cdc teardown` do about the migrations, reported step by step.

None is needed: what is not permitted is a warning with a workaround, and everything else continues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.errors import PermissionDeniedError
from cdc.operate.commands.steps import Did, Step
from cdc.publication import migrations
from cdc.source.connection import connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.source.catalog import Connection


class Migration(NamedTuple):
    """A migration: whether it is requested, and its revision."""

    name: str
    asked: bool
    revision: str | None  # None: not applied


def asked(config: Config) -> list[str]:
    """Return the names of those that the configuration requests."""
    return [name for name in migrations.NAMES if getattr(config.migrations, name)]


def survey(config: Config) -> list[Migration]:
    """Return all of them."""
    with connect(config) as connection:
        there = migrations.applied(connection)
    wanted = asked(config)
    return [Migration(name, name in wanted, there.get(name)) for name in migrations.NAMES]


def up(config: Config, names: list[str]) -> Iterator[Step]:
    """Apply these; what our role may not do is a warning."""
    for name in names:
        try:
            before = _revision(config, name)
            migrations.upgrade(config, name)
            same = _revision(config, name) == before
        except PermissionDeniedError as error:
            yield Step(Did.WARN, _denied(name, error))
            continue
        if same:
            yield Step(Did.LEFT, f"the {migrations.spoken(name)} is there")
        else:
            yield Step(Did.DONE, f"created the {migrations.spoken(name)}")


def down(config: Config, names: list[str]) -> Iterator[Step]:
    """Remove those that are applied."""
    for name in names:
        try:
            if _revision(config, name) is None:
                yield Step(Did.LEFT, f"there is no {migrations.spoken(name)}")
                continue
            migrations.downgrade(config, name)
        except PermissionDeniedError as error:
            yield Step(Did.WARN, _denied(name, error, down=True))
            continue
        yield Step(Did.DONE, f"removed the {migrations.spoken(name)}")


def set_up(config: Config) -> Iterator[Step]:
    """Apply those that the configuration requests."""
    yield from up(config, asked(config))


def tear_down(config: Config, connection: Connection) -> Iterator[Step]:
    """Remove what is applied, unless another pipeline of this database may use it."""
    try:
        there = list(migrations.applied(connection))
    except PermissionDeniedError as error:
        yield Step(Did.WARN, f"what may be in the schema {migrations.SCHEMA} stays: {error.what}")
        return
    if not there:
        return
    if other := migrations.other_slots(connection, config.slot):
        spoken = ", ".join(migrations.spoken(name) for name in there)
        yield Step(
            Did.LEFT,
            f"the {spoken} may be another pipeline's too (slot {other[0]}) and stays; `cdc"
            " migrations down` removes it all the same",
        )
        return
    yield from down(config, there)


def _revision(config: Config, name: str) -> str | None:
    with connect(config) as connection:
        return migrations.applied(connection).get(name)


def _denied(name: str, error: PermissionDeniedError, *, down: bool = False) -> str:
    words = "sql --down" if down else "sql"
    return (
        f"not permitted, and not needed: {error.what}; somebody who may can run what"
        f" `cdc migrations {words} {name}` prints"
    )
