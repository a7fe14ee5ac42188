"""What applications import from Lockstep, and nothing else; all other modules may change.

```python
import lockstep

spark = lockstep.session("totals")
orders = lockstep.changes(spark, "lockstep.yaml", ["public.orders"], start="beginning")
```

- `changes`, `follow_changes`: the log's changes between two frontiers, as a DataFrame or a stream
- `register`: makes `spark.read.format("lockstep")` known to a session of your own
- `follow`: keep stores equal to the source, as `cdc follow` does
- `read_as_of`, `read_as_of_arrow`: Delta mirrors as of one frontier
- `session`: a small local Spark session with Delta
- `Client`: read your own writes, and the log's changes as a member of a group or a
  work queue
- `view`, `transform`: declare views whose rows your own Python makes
- `decryptor`: the texts of columns that the mask `encrypt` hides
- `contract`: what a sink of your own implements, and `lockstep.conformance` tests

Names are imported when they are used: `Client` needs no Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cdc.client import Client, Delivery, GroupChange, LagError, Queue, Token
    from cdc.errors import CDCError, ConfigError, GapError, StoreLostError, UnavailableError
    from cdc.events import LSN
    from cdc.keyring.opening import decryptor
    from lockstep.jobs.following_stores import follow
    from lockstep.jobs.reading_as_of import TablesAsOf, read_as_of, read_as_of_arrow
    from lockstep.jobs.reading_changes import changes, follow_changes, register, session
    from lockstep.jobs.views.code import transform, view
    from lockstep.sinks import contract

__all__ = [
    "LSN",
    "CDCError",
    "Client",
    "ConfigError",
    "Delivery",
    "GapError",
    "GroupChange",
    "LagError",
    "Queue",
    "StoreLostError",
    "TablesAsOf",
    "Token",
    "UnavailableError",
    "changes",
    "contract",
    "decryptor",
    "follow",
    "follow_changes",
    "read_as_of",
    "read_as_of_arrow",
    "register",
    "session",
    "transform",
    "view",
]

_HOMES: Final = {
    **dict.fromkeys(
        ("Client", "Delivery", "GroupChange", "Queue", "Token", "LagError"), "cdc.client"
    ),
    **dict.fromkeys(("CDCError", "ConfigError", "GapError"), "cdc.errors"),
    **dict.fromkeys(("StoreLostError", "UnavailableError"), "cdc.errors"),
    "LSN": "cdc.events",
    "decryptor": "cdc.keyring.opening",
    "follow": "lockstep.jobs.following_stores",
    **dict.fromkeys(
        ("TablesAsOf", "read_as_of", "read_as_of_arrow"), "lockstep.jobs.reading_as_of"
    ),
    **dict.fromkeys(
        ("changes", "follow_changes", "register", "session"), "lockstep.jobs.reading_changes"
    ),
    **dict.fromkeys(("transform", "view"), "lockstep.jobs.views.code"),
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the names above
    if name == "contract":
        return import_module("lockstep.sinks.contract")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
