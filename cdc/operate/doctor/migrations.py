"""The doctor's checks of optional migrations: requested, applied, complete.

None of it is needed, so nothing here is an error. The check is a pure function from facts to
findings; `examine` gathers the facts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdc.errors import CDCError
from cdc.operate.commands.migrations import asked
from cdc.operate.findings import Finding, note, ok, warning
from cdc.publication import migrations
from cdc.source.connection import connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config

_CHECK = "migrations"


class MigrationFacts(NamedTuple):
    """The migrations that are requested, and their state."""

    asked: list[str]
    applied: dict[str, str]  # revision by name
    newest: dict[str, str]
    working: dict[str, bool]  # whether its objects exist and are enabled


def examine(config: Config) -> list[Finding]:
    """Gather the facts and return the findings."""
    try:
        with connect(config) as connection:
            facts = MigrationFacts(
                asked(config),
                migrations.applied(connection),
                migrations.newest(),
                migrations.working(connection),
            )
    except CDCError as failure:
        return [warning(_CHECK, failure.what, failure.hint)]
    return list(check_migrations(facts))


def check_migrations(facts: MigrationFacts) -> Iterator[Finding]:
    """Yield one finding for each migration that is requested or applied."""
    for name, newest in facts.newest.items():
        its = migrations.spoken(name)
        revision = facts.applied.get(name)
        anew = f"cdc migrations down {name}; cdc setup"
        if revision is None:
            if name in facts.asked:
                what = f"the {its} is asked for (migrations.{name}) and is not there"
                fix = f"cdc setup; or, by somebody who may: cdc migrations sql {name}"
                yield warning(_CHECK, what, fix)
        elif _number(revision) < _number(newest):
            what = f"the {its} is of an older Lockstep ({revision}, now {newest})"
            yield warning(_CHECK, what, f"cdc migrations up {name}")
        elif _number(revision) > _number(newest):
            what = f"the {its} is of a newer Lockstep ({revision}, here {newest})"
            yield note(_CHECK, what, "update this one")
        elif not facts.working.get(name):
            what = f"the {its} does nothing: parts of it are gone, disabled or not ours to use"
            yield warning(_CHECK, what, anew)
        elif name not in facts.asked:
            what = f"the {its} is there and at work, though the configuration does not ask for it"
            yield note(_CHECK, what, f"migrations.{name}: true, or: cdc migrations down {name}")
        else:
            yield ok(_CHECK, f"the {its} is there and at work")


def _number(revision: str) -> int:
    return int(revision.rpartition("_")[2])
