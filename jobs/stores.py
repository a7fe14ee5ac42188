"""Which sink a follower's section asks for: one function a store.

Made without touching the store, so also where only a follower's kind is asked for. A store's
client is imported when it is needed: followers of other stores go without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.config import Config
    from cdc.config.followers import Follower
    from sinks.contract import Sink


# By the name of the field of `Follower` that is set: a function of the configuration, the
# follower's name and its section.
_MAKERS: Final[dict[str, Callable[[Config, str, Follower], Sink]]] = {}


def kind(follower: Follower) -> str:
    """Return which store it is: delta, redis, opensearch."""
    for name in ("delta", "redis", "opensearch"):
        if getattr(follower, name) is not None:
            return name
    raise ConfigError("a follower names no store", hint="give it one of delta, redis, opensearch")


def sink(config: Config, name: str, follower: Follower) -> Sink:
    """Return the follower's sink."""
    store = kind(follower)
    if store not in _MAKERS:
        raise ConfigError(f"there is no sink for {store}", hint="take another store")
    return _MAKERS[store](config, name, follower)
