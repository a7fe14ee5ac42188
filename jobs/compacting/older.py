"""What the fold of a slice looks up in the rest of the past: earlier keys, dead letters, DDL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from cdc.errors import GapError
from cdc.log import names, records
from cdc.log.dead_letters import DeadLetterAssembler
from lockstep.jobs.archiving.rows import key_hash
from lockstep.jobs.compacting.fold import held, remaining
from lockstep.jobs.compacting.frontiers import quoted
from lockstep.jobs.cuts.altered import KEY, alterations
from lockstep.jobs.cuts.reduce import parsed
from lockstep.jobs.cuts.schemas import key_forms, version
from lockstep.sinks.delta import lake

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from cdc.log.dead_letters import Pointer
    from lockstep.jobs.compacting.fold import Held
    from lockstep.jobs.compacting.slices import PastTables
    from lockstep.jobs.cuts.reduce import CutEvent
    from lockstep.sinks.contract import Altered, Version

_AT_ONCE = 10_000


class OlderEvents:
    """Looks up what lies in base and archive."""

    def __init__(self, tables: PastTables) -> None:
        self._tables = tables
        self._prefix = tables.past.prefix
        self._alterations: dict[str, list[Altered]] | None = None
        self._versions: dict[int, Version] | None = None
        self._present: list[Version] = []  # those of rows up to the frontier

    def deleted(self, topic: str, seqs: Collection[int]) -> dict[int, bytes]:
        """Return the key of each delete at these seqs."""
        found: dict[int, bytes] = {}
        listed = sorted(seqs)
        for at in range(0, len(listed), _AT_ONCE):
            named = ", ".join(map(str, listed[at : at + _AT_ONCE]))
            where = f"topic = {quoted(topic)} AND op = 'd' AND seq IN ({named})"
            rows = self._tables.after(where)
            pairs = zip(rows["seq"].to_pylist(), rows["key"].to_pylist(), strict=True)
            found |= {seq: key for seq, key in pairs if key is not None}
        return found

    def events(self, topic: str, keys: Collection[bytes]) -> list[Held]:
        """Return all events of these keys after the last truncate."""
        wanted, hashes = set(keys), sorted({key_hash(key) for key in keys})
        rows = [self._tables.of_keys(topic, hashes)]
        for at in range(0, len(hashes), _AT_ONCE):
            named = ", ".join(map(str, hashes[at : at + _AT_ONCE]))
            where = f"topic = {quoted(topic)} AND key_hash IN ({named})"
            rows.append(self._tables.after(where))
        found = held(remaining(pa.concat_tables(rows), self._tables.past.floors))
        return [each for each in found if each.key in wanted]

    def letter(self, event: CutEvent) -> CutEvent:
        """Return the event of the dead letter that an event points to."""
        assert event.source.dead is not None
        return parsed(self.event(event.source.dead))

    def event(self, pointer: Pointer) -> bytes:
        """Return the event of a dead letter."""
        topic, seq = names.dead_topic(self._prefix), int(pointer.id.rpartition("-")[2])
        where = f"topic = {quoted(topic)} AND seq = {seq}"
        rows = lake.read(self._tables.archive, ["offset", "key", "value"], where)
        letters = DeadLetterAssembler()
        for row in rows.sort_by("offset").to_pylist():
            letters.add(row["key"], row["value"])
        return letters.event(pointer)

    def versions(self, topic: str, schema_ids: Collection[int]) -> tuple[Version, ...]:
        """Return versions of a table, in their order; raise GapError if the archive lacks one."""
        known = self.every_version()
        if missing := set(schema_ids) - known.keys():
            raise GapError(
                f"events of {topic} are of table version {min(missing)}, which is not in the"
                " archive",
                hint="`cdc prove` names what the archive has lost",
            )
        return tuple(known[each] for each in sorted(schema_ids))

    def topics(self) -> set[str]:
        """Return the topics of all tables that have a version at the frontier."""
        self.every_version()
        return {each.topic for each in self._present}

    def newest_version(self, topic: str) -> Version:
        """Return the version that a table has at the frontier."""
        self.every_version()
        return max(
            (each for each in self._present if each.topic == topic),
            key=lambda each: each.schema_id,
        )

    def every_version(self) -> dict[int, Version]:
        """Return all table versions in the archive, by number."""
        if self._versions is None:
            topic = names.schema_topic(self._prefix)
            where = f"topic = {quoted(topic)}"
            rows = lake.read(self._tables.archive, ["offset", "key", "value"], where)
            found = [
                records.decode(records.SchemaRecord, row["value"], topic)
                for row in rows.sort_by("offset").to_pylist()
                if records.is_schema_key(row["key"] or b"") and row["value"]
            ]
            self._versions = {each.schema_id: version(each) for each in found}
            lsn = self._tables.past.lsn
            self._present = [self._versions[r.schema_id] for r in found if r.from_lsn <= lsn]
        return self._versions

    def alterations(self, topic: str) -> Sequence[Altered]:
        """Return what DDL has changed in the table's older rows, in seq order."""
        if self._alterations is None:
            where = (
                f"topic = {quoted(names.messages_topic(self._prefix))} AND op IS NOT NULL"
                f" AND key_hash = {key_hash(KEY)} AND seq <= {self._tables.past.seq}"
            )
            rows = lake.read(self._tables.archive, ["seq", "key", "value"], where).sort_by("seq")
            messages = rows["key"].to_pylist(), rows["value"].to_pylist()
            try:
                self._alterations = alterations(messages, lambda _: True, self.versions)
            except msgspec.MsgspecError as error:
                raise GapError(
                    "the archive has a message about altered tables that can't be read",
                    hint="`cdc prove` names what was altered",
                ) from error
        return self._alterations.get(topic, [])


def uncompacted_topics(versions: Collection[Version]) -> frozenset[str]:
    """Return the topics of tables without a key, or that have had more than one."""
    keys = key_forms(versions)
    return frozenset(topic for topic, its in keys.items() if len(its) > 1 or () in its)
