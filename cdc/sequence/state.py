"""The sequencer's types: where it is, why it stops, and the errors that it raises.

Pure.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from cdc.decode import messages
from cdc.errors import CDCError, GapError
from cdc.events import LSN

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdc.encode.encoder import New
    from cdc.log.batch import Appends


class LastChange(NamedTuple):
    """The last change sequenced; `open` if its transaction continues after it.

    The xid is `replay.NO_TRANSACTION` for a message alone; None if it is not known.
    """

    commit_lsn: LSN
    ordinal: int
    open: bool
    xid: int | None


class Pause(Enum):
    """Why `feed` stopped, if not for a message."""

    MORE = "more"  # the chunk's complete frames are used up
    FULL = "full"  # a source transaction ended, and the batch has reached its size
    OTHER = "other"  # the message here is not a frame


class Wanted(NamedTuple):
    """A message can't be verified yet: `go_on` reads what is missing from the source, and does."""

    go_on: Callable[[], None]


# What the pipeline does before the sequencer continues.
Step: TypeAlias = (
    messages.Relation | messages.StreamStart | messages.StreamCommit | messages.StreamAbort | Wanted
)

# What the row path needs: new rows' encoder, the op, the partitions' appends, their number.
Row: TypeAlias = "tuple[New, bytes, Appends, int]"


def history_gap(what: str) -> GapError:
    """Return the error of a stream that does not continue the log."""
    return GapError(
        what,
        hint="slot and log have different histories: `cdc teardown --topics`, then `cdc setup` and"
        " a snapshot start over",
    )


def located(lsn: int, error: CDCError) -> CDCError:
    """Return the error with the LSN of the frame that it is about."""
    return type(error)(f"{error.what} (at LSN {LSN(lsn)})", hint=error.hint)


def type_name(message: messages.Type) -> str:
    """Return a type's name as table versions have it."""
    if message.namespace in ("", "pg_catalog"):
        return message.name
    schema = f'"{message.namespace}"' if "." in message.namespace else message.namespace
    return f"{schema}.{message.name}"
