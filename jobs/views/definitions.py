"""By which definitions a store's views were computed: its table `views.definitions`.

A view whose stored definition has another fingerprint than its plan is computed again. The rest is
what is needed to name what has changed, and to delete a view's rows when nothing declares it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from lockstep.jobs.views import types
from lockstep.sinks.contract import Change, Changes, Column, Listable, Version

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from lockstep.sinks.contract import Applied, Sink

SCHEMA: Final = "views"
DEFINITIONS: Final = Version(
    1,
    SCHEMA,
    "definitions",
    f"{SCHEMA}.definitions",
    ("view",),
    (types.TEXT.column("view"), types.TEXT.column("definition")),
    {},
)
# A fingerprint of no view: one with it in the store is computed again.
_REBUILT: Final = "rebuild"
# Another one, which is in no store: rows are being computed by the definition.
_UNFINISHED: Final = "unfinished"
# The newest requests that a definition names. A command whose request is not among them any more
# asks once more.
_MOST_REQUESTS: Final = 16


class Definition(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a view's rows were computed by."""

    fingerprint: str  # of the translated query, the key, and the tables' versions
    query: str  # a fingerprint of the declared SQL, with that of the views that it names
    schema_id: int
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    seq: int = 0  # of the cut in which all rows were computed
    requests: tuple[str, ...] = ()  # for which they are computed again, or have been

    @property
    def is_dropped(self) -> bool:
        """Whether the view's rows are being deleted, or are deleted already."""
        return not self.fingerprint

    def as_dropped(self) -> Definition:
        """Return the definition of a view whose rows are about to be deleted.

        It is no view's, so one that is declared again is computed again, whatever was deleted.
        """
        return msgspec.structs.replace(self, fingerprint="")

    @property
    def is_due(self) -> bool:
        """Whether all rows are to be computed again in the next cut, because it was asked for."""
        return self.fingerprint == _REBUILT

    def as_due(self, requests: Collection[str]) -> Definition:
        """Return the definition of a view whose rows are about to be computed again for requests.

        It is no view's, so whichever process writes the next cut does that, and repeats it if it is
        interrupted.
        """
        named = (*self.requests, *(each for each in requests if each not in self.requests))
        return msgspec.structs.replace(self, fingerprint=_REBUILT, requests=named[-_MOST_REQUESTS:])

    @property
    def is_unfinished(self) -> bool:
        """Whether the store is not at the cut in which all rows are computed."""
        return self.fingerprint == _UNFINISHED

    def seen_at(self, seq: int) -> Definition:
        """Return what it is in a store at a seq: a cut writes definitions before rows."""
        if self.seq <= seq or self.is_dropped:
            return self
        return msgspec.structs.replace(self, fingerprint=_UNFINISHED)

    def has_answered(self, request: str, seq: int) -> bool:
        """Return whether a store at a seq has all rows as computed again for a request."""
        return request in self.requests and not self.is_due and self.seq <= seq

    def at(self, seq: int, former: Definition | None) -> Definition:
        """Return the definition of a view that is computed completely, in place of a former one."""
        requests = former.requests if former else ()
        return msgspec.structs.replace(self, seq=seq, requests=requests)

    def version(self, view: str) -> Version:
        """Return the view as a table of its store."""
        name = f"{SCHEMA}.{view}"
        return Version(self.schema_id, SCHEMA, view, name, self.key, self.columns, {})


_decode: Final = msgspec.json.Decoder(Definition).decode


def stored(sink: Sink, names: Iterable[str]) -> dict[str, Definition]:
    """Return the definitions of these views in an opened store."""
    return _decoded(sink.rows(DEFINITIONS, [_key(name) for name in names]).values())


def listed(sink: Sink, names: Iterable[str]) -> dict[str, Definition]:
    """Return the definitions of all views in an opened store; of `names` if it lists no rows."""
    if not isinstance(sink, Listable):
        return stored(sink, names)
    every = _decoded(row for _, _, row in sink.contents(DEFINITIONS) if row)
    # A store that a cut was being written to may list rows of that cut.
    return stored(sink, {*every, *names})


def changes(made: Mapping[str, Definition | None], applied: Applied) -> Changes:
    """Return the changes that record definitions; None: that the store has no such view."""
    return Changes((DEFINITIONS,), [_change(name, each, applied) for name, each in made.items()])


def _change(view: str, definition: Definition | None, applied: Applied) -> Change:
    row = None
    if definition is not None:
        text = msgspec.json.encode(definition).decode()
        row = msgspec.json.encode({"view": view, "definition": text})
    op = "c" if row else "d"
    return Change(_key(view), applied.seq, row, 1, applied.lsn, applied.committed_at_us, op=op)


def _key(view: str) -> bytes:
    return msgspec.json.encode({"view": view})


def _decoded(rows: Iterable[bytes]) -> dict[str, Definition]:
    found = (msgspec.json.decode(row) for row in rows)
    return {each["view"]: _decode(each["definition"]) for each in found}
