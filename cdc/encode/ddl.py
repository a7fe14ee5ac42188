"""What a `lockstep.ddl` message becomes: a record in the schema topic, with its position.

Pure. The event triggers of `migrations/` write the message; any role may write one with the same
prefix, so its content is checked: what is not as the triggers write it gives no record.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cdc.encode.ddl_literals import without_literals
from cdc.events import LSN
from cdc.log import names

PREFIX: Final = "lockstep.ddl"
FORMAT: Final = 1
# A topic accepts a megabyte; the triggers stay far below it.
_MAX_BYTES: Final = 900_000


class DDLObject(msgspec.Struct, frozen=True, kw_only=True):
    """One object that a statement created, changed or dropped."""

    type: str
    schema: str | None
    identity: str | None


class DDLMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the event trigger reports."""

    event: str
    tag: str
    objects: tuple[DDLObject, ...]
    object_count: int
    statement: str | None
    statement_characters: int | None
    withheld: bool
    role: str
    session_role: str


_decode: Final = msgspec.json.Decoder(DDLMessage).decode


class DDLRecord(DDLMessage, frozen=True, kw_only=True):
    """A DDL statement with its position: after the change of that `seq`, before the next one."""

    format: int = FORMAT
    lsn: str
    commit_lsn: str
    ordinal: int
    seq: int
    tx_id: int | None
    committed_at_us: int


def record(  # noqa: PLR0913 - its fields
    topic_prefix: str,
    content: bytes,
    *,
    lsn: LSN,
    commit_lsn: LSN,
    ordinal: int,
    seq: int,
    committed_at_us: int,
    tx_id: int | None,
    literals: bool = True,
) -> tuple[str, bytes, bytes] | None:
    """Return topic, key and value; None if an event trigger of ours did not write `content`.

    `ordinal` and `seq` are those of the last change before it. Without `literals` the statement
    has none: they may be values that the configuration hides.
    """
    try:
        sent = _decode(content.decode("utf-8", "replace"))
    except msgspec.MsgspecError:
        return None
    if not literals and sent.statement is not None:
        sent = msgspec.structs.replace(sent, statement=without_literals(sent.statement))
    made = DDLRecord(
        **msgspec.structs.asdict(sent),
        lsn=str(lsn),
        commit_lsn=str(commit_lsn),
        ordinal=ordinal,
        seq=seq,
        tx_id=tx_id,
        committed_at_us=committed_at_us,
    )
    value = msgspec.json.encode(made)
    if len(value) >= _MAX_BYTES:
        return None
    # The key is the message's own WAL address, the same at each replay.
    return names.schema_topic(topic_prefix), msgspec.json.encode({"ddl": str(lsn)}), value
