"""Write a large cut's changes to a mirror from many processes, each with some of the keys.

The driver describes the mirror once (`sinks.delta.targets`). A task passes its keys' net changes to
`written`: they go into new files, and the positions of the rows that they replace are found by a
pass over the key columns of the files whose statistics admit one of the keys. A task needs no other
state: it holds `HELD_BYTES` of changes, however many it gets and however large the mirror is.
Positions of one file come from several tasks; `marked` makes one deletion vector of them, or
removes a file without remaining rows. What both return are the actions of one commit, which the
driver makes; until then nothing of it is visible.

Of a history every change is written (`sinks.delta.history_buckets`).

The result is the same as with `sinks.delta.vectors`.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import ConfigError
from lockstep.sinks.delta import actions as delta_actions
from lockstep.sinks.delta import history_buckets, parquet_form, targets
from lockstep.sinks.delta import keys as delta_keys
from lockstep.sinks.delta import work as delta_work
from lockstep.sinks.delta.actions import Files, added_file, removed_file
from lockstep.sinks.delta.layout import EXACT, SEQ
from lockstep.sinks.delta.parts import Parts
from lockstep.sinks.delta.rows import batch, joined, taken
from lockstep.sinks.delta.stats import with_deleted
from lockstep.sinks.delta.targets import (
    Piece,
    ReplacedRows,
    StoredRows,
    at_places,
    only,
    packed,
    unpacked,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from lockstep.sinks.contract import Changes
    from lockstep.sinks.delta.actions import Action
    from lockstep.sinks.delta.columns import ColumnReader
    from lockstep.sinks.delta.rows import ChangeBatch
    from lockstep.sinks.delta.targets import StoredFile, Target


def written(target: Target, changes: Iterable[Changes]) -> Iterator[Piece]:
    """Write changes of some keys; yield the new files and the positions of replaced rows.

    Each key's net change; of a history every change, sorted by key and seq.
    """
    with parts_of(target) as parts:
        writing: _Writing | history_buckets.HistoryWriting = (
            history_buckets.HistoryWriting(target, parts)
            if target.is_history
            else _Writing(target, parts)
        )
        for each in changes:
            yield from writing.add(each)
        yield from writing.flush()
    for file in parts.done:
        yield Piece(target.place, "", file.rows, json.dumps(file.action).encode())


def parts_of(target: Target) -> Parts:
    """Return new files of a mirror, in its form."""
    form = parquet_form.of_history(target.schema) if target.is_history else None
    return Parts(Files(target.uri, target.storage), target.schema, form)


def appended(target: Target, rows: Iterable[pa.Table]) -> Iterator[bytes]:
    """Write rows that replace none, with the mirror's columns; yield the new files' actions."""
    with Parts(Files(target.uri, target.storage), target.schema) as parts:
        for each in rows:
            parts.add_all(each)
    for file in parts.done:
        yield json.dumps(file.action).encode()


def marked(mirrors: Mapping[str, Target], pieces: Iterable[Piece]) -> Iterator[tuple[str, bytes]]:
    """Yield the actions of pieces that are sorted by place and path: place and JSON."""
    for (place, path), group in groupby(pieces, lambda piece: (piece.place, piece.path)):
        if not path:
            yield from ((place, piece.data) for piece in group)
            continue
        mine = mirrors[place]
        for action in _marked(mine, mine.files[path], list(group)):
            yield place, json.dumps(action).encode()


def _marked(target: Target, file: StoredFile, pieces: list[Piece]) -> list[Action]:
    """Return the actions that delete rows of a file, and write those that a truncate ends."""
    positions = unpacked(b"".join(piece.data for piece in pieces))
    added: list[Action] = []
    if target.truncates:
        with parts_of(target) as parts:
            positions = history_buckets.truncated(target, file, positions, parts)
        added = [each.action for each in parts.done]
    if not len(positions):
        return []
    rows = max(piece.rows for piece in pieces) or StoredRows(target).count(file.path)
    deleted = pa.repeat(pa.scalar(value=False), rows)
    if file.deleted is not None:
        deleted = pa.concat_arrays([file.deleted, deleted.slice(len(file.deleted))])
    deleted = pc.or_(deleted, at_places(positions, rows))
    if deleted.true_count == rows:
        return [removed(file), *added]
    (vector,) = delta_actions.put_vectors(Files(target.uri, target.storage), [deleted])
    stats = with_deleted(file.stats, rows)
    add = added_file(file.path, file.bytes, stats, vector=vector.action)
    return [removed(file), add, *added]


def removed(file: StoredFile) -> Action:
    """Return the action that removes a file."""
    return removed_file(file.path, file.bytes, vector=file.vector)


def expect_files(files: Files, actions: Sequence[Action]) -> None:
    """Raise ConfigError unless the files that the actions add are there."""
    for action in actions:
        if add := action.get("add"):
            if vector := add.get("deletionVector"):
                name = UUID(bytes=delta_actions.z85_decoded(vector["pathOrInlineDv"]))
                there = files.size(f"deletion_vector_{name}.bin") is not None
            else:
                there = files.size(add["path"]) == add["size"]
            if not there:
                raise ConfigError(
                    "the driver does not find the files that tasks wrote into a mirror",
                    hint="the driver and all executors must share that file system; or use an"
                    " object store",
                )


class _Writing:
    """One task's work on one mirror."""

    def __init__(self, target: Target, parts: Parts) -> None:
        self._target, self._parts = target, parts
        self._stored = StoredRows(target)
        self._readers: dict[int, ColumnReader] = {}
        self._held: list[ChangeBatch] = []
        self._bytes = 0

    def add(self, changes: Changes) -> Iterator[Piece]:
        """Add changes; those up to the mirror's own seq are in it."""
        new = [change for change in changes.changes if change.seq > self._target.seq]
        if not new:
            return
        found = batch(changes._replace(changes=new), self._target.schema, self._readers)
        self._held.append(found)
        self._bytes += found.rows.nbytes
        if self._bytes >= targets.HELD_BYTES:
            yield from self.flush()

    def flush(self) -> Iterator[Piece]:
        """Write what is held."""
        if not self._held:
            return
        changes = delta_keys.newest(joined(self._held), self._target.key)
        self._held, self._bytes = [], 0
        new = pc.invert(changes.deleted)
        every = list[ReplacedRows]()
        for hits, seqs in self._stored.find(changes.rows, SEQ):
            # Only rows from a direct snapshot or another writer can be newer than a change.
            newer = pc.less(seqs, changes.rows[SEQ].combine_chunks().take(hits.wanted))
            new = pc.and_not(new, at_places(hits.wanted.filter(pc.invert(newer)), len(new)))
            each = only(hits, newer)
            if len(each.positions):
                every.append(each)
                yield Piece(self._target.place, each.path, each.rows, packed(each.positions))
        if changes.unchanged:
            new = pc.and_not(new, self._fill(changes, every))
        self._parts.add_all(changes.rows.filter(new))

    def _fill(self, changes: ChangeBatch, every: list[ReplacedRows]) -> pa.BooleanArray:
        """Write the changes that need values of stored rows; return which they are."""
        names = [*changes.unchanged, EXACT]
        needs = delta_work.any_of(changes.unchanged.values())
        filled = pa.repeat(pa.scalar(value=False), len(needs))
        for hits in every:
            some = only(hits, needs.take(hits.wanted))
            filled = pc.or_(filled, at_places(some.wanted, len(needs)))
            for rows, wanted in self._stored.rows(some, names):
                one = taken(changes, wanted)
                places = pa.arange(0, len(wanted))
                self._parts.add_all(delta_work.merged(one, rows, places).rows)
        return filled
