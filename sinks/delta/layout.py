"""A mirror's layout in Delta Lake: its columns, its path, the metadata of its commits.

One Delta table per source table. Its columns are the source's, typed by `sinks.delta.types`,
followed by ours:

- `_seq`: the row's version; a change is applied only if its seq is greater
- `_commit_lsn`: the end of the transaction that wrote it, as a number
- `_committed_at`: that transaction's time
- `_exact`: Postgres' text of the values that their columns' types cannot hold, by column
- if deleted rows stay, `_deleted`
- if every version of a row stays, `_valid_to_lsn` and `_valid_to`, NULL in the newest one, and
  `_current`; a version is valid from `_commit_lsn` and `_committed_at` on

Every commit has JSON in its `userMetadata`: pipeline, epoch, generation, and the table's frontier
from that commit on. Without a frontier the table is not complete yet.

Pure.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Final

from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lockstep.sinks.delta.types import DeltaType

SEQ: Final = "_seq"
COMMIT_LSN: Final = "_commit_lsn"
COMMITTED_AT: Final = "_committed_at"
EXACT: Final = "_exact"
OURS: Final[Mapping[str, object]] = {
    SEQ: "long",
    COMMIT_LSN: "long",
    COMMITTED_AT: "timestamp",
    EXACT: {
        "type": "map",
        "keyType": "string",
        "valueType": "string",
        "valueContainsNull": False,
    },
}
DELETED: Final = "_deleted"
VALID_TO_LSN: Final = "_valid_to_lsn"
VALID_TO: Final = "_valid_to"
CURRENT: Final = "_current"
_SOFT: Final = {DELETED: "boolean"}
_HISTORY: Final = {VALID_TO_LSN: "long", VALID_TO: "timestamp", CURRENT: "boolean"}
# The columns that a delete that keeps the row changes.
MARKED: Final = (SEQ, COMMIT_LSN, COMMITTED_AT, DELETED)
# Names with these characters need column mapping, which fewer readers support; so only tables with
# such names get it.
_NOT_PARQUETS: Final = set(" ,;{}()\n\t=")


def ours(*, history: bool = False, soft: bool = False) -> dict[str, object]:
    """Return our columns of a mirror with or without history and soft deletes."""
    return dict(OURS) | (_HISTORY if history else {}) | (_SOFT if soft and not history else {})


def schema(
    columns: Iterable[tuple[str, DeltaType]],
    table: str,
    ours: Mapping[str, object] = OURS,
) -> dict[str, object]:
    """Return the schema of a mirror for JSON; raise ConfigError if Delta can't have it.

    `ours` are our columns.
    """
    return struct([*((name, kind.json) for name, kind in columns), *ours.items()], table)


def struct(fields: Iterable[tuple[str, object]], table: str) -> dict[str, object]:
    """Return a schema of columns and their types, for JSON."""
    named = list(fields)
    expect_distinct((name for name, _ in named), table)
    return {
        "type": "struct",
        "fields": [
            {"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in named
        ],
    }


def expect_distinct(names: Iterable[str], table: str) -> None:
    """Raise ConfigError if Delta would take two columns of a mirror, ours included, for one."""
    twice = [name for name, count in Counter(map(str.casefold, names)).items() if count > 1]
    if twice:
        raise ConfigError(
            f"table {table} has columns that Delta Lake treats as one: {', '.join(sorted(twice))}",
            hint=f"Delta names ignore case, and {', '.join(OURS)} are ours: "
            "rename the column, exclude it, or take the table's snapshot through the log; while the"
            " log has events of such a version, leave the table out of the follower's `tables`",
        )


def properties(columns: Iterable[str]) -> dict[str, str]:
    """Return the table properties that a mirror with these columns needs."""
    if any(_NOT_PARQUETS & set(name) for name in columns):
        return {"delta.columnMapping.mode": "name"}
    return {}


def path(root: str, prefix: str, topic: str) -> str:
    """Return the path of a topic's mirror, named like the topic without its prefix."""
    return f"{root.rstrip('/')}/{topic.removeprefix(f'{prefix}.')}"


def metadata(**facts: object) -> str:
    """Return a commit's `userMetadata`."""
    return json.dumps({"lockstep": facts}, sort_keys=True)


def facts(user_metadata: str | None) -> dict[str, object]:
    """Return the facts of one of our commits; empty for any other."""
    try:
        parsed = json.loads(user_metadata or "{}")
    except ValueError:
        return {}
    found = parsed.get("lockstep") if isinstance(parsed, dict) else None
    return found if isinstance(found, dict) else {}
