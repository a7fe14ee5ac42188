"""How a mirror looks in Delta Lake: its columns, its place, what its commits say of themselves.

One table a source table. Its columns are the source's, typed by `sinks.delta.types`, and behind
them ours:

- `_seq`: the row's version; a change is applied only where its seq is greater
- `_commit_lsn`: the end of the transaction that wrote it, as a number
- `_committed_at`: that transaction's time
- `_exact`: Postgres' text of the values that their columns' types cannot hold, by column
- where deleted rows stay, `_deleted`
- where every version of a row stays, `_valid_to_lsn` and `_valid_to`, NULL in the newest one, and
  `_current`; from when it held say `_commit_lsn` and `_committed_at`

Every commit carries JSON in its `userMetadata`: pipeline, epoch, generation, and the frontier that
the table stands at from that commit on. Without a frontier the table is not whole yet.

Pure.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Final

from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sinks.delta.types import DeltaType

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
# What a delete that keeps the row changes in it.
MARKED: Final = (SEQ, COMMIT_LSN, COMMITTED_AT, DELETED)
# Such names need column mapping, which fewer readers know; so only tables that have any get it.
_NOT_PARQUETS: Final = set(" ,;{}()\n\t=")


def ours(*, history: bool = False, soft: bool = False) -> dict[str, object]:
    """Return our columns of a mirror that keeps its rows so."""
    return dict(OURS) | (_HISTORY if history else {}) | (_SOFT if soft and not history else {})


def schema(
    columns: Iterable[tuple[str, DeltaType]],
    table: str,
    behind: Mapping[str, object] = OURS,
) -> dict[str, object]:
    """Return the schema of a mirror as JSON has it; raise ConfigError where Delta has no such.

    `behind` are our columns.
    """
    return struct([*((name, kind.json) for name, kind in columns), *behind.items()], table)


def struct(fields: Iterable[tuple[str, object]], table: str) -> dict[str, object]:
    """Return a schema of columns and their types as JSON has them."""
    named = list(fields)
    names = [name for name, _ in named]
    twice = [name for name, count in Counter(map(str.casefold, names)).items() if count > 1]
    if twice:
        raise ConfigError(
            f"table {table} has columns that Delta Lake takes for one: {', '.join(sorted(twice))}",
            hint=f"Delta does not tell upper from lower case, and {', '.join(OURS)} are ours: "
            "rename the column, exclude it, or take the table's snapshot by the log",
        )
    return {
        "type": "struct",
        "fields": [
            {"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in named
        ],
    }


def properties(columns: Iterable[str]) -> dict[str, str]:
    """Return the table properties that a mirror with these columns needs."""
    if any(_NOT_PARQUETS & set(name) for name in columns):
        return {"delta.columnMapping.mode": "name"}
    return {}


def path(root: str, prefix: str, topic: str) -> str:
    """Return where the mirror of a topic's table is: named as the topic is, without its prefix."""
    return f"{root.rstrip('/')}/{topic.removeprefix(f'{prefix}.')}"


def metadata(**facts: object) -> str:
    """Return a commit's `userMetadata`."""
    return json.dumps({"lockstep": facts}, sort_keys=True)


def facts(user_metadata: str | None) -> dict[str, object]:
    """Return what a commit of ours says of itself; nothing of any other's."""
    try:
        said = json.loads(user_metadata or "{}")
    except ValueError:
        return {}
    found = said.get("lockstep") if isinstance(said, dict) else None
    return found if isinstance(found, dict) else {}
