"""The doctor's checks of optional migrations: requested, applied, complete.

None of it is needed, so nothing here is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.operate.facts import enabled_migrations
from cdc.operate.findings import Finding, note, ok, warning
from cdc.publication import migrations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.source.connection import Connection

_CHECK = "migrations"


def examine(connection: Connection, config: Config) -> Iterator[Finding]:
    """Yield one finding for each migration that is requested or applied."""
    enabled, applied = enabled_migrations(config), migrations.applied(connection)
    working = migrations.working(connection)
    for name, newest in migrations.newest().items():
        spoken = migrations.spoken(name)
        revision = applied.get(name)
        recreate = f"cdc migrations down {name}; cdc setup"
        if revision is None:
            if name in enabled:
                what = f"the {spoken} is enabled (migrations.{name}) and does not exist"
                fix = f"cdc setup; or, by a role that may: cdc migrations sql {name}"
                yield warning(_CHECK, what, fix)
        elif _number(revision) < _number(newest):
            what = f"the {spoken} is of an older Lockstep ({revision}, now {newest})"
            yield warning(_CHECK, what, f"cdc migrations up {name}")
        elif _number(revision) > _number(newest):
            what = f"the {spoken} is of a newer Lockstep ({revision}, here {newest})"
            yield note(_CHECK, what, "update this one")
        elif not working.get(name):
            what = (
                f"the {spoken} does nothing: parts of it are missing, disabled or not ours to use"
            )
            yield warning(_CHECK, what, recreate)
        elif name not in enabled:
            what = f"the {spoken} exists and works, though the configuration does not enable it"
            yield note(_CHECK, what, f"migrations.{name}: true, or: cdc migrations down {name}")
        else:
            yield ok(_CHECK, f"the {spoken} exists and works")


def _number(revision: str) -> int:
    return int(revision.rpartition("_")[2])
