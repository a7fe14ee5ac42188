"""The note that our commands leave in the comment of a publication that they change.

A table's membership is identified by the oid of its row in `pg_publication_rel`: another oid means
that the table was out of the publication for a while, which is a gap. A changed column list or row
filter also makes a new row, though the table was never out: in Postgres this takes a drop and an
add, in one transaction. So that transaction also writes, as a line of the comment, which membership
each new one continues. A manual change of the publication leaves no note, and the gap is found.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Final

import msgspec

_PREFIX: Final = "lockstep: "


class PublicationNote(msgspec.Struct, frozen=True):
    """What our commands changed on purpose."""

    continues: dict[int, int]  # by membership, the first one that it continues
    # By each membership that we restricted, the row filter as the configuration writes it, or "".
    filters: dict[int, str] = msgspec.field(name="where")
    # Memberships that were ended on purpose: changes that are missing since then are not a gap.
    removed: frozenset[int] = frozenset()
    # By a version of the publication's row, the first one that it continues: options were changed.
    versions: dict[int, int] = {}

    def __bool__(self) -> bool:
        return any(msgspec.structs.astuple(self))


_decode: Final = msgspec.json.Decoder(PublicationNote).decode


def parse(comment: str) -> PublicationNote:
    """Return the note in a comment; an empty one where there is none that can be read."""
    for line in comment.splitlines():
        if line.startswith(_PREFIX):
            with suppress(msgspec.MsgspecError):
                return _decode(line.removeprefix(_PREFIX))
            break
    return PublicationNote({}, {})


def comment_with(comment: str, note: PublicationNote) -> str:
    """Return the comment with this note in place of an earlier one."""
    lines = [line for line in comment.splitlines() if not line.startswith(_PREFIX)]
    if note:
        fields: dict[str, Any] = {
            "continues": note.continues,
            "where": note.filters,
            "removed": sorted(note.removed),
        }
        if note.versions:
            fields["versions"] = note.versions
        lines.append(_PREFIX + json.dumps(fields))
    return "\n".join(lines)
