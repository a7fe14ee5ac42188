"""What has to be done so that the followers' stores hold the views that the configuration declares.

Pure: compares each view's plan with the definitions that the stores hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from cdc.errors import ConfigError
from lockstep.jobs.views.plans import ViewPlan, plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cdc.config import Config
    from lockstep.jobs.views.definitions import Definition
    from lockstep.sinks.contract import Version

State = Literal["unchanged", "new", "changed", "dropped", "refused"]
APPLY: Final = "cdc view apply"


class ViewStep(NamedTuple):
    """A view in a follower's store, and what has to be done about it; "" if nothing."""

    view: str
    follower: str
    state: State
    why: str
    command: str


def plans_of(config: Config, versions: Mapping[str, Version]) -> dict[str, ViewPlan | ConfigError]:
    """Return the plan of each view, or why it is refused."""
    found: dict[str, ViewPlan | ConfigError] = {}
    for name in config.views:
        try:
            found[name] = plan(name, config.views, versions)
        except ConfigError as error:
            found[name] = error
    return found


def steps(
    config: Config,
    plans: Mapping[str, ViewPlan | ConfigError],
    stored: Mapping[str, Mapping[str, Definition]],
) -> list[ViewStep]:
    """Return what there is in each follower; `stored` has the definitions in each one's store."""
    return [
        step
        for follower, definitions in stored.items()
        for step in _steps(config, follower, plans, definitions)
    ]


def _steps(
    config: Config,
    follower: str,
    plans: Mapping[str, ViewPlan | ConfigError],
    stored: Mapping[str, Definition],
) -> Iterator[ViewStep]:
    named = config.followers[follower].views
    for view in named:
        wanted = plans[view]
        if isinstance(wanted, ConfigError):
            yield ViewStep(view, follower, "refused", wanted.what, f"cdc view check {view}")
            continue
        why = _difference(wanted.definition, stored.get(view))
        state: State = "changed" if view in stored else "new"
        yield ViewStep(view, follower, state if why else "unchanged", why, APPLY if why else "")
    for view in sorted(stored.keys() - set(named)):
        still = view in config.views
        why = f"{follower} does not name it" if still else "it is not declared"
        if stored[view].is_dropped:
            why = "cdc view drop was interrupted"
        only = f" --follower {follower}" if still else ""
        yield ViewStep(view, follower, "dropped", why, f"cdc view drop {view}{only}")


def _difference(wanted: Definition, found: Definition | None) -> str:
    """Return why a view is computed again; "" if it is not."""
    if found is None:
        return "its first build"
    if found.fingerprint == wanted.fingerprint:
        return ""
    if found.is_dropped:
        return "its rows were being deleted"
    if found.is_unfinished:
        return "its computation has not ended"
    if found.is_due:
        return "cdc view rebuild has asked for it"
    parts = {
        "key": found.key != wanted.key,
        "columns": found.columns != wanted.columns,
        "query": found.query != wanted.query,
    }
    differ = [name for name, differs in parts.items() if differs]
    return f"its {', '.join(differ)}" if differ else "columns of its tables, or Lockstep's own SQL"
