"""Record tables' changes in the stream for their chunks, while snapshots of them run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.decode import messages, pgoutput
from cdc.decode.binary_copy import row_bytes
from cdc.snapshot.incremental.reconcile import RowChange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cdc.encode.encoder import Encoder
    from cdc.sequence.sequencer import Sequencer
    from cdc.snapshot.incremental.reconcile import ChunkChanges, Values
    from cdc.snapshot.incremental.records import Key


class ChangeRecorder:
    """Sees one table's changes as long as a snapshot of it runs."""

    def __init__(
        self,
        sequencer: Sequencer,
        relation_id: int,
        key_changed: Callable[[int, Key | None, Key | None], None],
    ) -> None:
        """`key_changed` gets the keys that rows leave, and those they take without their TOAST."""
        self._sequencer = sequencer
        self._relation_id = relation_id
        self._key_changed = key_changed
        # Between the watermarks of a chunk; there may be several.
        self.recording: list[ChunkChanges] = []

    @property
    def all_rows(self) -> bool:
        return bool(self.recording)

    def truncate(self) -> None:
        self._add(RowChange(self._xid, None, None))

    def change(self, payload: bytes) -> None:
        table = self._sequencer.table(self._relation_id)
        assert table is not None, "a change is of a table that was described"
        encoder, message = table.encoder, pgoutput.decode(payload)
        match message:
            case messages.Insert():
                self._add(RowChange(self._xid, None, _key(encoder, message.new)))
            case messages.Delete():
                old = message.old.values
                self._key_changed(self._relation_id, _texts(encoder, old), None)
                self._add(RowChange(self._xid, _key(encoder, old), None))
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
        change = RowChange(self._xid, before, after, values)
        if before != after:
            old = message.old.values if message.old else new
            taken = _texts(encoder, new) if change.takes_key_without_toast else None
            self._key_changed(self._relation_id, _texts(encoder, old), taken)
        self._add(change)

    @property
    def _xid(self) -> int:
        xid = self._sequencer.xid
        assert xid is not None, "a row's transaction has an xid"
        return xid

    def _add(self, change: RowChange) -> None:
        for changes in self.recording:
            changes.add(change)


class ChangeRecorders:
    """The recorders of the tables that snapshots read. Other tables cost nothing."""

    def __init__(
        self, sequencer: Sequencer, key_changed: Callable[[int, Key | None, Key | None], None]
    ) -> None:
        """`key_changed` is called as `ChangeRecorder` says."""
        self._sequencer = sequencer
        self._key_changed = key_changed
        self._by_relation: dict[int, ChangeRecorder] = {}

    def __getitem__(self, relation_id: int) -> ChangeRecorder:
        """Return the recorder of a table that is observed."""
        return self._by_relation[relation_id]

    def start(self, relation_id: int, changes: ChunkChanges) -> None:
        """Record a table's changes, from here on, for a chunk."""
        self._observe(relation_id).recording.append(changes)
        self._sequencer.observe(relation_id, all_rows=True)

    def stop(self, relation_id: int, changes: ChunkChanges) -> None:
        """Record no more for a chunk; the table stays observed."""
        recorder = self._by_relation[relation_id]
        recorder.recording.remove(changes)
        self._sequencer.observe(relation_id, all_rows=recorder.all_rows)

    def keep(self, relation_ids: set[int]) -> None:
        """Observe these tables and those of chunks in progress, and no others."""
        for relation_id, recorder in list(self._by_relation.items()):
            if relation_id not in relation_ids and not recorder.recording:
                del self._by_relation[relation_id]
                self._sequencer.observe_no_more(relation_id)
        for relation_id in relation_ids:
            self._observe(relation_id)

    def _observe(self, relation_id: int) -> ChangeRecorder:
        recorder = self._by_relation.get(relation_id)
        if recorder is None:
            recorder = ChangeRecorder(self._sequencer, relation_id, self._key_changed)
            self._by_relation[relation_id] = recorder
            self._sequencer.observe(relation_id, all_rows=False)
        return recorder


def _filled(message: messages.Update) -> Sequence[messages.Value]:
    """Return the new row; what it leaves out is taken from the old row where that has it."""
    if message.old is None:
        return message.new
    complete = isinstance(message.old, messages.OldTuple)
    return [
        old if value is messages.UNCHANGED and (complete or old is not None) else value
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
