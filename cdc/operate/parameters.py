"""How a server's parameter is changed: by our role, by a superuser, or in a managed service."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cdc.source.abilities import Abilities

_RELOAD = "SELECT pg_reload_conf();"


def change(able: Abilities, name: str, value: str, *, restart: bool = False) -> str:
    """Return the statement or instruction that sets parameter `name` to `value`, written in SQL."""
    after = "  -- then restart Postgres" if restart else ""
    statement = f"ALTER SYSTEM SET {name} = {value}; {_RELOAD}{after}"
    if able.settable is None or name in able.settable:
        return statement
    if able.managed is not None:
        plain = value.strip("'")
        return f"set {name} = {plain} in {able.managed}" + ", then restart it" * restart
    return f"as a superuser: {statement}"
