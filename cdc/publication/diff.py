"""Compare the publication with what the log knows of it, and name what was lost.

Pure. A publication decides which changes Postgres sends, and Postgres keeps no history of it. So
the log pins what shows that it was altered, even if the change was reverted since: the version of
its catalog row (`xmin`, which each ALTER PUBLICATION … SET replaces), and the oids of the rows by
which tables and schemas belong to it, which ADD and DROP replace. Our own commands note their
changes in the publication's comment (`cdc.source.membership`): a version or an oid that continues
a known one is treated as that one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from cdc.errors import GapError
from cdc.log.records import OPERATIONS

if TYPE_CHECKING:
    from cdc.log.records import Publication, Sends

_NAMED: Final = 8  # tables in one sentence
_QUOTED: Final = re.compile(r'("(?:[^"]|"")*"|[^.]*)\.(.*)', re.DOTALL)


class Gap(NamedTuple):
    """One thing that happened to the publication, the tables that it concerns, and what to do."""

    what: str
    tables: tuple[str, ...]  # quoted as the log has them
    hint: str
    left: bool = False  # tables that are missing, which `cdc setup` may accept


def gaps(old: Publication, new: Publication, existing: frozenset[str]) -> list[Gap]:
    """Return every way in which `new` has lost changes since `old`; `old` is the log's.

    A table that `cdc table remove` took out is no gap. One that was dropped (not in `existing`) or
    renamed (its membership continues under another name) has lost no change.
    """
    name = new.name
    if old.oid != new.oid:
        return [
            Gap(
                f'publication "{name}" was dropped and created again',
                tuple(sorted(new.tables)),
                "changes made in between were not streamed; `cdc teardown --topics`, then `cdc"
                " setup` and a snapshot, begin anew",
            )
        ]
    return [*_altered(old, new), *_schemas(old, new), *_members(old, new, existing)]


def follow(
    old: Publication, new: Publication, existing: frozenset[str], since: str = ""
) -> Publication:
    """Return the publication to continue with after `old`, the log's: `new` and dropped tables.

    A dropped table stays known, so that a table created under its name later is found to be
    missing. Raises GapError with every gap between the two; `since` describes from when on.
    """
    if error := joined(gaps(old, new, existing), since):
        raise error
    members = set(new.tables.values())
    dropped = {
        table: member
        for table, member in old.tables.items()
        # One without a row of its own, as a partition, joins and leaves with its schema or root.
        if member and table not in new.tables and member not in members.union(new.removed)
    }
    return replace(new, tables=new.tables | dropped) if dropped else new


def joined(found: list[Gap], since: str = "") -> GapError | None:
    """Return one error that names every gap; None if there is none."""
    if not found:
        return None
    when = f" ({since})" if since else ""
    hints = dict.fromkeys(gap.hint for gap in found)
    return GapError("; ".join(gap.what for gap in found) + when, hint="; ".join(hints))


def lacking(sends: Sends) -> list[str]:
    """Return the operations that the publication does not publish."""
    return [each for each in OPERATIONS if each not in sends.operations]


def complete(name: str) -> str:
    """Return the SQL that has the publication publish every operation."""
    return f"ALTER PUBLICATION \"{name}\" SET (publish = '{', '.join(OPERATIONS)}')"


def acknowledging(tables: tuple[str, ...]) -> str:
    """Return the remedy that accepts the publication and reads `tables` again."""
    return (
        f"`cdc publication acknowledge` accepts the publication as it is and has {_some(tables)}"
        " read again, as `cdc snapshot … --anew` does; then `cdc run`"
    )


def _altered(old: Publication, new: Publication) -> list[Gap]:
    before, now = old.sends, new.sends
    if now is None:
        return []
    tables = tuple(sorted(new.tables))
    unsent = lacking(now)
    if before is not None and before.version == now.version and not unsent:
        return []
    if before is None and not unsent:
        return []  # a record from before the log pinned this
    changes = _differences(before, now) if before is not None else []
    if unsent and not changes:
        changes = [f"it does not publish {', '.join(unsent)}"]
    if not changes:
        what = (
            f'publication "{new.name}" was altered and set back: it is as the log knows it, and'
            " what it sent in between is unknown"
        )
    else:
        what = f'publication "{new.name}" was altered: {", ".join(changes)}'
    hint = acknowledging(tables)
    if unsent:
        hint = f"{complete(new.name)}; {hint}"
    elif [each for each in changes if not each.startswith("its owner")] == []:
        hint += "; where only its owner was changed: `cdc publication acknowledge --no-snapshot`"
    return [Gap(what, tables, hint)]


def _differences(before: Sends, now: Sends) -> list[str]:
    found = []
    if before.operations != now.operations:
        was, its = ", ".join(before.operations) or "nothing", ", ".join(now.operations) or "nothing"
        found.append(f"it publishes {its}, before {was}")
    if before.via_root != now.via_root:
        found.append(
            f"publish_via_partition_root is {str(now.via_root).lower()},"
            f" before {str(before.via_root).lower()}"
        )
    if before.generated != now.generated:
        found.append(f"publish_generated_columns is {now.generated}, before {before.generated}")
    if before.owner != now.owner:
        found.append(f"its owner is {now.owner}, before {before.owner}")
    return found


def _schemas(old: Publication, new: Publication) -> list[Gap]:
    """Return a gap for each schema that left the publication, even if it came back."""
    if old.sends is None or new.sends is None:
        return []
    there = set(new.sends.schemas.values())
    left = {
        schema
        for schema, member in old.sends.schemas.items()
        if member not in there and member not in new.removed
    }
    found = []
    for schema in sorted(left):
        # Without a membership of its own a table is in the publication by its schema alone; one
        # that is no longer in it is reported as missing.
        tables = tuple(
            sorted(
                table
                for table, member in old.tables.items()
                if not member and new.tables.get(table) == 0 and parts(table)[0] == schema
            )
        )
        if tables:
            found.append(
                Gap(
                    f'schema {schema} left the publication "{new.name}" and came back, with'
                    f" {_some(tables)}",
                    tables,
                    f"changes made in between are in no stream; {acknowledging(tables)}",
                )
            )
    return found


def _members(old: Publication, new: Publication, existing: frozenset[str]) -> list[Gap]:
    known = {table: member for table, member in old.tables.items() if member not in new.removed}
    found = []
    back = tuple(sorted(t for t, its in known.items() if new.tables.get(t, its) != its))
    if back:
        narrowed = [f"{t} sends {change}" for t in back if (change := _narrowed(old, new, t))]
        found.append(
            Gap(
                f'{_some(back)} left the publication "{new.name}" and came back'
                + "".join(f"; {each}" for each in narrowed),
                back,
                f"changes made in between are in no stream; {acknowledging(back)}; or take it out"
                f' again (ALTER PUBLICATION "{new.name}" DROP TABLE …) and put it back with `cdc'
                " table add`, which reads it again",
            )
        )
    members = set(new.tables.values()) - {0}
    gone = tuple(
        sorted(
            table
            for table, member in known.items()
            if table not in new.tables and member not in members and table in existing
        )
    )
    if gone:
        found.append(
            Gap(
                f'publication "{new.name}" no longer has {_some(gone)}',
                gone,
                "changes of a table are lost while it is out; put it back with `cdc"
                " table add`, which reads it again, or accept that it is no longer captured:"
                " `cdc setup`; `cdc table remove` takes one out without a gap",
                left=True,
            )
        )
    return found


def _narrowed(old: Publication, new: Publication, table: str) -> str:
    """Return how a table's column list and row filter differ; empty if they do not."""
    before, now = old.narrowed.get(table), new.narrowed.get(table)
    if before == now:
        return ""
    return f"{_sent(now)}, before {_sent(before)}"


def _sent(its: tuple[tuple[int, ...] | None, str | None] | None) -> str:
    columns, where = its or (None, None)
    text = "every column" if columns is None else f"columns {', '.join(map(str, columns))}"
    return text if where is None else f"{text} where {where}"


def parts(table: str) -> tuple[str, str]:
    """Return schema and name of a table that is quoted as the catalog's format(%I.%I) does."""
    schema, name = _QUOTED.fullmatch(table).groups()  # type: ignore[union-attr] # always matches
    return _plain(schema), _plain(name)


def _plain(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def _some(tables: tuple[str, ...]) -> str:
    more = f" and {len(tables) - _NAMED} more" if len(tables) > _NAMED else ""
    return ", ".join(tables[:_NAMED]) + more
