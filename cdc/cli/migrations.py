"""`cdc migrations`: optional objects in the source database, next to publication and slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import (
    as_json,
    confirm,
    example,
    next_step,
    print_done,
    print_json,
    print_steps,
    print_unchanged,
    print_warning,
    with_config,
    yes,
)

if TYPE_CHECKING:
    from cdc.config import Config

_names = click.argument(
    "names",
    nargs=-1,
    type=click.Choice(["signal_table", "heartbeat_table", "ddl_audit"]),
    metavar="[NAME]...",
)


@click.group(epilog=example("cdc migrations status", "cdc migrations up ddl_audit"))
def migrations() -> None:
    """Show, create or remove what is optional in the source database.

    NAME is signal_table, heartbeat_table or ddl_audit. The pipeline needs none of them. `cdc setup`
    creates those that the configuration enables, `cdc teardown` removes them.
    """


@migrations.command(epilog=example("cdc migrations status --json"))
@with_config
@as_json
def status(config: Config, *, as_json: bool) -> None:
    """Show which are applied, and which the configuration enables."""
    from cdc.operate.commands.migrations import survey  # noqa: PLC0415 - not for --help

    found = survey(config)
    if as_json:
        print_json([each._asdict() for each in found])
        return
    for each in found:
        if each.revision:
            print_done(f"{each.name} is there ({each.revision})")
        elif each.enabled:
            print_warning(f"{each.name} is enabled and missing")
        else:
            print_unchanged(f"{each.name} is not there")
    missing = [each.name for each in found if each.enabled and not each.revision]
    next_step(f"cdc migrations up {' '.join(missing)}" if missing else "cdc status")


@migrations.command(epilog=example("cdc migrations up", "cdc migrations up ddl_audit"))
@with_config
@_names
@as_json
def up(config: Config, names: tuple[str, ...], *, as_json: bool) -> None:
    """Create them, by default those that the configuration enables."""
    from cdc.operate.commands import migrations as control  # noqa: PLC0415 - not for --help

    print_steps(control.up(config, _named_or_enabled(config, names)), as_json=as_json)
    if not as_json:
        next_step("cdc migrations status")


@migrations.command(epilog=example("cdc migrations down", "cdc migrations down signal_table --yes"))
@with_config
@_names
@yes
@as_json
def down(config: Config, names: tuple[str, ...], *, yes: bool, as_json: bool) -> None:
    """Remove them, by default all that are applied, with the rows they hold. Asks first."""
    from cdc.operate.commands import migrations as control  # noqa: PLC0415 - not for --help

    chosen = list(names) or [each.name for each in control.survey(config) if each.revision]
    if chosen and not yes:
        confirm(f"Remove {', '.join(chosen)}, for every pipeline of this database?")
    print_steps(control.down(config, chosen), as_json=as_json)
    if not as_json:
        next_step("set them to false in the configuration, or `cdc setup` creates them again")


@migrations.command(
    epilog=example("cdc migrations sql ddl_audit | psql", "cdc migrations sql --down ddl_audit")
)
@with_config
@_names
@click.option("--down", "remove", is_flag=True, help="The statements that remove them.")
def sql(config: Config, names: tuple[str, ...], *, remove: bool) -> None:
    """Print the SQL, to run as a role with the rights that the pipeline's role lacks.

    By default for all that the configuration enables. Run it once, on a database that does not have
    them yet (or with --down: still has them).
    """
    from cdc.publication.migrations import as_sql  # noqa: PLC0415 - not for --help

    click.echo(as_sql(config, _named_or_enabled(config, names), down=remove))


def _named_or_enabled(config: Config, names: tuple[str, ...]) -> list[str]:
    from cdc.operate.facts import enabled_migrations  # noqa: PLC0415 - not for --help

    chosen = list(names) or enabled_migrations(config)
    if not chosen:
        raise click.UsageError("the configuration enables none; name one")
    return chosen
