"""Change a store's rows as DDL has changed the table's, where no event does.

A sink that can do so in its store's own way is `Alterable`. In any other the rows are read, changed
and written again, each with the seq of the alteration: so that a repeated or interrupted pass has
the same result, and rows that were written after it stay as they are. It takes as long as the table
has rows, and holds a few thousand of them.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from cdc import failpoints
from lockstep.jobs.cuts.reduce import decode_row
from lockstep.sinks.contract import Alterable, Change, Changes, Generations, key_changed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.sinks.contract import Altered, Sink

_AT_ONCE: Final = 1_000


def alter(sink: Sink, altered: Altered) -> None:
    """Change the stored rows of the table; all changes with a lower seq were written."""
    if isinstance(sink, Alterable):
        sink.alter(altered)
    elif isinstance(sink, Generations):
        _expect_same_key(altered)
        changes = _changes(sink, altered)
        while some := list(islice(changes, _AT_ONCE)):
            sink.write(Changes((altered.version,), some))
            failpoints.reach("follow_altered")


def _changes(sink: Generations, altered: Altered) -> Iterator[Change]:
    names = [column.name for column in altered.version.columns]
    for key, seq, row in sink.contents(altered.before):
        if not row or seq >= altered.seq:
            continue
        new = altered.row(row)
        known = decode_row(new)
        yield Change(
            key,
            altered.seq,
            new,
            altered.version.schema_id,
            0,
            0,
            tuple(name for name in names if name not in known),
            op="u",
        )


def _expect_same_key(altered: Altered) -> None:
    """Raise ConfigError if keys are written in another way: rows are found by them.

    A column of the key has another name, or its numbers are texts.
    """
    version = altered.version
    if not version.key or not altered.before.key:
        return
    is_text = any(each.as_text and each.name in version.key for each in altered.columns)
    if is_text or altered.renamed(altered.before.key) != version.key:
        raise key_changed(version)
