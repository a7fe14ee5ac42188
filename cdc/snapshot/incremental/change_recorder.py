"""Follow a table's changes in the stream while it is snapshotted, and pass them to the windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.decode import messages, pgoutput
from cdc.snapshot.incremental.visibility import Change, Window, row_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cdc.encode.encoder import Encoder
    from cdc.sequence.sequencer import Sequencer
    from cdc.snapshot.incremental.records import Key
    from cdc.snapshot.incremental.visibility import Values


class TableWatch:
    """Sees one table's changes as long as a snapshot of it runs (`cdc.encode.routes.Watch`)."""

    def __init__(
        self,
        sequencer: Sequencer,
        relation_id: int,
        moved: Callable[[int, Key | None, Key | None], None],
    ) -> None:
        """`moved` gets the keys that rows leave, and those they take without their TOAST values."""
        self._sequencer = sequencer
        self._relation_id = relation_id
        self._moved = moved
        self.windows: list[Window] = []

    @property
    def all_rows(self) -> bool:
        return bool(self.windows)

    def truncate(self) -> None:
        self._add(Change(self._xid, None, None))

    def change(self, payload: bytes) -> None:
        table = self._sequencer.table(self._relation_id)
        assert table is not None, "a change is of a table that was described"
        encoder, message = table.encoder, pgoutput.decode(payload)
        match message:
            case messages.Insert():
                self._add(Change(self._xid, None, _key(encoder, message.new)))
            case messages.Delete():
                old = message.old.values
                self._moved(self._relation_id, _texts(encoder, old), None)
                self._add(Change(self._xid, _key(encoder, old), None))
            case messages.Update():
                self._update(encoder, message)

    def _update(self, encoder: Encoder, message: messages.Update) -> None:
        new = _filled(message)
        values = None
        if messages.UNCHANGED in new:
            encoded = _encoded(encoder, new)
            values = tuple(
                None if value is messages.UNCHANGED else text
                for value, text in zip(new, encoded, strict=True)
            )
        after = _key(encoder, new)
        before = after if message.old is None else _key(encoder, message.old.values)
        change = Change(self._xid, before, after, values)
        if before != after:
            old = message.old.values if message.old else new
            taken = _texts(encoder, new) if change.moved else None
            self._moved(self._relation_id, _texts(encoder, old), taken)
        self._add(change)

    @property
    def _xid(self) -> int:
        xid = self._sequencer.xid
        assert xid is not None, "a row's transaction has an xid"
        return xid

    def _add(self, change: Change) -> None:
        for window in self.windows:
            window.add(change)


def _filled(message: messages.Update) -> Sequence[messages.Value]:
    """Return the new row; what it leaves out is taken from the old row where that has it."""
    if message.old is None:
        return message.new
    whole = isinstance(message.old, messages.OldTuple)
    return [
        old if value is messages.UNCHANGED and (whole or old is not None) else value
        for value, old in zip(message.new, message.old.values, strict=True)
    ]


def _columns(encoder: Encoder) -> list[int]:
    names = [column.name for column in encoder.schema.columns]
    return [names.index(name) for name in encoder.schema.key]


def _texts(encoder: Encoder, values: Sequence[messages.Value]) -> Key:
    """Return the key's values as Postgres wrote them; none where they are not text."""
    texts = [values[i] for i in _columns(encoder)]
    try:
        return tuple(each.decode() if isinstance(each, bytes) else "" for each in texts)
    except UnicodeDecodeError:
        return ()


def _key(encoder: Encoder, values: Sequence[messages.Value]) -> bytes | None:
    columns = _columns(encoder)
    only = [value if i in columns else None for i, value in enumerate(values)]
    return encoder.key(_encoded(encoder, only))


def _encoded(encoder: Encoder, values: Sequence[messages.Value]) -> Values:
    """Return the values as they are in events; NULL for what was not sent."""
    row = row_bytes(value if isinstance(value, bytes) else None for value in values)
    return encoder.copied_values(row, 0, len(row))
