"""A row's key as a person writes it → the bytes that it has in the log. Pure.

A key is JSON of the key's columns, which a table's versions name. A person gives such an object, or
the value alone where there is one column; then a number may be meant as text, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cdc.config.patterns import parse_table_pattern
from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.log.records import SchemaRecord


def one_table(table: str) -> tuple[str, str]:
    """Return the schema and name of a table; raise ConfigError if the text names none, or many."""
    try:
        pattern = parse_table_pattern(table)
        found = pattern.exact
    except ValueError as error:
        raise ConfigError(
            f"{table!r} names no table: {error}", hint="write schema.table"
        ) from error
    if found is None:
        raise ConfigError(f"{table!r} names several tables", hint="write schema.table")
    return found


def log_keys(table: str, text: str, versions: Iterable[SchemaRecord]) -> set[bytes]:
    """Return the forms that the key may have in the log, of any version of the table."""
    wanted = one_table(table)
    columns = {each.key for each in versions if (each.schema, each.table) == wanted} - {()}
    if not columns:
        raise ConfigError(
            f"neither archive nor log has a table {table} with a key",
            hint="write it as `cdc table list` does, with its schema",
        )
    try:
        given = msgspec.json.decode(text.encode())
    except msgspec.MsgspecError:
        given = text
    found = set[bytes]()
    for names_of_key in columns:
        if isinstance(given, dict):
            if set(given) == set(names_of_key):
                found.add(msgspec.json.encode({name: given[name] for name in names_of_key}))
        elif len(names_of_key) == 1:
            forms = [given, text] if isinstance(given, int | float | bool) else [text]
            found |= {msgspec.json.encode({names_of_key[0]: form}) for form in forms}
    if not found:
        one = min(columns)
        raise ConfigError(
            f"the key of {table} has the columns {', '.join(one)}",
            hint='give a JSON object of them: {"' + '": …, "'.join(one) + '": …}',
        )
    return found
