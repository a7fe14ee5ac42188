"""Compare the publication with what the log knows of it, and name what was lost.

Pure. A publication decides which changes Postgres sends, and Postgres keeps no history of it. So
the log pins what shows that it was altered, even if the change was reverted since: the version of
its catalog row (`xmin`, which each ALTER PUBLICATION … SET replaces), and the oids of the rows by
which tables and schemas belong to it, which ADD and DROP replace. A table is known by its own oid,
so a rename neither hides that it left nor looks as if it had. Our own commands note their changes
in the publication's comment (`cdc.source.publication_note`): a version or an oid that continues a
known one is treated as that one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from cdc.errors import GapError
from cdc.log.records import OPERATIONS

if TYPE_CHECKING:
    from cdc.log.records import PinnedPublication, PublicationOptions

_NAMED: Final = 8  # tables in one sentence
_ALL: Final = (None, None)  # no column list, no row filter
_QUOTED: Final = re.compile(r'("(?:[^"]|"")*"|[^.]*)\.(.*)', re.DOTALL)


class Gap(NamedTuple):
    """One thing that happened to the publication, the tables that it concerns, and what to do."""

    what: str
    tables: tuple[str, ...]  # quoted as the log has them
    hint: str
    is_removal: bool = False  # tables that are missing, which `cdc setup` may accept


def gaps(old: PinnedPublication, new: PinnedPublication, existing: frozenset[str]) -> list[Gap]:
    """Return every way in which `new` has lost changes since `old`; `old` is the log's.

    A table that `cdc table remove` took out is no gap. One that was dropped has lost no change:
    `existing` are the tables of `old` that exist under any name, by their names there.
    """
    name = new.name
    if old.oid != new.oid:
        return [
            Gap(
                f'publication "{name}" was dropped and created again',
                tuple(sorted(new.tables)),
                "changes made in between were not streamed; `cdc teardown --topics`, then `cdc"
                " setup` and a snapshot, start over",
            )
        ]
    return [*_altered(old, new), *_schemas(old, new), *_members(old, new, existing)]


def continue_with(
    old: PinnedPublication, new: PinnedPublication, existing: frozenset[str], since: str = ""
) -> PinnedPublication:
    """Return the publication to continue with after `old`, the log's: `new` and dropped tables.

    A dropped table stays known, so that a table created under its name later is found to be
    missing. Raises GapError with every gap between the two; `since` describes from when on.
    """
    if error := combined_error(gaps(old, new, existing), since):
        raise error
    members = set(new.tables.values())
    dropped = {
        table: member
        for table, member in old.tables.items()
        # One without a row of its own, as a partition, joins and leaves with its schema or root.
        if member and table not in new.tables and member not in members.union(new.removed)
    }
    return replace(new, tables=new.tables | dropped) if dropped else new


def combined_error(found: list[Gap], since: str = "") -> GapError | None:
    """Return one error that names every gap; None if there is none."""
    if not found:
        return None
    when = f" ({since})" if since else ""
    hints = dict.fromkeys(gap.hint for gap in found)
    return GapError("; ".join(gap.what for gap in found) + when, hint="; ".join(hints))


def unpublished_operations(options: PublicationOptions) -> list[str]:
    """Return the operations that the publication does not publish."""
    return [each for each in OPERATIONS if each not in options.operations]


def publish_all_sql(name: str) -> str:
    """Return the SQL that has the publication publish every operation."""
    return f"ALTER PUBLICATION \"{name}\" SET (publish = '{', '.join(OPERATIONS)}')"


def _acknowledge_hint(tables: tuple[str, ...]) -> str:
    """Return the remedy that accepts the publication and reads `tables` again."""
    return (
        f"`cdc publication acknowledge` accepts the publication as it is and has {_listed(tables)}"
        " read again, as `cdc snapshot … --replace` does; then `cdc run`"
    )


def _altered(old: PinnedPublication, new: PinnedPublication) -> list[Gap]:
    before, now = old.options, new.options
    if now is None:
        return []
    tables = tuple(sorted(new.tables))
    unsent = unpublished_operations(now)
    # None in a record from before the log pinned this.
    if not unsent and (before is None or before.version == now.version):
        return []
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
    hint = _acknowledge_hint(tables)
    if unsent:
        hint = f"{publish_all_sql(new.name)}; {hint}"
    elif [each for each in changes if not each.startswith("its owner")] == []:
        hint += "; where only its owner was changed: `cdc publication acknowledge --no-snapshot`"
    return [Gap(what, tables, hint)]


def _differences(before: PublicationOptions, now: PublicationOptions) -> list[str]:
    """Return each option that differs, with both values."""
    values = zip(_values(before), _values(now), strict=True)
    return [f"{name} {new}, before {old}" for (name, old), (_, new) in values if new != old]


def _values(options: PublicationOptions) -> list[tuple[str, str]]:
    return [
        ("it publishes", ", ".join(options.operations) or "nothing"),
        ("publish_via_partition_root is", str(options.via_root).lower()),
        ("publish_generated_columns is", options.generated),
        ("FOR ALL TABLES is", str(options.all_tables).lower()),
        ("its owner is", options.owner),
    ]


def _schemas(old: PinnedPublication, new: PinnedPublication) -> list[Gap]:
    """Return a gap for each schema that left the publication, even if it came back."""
    if old.options is None or new.options is None:
        return []
    there = set(new.options.schemas.values())
    left = {
        schema
        for schema, member in old.options.schemas.items()
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
                if not member and new.tables.get(table) == 0 and split_name(table)[0] == schema
            )
        )
        if tables:
            found.append(
                Gap(
                    f'schema {schema} left the publication "{new.name}" and came back, with'
                    f" {_listed(tables)}",
                    tables,
                    f"changes made in between are in no stream; {_acknowledge_hint(tables)}",
                )
            )
    return found


def _members(old: PinnedPublication, new: PinnedPublication, existing: frozenset[str]) -> list[Gap]:
    known = {table: member for table, member in old.tables.items() if member not in new.removed}
    found = []
    now = _names_now(old, new)
    was = {now[t]: t for t, its in known.items() if t in now and new.tables[now[t]] != its}
    returned = tuple(sorted(was))
    if returned:
        narrowed = [
            f"{t} sends {change}" for t in returned if (change := _narrowed(old, new, was[t], t))
        ]
        found.append(
            Gap(
                f'{_listed(returned)} left the publication "{new.name}" and came back'
                + "".join(f"; {each}" for each in narrowed),
                returned,
                f"changes made in between are in no stream; {_acknowledge_hint(returned)}; or take"
                f' it out again (ALTER PUBLICATION "{new.name}" DROP TABLE …) and put it back with'
                " `cdc table add`, which reads it again",
            )
        )
    missing = tuple(t for t in unpublished(old, new) if t in known and t in existing)
    if missing:
        found.append(
            Gap(
                f'publication "{new.name}" no longer has {_listed(missing)}',
                missing,
                "changes of a table are lost while it is out; put it back with `cdc"
                " table add`, which reads it again (by the name that it has now), or accept that it"
                " is no longer captured: `cdc setup`; `cdc table remove` takes one out without a"
                " gap",
                is_removal=True,
            )
        )
    return found


def unpublished(old: PinnedPublication, new: PinnedPublication) -> list[str]:
    """Return the tables of `old` that `new` has under no name, by their names in `old`."""
    now, members = _names_now(old, new), set(new.tables.values()) - {0}
    # A table that was pinned without its oid is known by its membership.
    return sorted(t for t, member in old.tables.items() if t not in now and member not in members)


def _names_now(old: PinnedPublication, new: PinnedPublication) -> dict[str, str]:
    """Return the name in `new` of each table of `old` that it has.

    If a table was dropped, or was pinned without its oid, the table that has its name counts as it.
    """
    named = {relation: table for table, relation in new.relations.items()}
    found = {t: named[relation] for t, relation in old.relations.items() if relation in named}
    taken = {*found, *found.values()}
    return found | {t: t for t in old.tables if t in new.tables and t not in taken}


def _narrowed(old: PinnedPublication, new: PinnedPublication, was: str, table: str) -> str:
    """Return how a table's column list and row filter differ; empty if they do not."""
    before, now = old.narrowed.get(was, _ALL), new.narrowed.get(table, _ALL)
    (columns_before, filter_before), (columns, row_filter) = before, now
    # Records of older versions have a filter's text, which can't be compared with a hash.
    texts = [not each.startswith("#") for each in (filter_before, row_filter) if each is not None]
    comparable = len(set(texts)) <= 1
    another = filter_before != row_filter and comparable
    if columns == columns_before and not another:
        return ""
    rows = "rows of another row filter" if another and filter_before else "rows of its row filter"
    return f"{_sent(columns, row_filter, rows)}, before {_sent(columns_before, filter_before)}"


def _sent(
    columns: tuple[int, ...] | None, row_filter: str | None, rows: str = "rows of its row filter"
) -> str:
    text = "every column" if columns is None else f"columns {', '.join(map(str, columns))}"
    return text if row_filter is None else f"{text} of the {rows}"


def split_name(table: str) -> tuple[str, str]:
    """Return schema and name of a table that is quoted as the catalog's format(%I.%I) does."""
    schema, name = _QUOTED.fullmatch(table).groups()  # type: ignore[union-attr] # always matches
    return _plain(schema), _plain(name)


def _plain(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def _listed(tables: tuple[str, ...]) -> str:
    more = f" and {len(tables) - _NAMED} more" if len(tables) > _NAMED else ""
    return ", ".join(tables[:_NAMED]) + more
