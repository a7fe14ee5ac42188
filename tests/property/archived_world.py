"""The log of a random world in a real archive, a cut for each run of its frontiers."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cdc.config import Config
from cdc.log import names, records
from cdc.log.records import FrontierRecord
from lockstep.jobs.archiving import layout
from lockstep.jobs.archiving.layout import ArchivePosition, CutRecord, CutSpan
from lockstep.jobs.archiving.rows import CutRows, of_cut_record
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.archiving.writing import ArchiveWriter
from lockstep.jobs.compacting.frontiers import by_topic
from lockstep.sinks.contract import Applied
from tests.property.followed_world import World
from tests.property.stream import PREFIX

Place = tuple[str, int]
FRONTIERS, SCHEMAS = names.frontier_topic(PREFIX), names.schema_topic(PREFIX)


def configured(path: Path, **archive: object) -> Config:
    """Return the configuration of a pipeline whose archive is at a path."""
    plain = {
        "pipeline": "shop",
        "source": {"dsn": "postgresql://x@localhost/x", "tables": ["public.*"]},
        "log": {"bootstrap_servers": "localhost:1", "prefix": PREFIX},
        "archive": {"path": str(path), **archive},
    }
    return msgspec.convert(plain, Config)


class ArchivedWorld:
    """Archives a world step by step, as `jobs.archiving.running` does with Kafka."""

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.archive = opened(config)
        self.position = self.archive.open()
        self._done = 0  # frontiers

    def archive_upto(self, frontiers: int) -> ArchivePosition:
        """Archive the log up to the number of frontiers, as one cut."""
        world, before = self.world, self.position
        ends: dict[Place, int] = dict(before.applied.end_of)
        starts = dict(ends)
        chosen = world.frontiers[self._done : frontiers]
        for frontier in chosen:
            ends.update({(each.topic, each.partition): each.offset for each in frontier.partitions})
        parts: dict[Place, list[tuple[int, bytes | None, bytes | None]]] = {}
        for record in world.records:
            place = record[:2]
            if starts.get(place, 0) <= record.offset < ends.get(place, 0):
                parts.setdefault(place, []).append(record[2:])
        for number, frontier in enumerate(chosen, self._done):
            made = FrontierRecord(
                pipeline="shop",
                epoch=frontier.epoch,
                lsn=frontier.lsn,
                seq=frontier.seq,
                committed_at_us=frontier.committed_at_us,
                partitions=tuple(frontier.partitions),
                holes=frontier.holes,
            )
            parts.setdefault((FRONTIERS, 0), []).append((number, b"", records.encode(made)))
        ends[FRONTIERS, 0] = frontiers
        for at in range(starts.get((SCHEMAS, 0), 0), len(world.versions)):
            version = world.versions[at]
            key = records.schema_key(version.schema_id)
            parts.setdefault((SCHEMAS, 0), []).append((at, key, records.encode(version)))
        ends[SCHEMAS, 0] = len(world.versions)
        self._commit(parts, starts, ends, frontiers)
        return self.position

    def _commit(
        self,
        parts: dict[Place, list[tuple[int, bytes | None, bytes | None]]],
        starts: dict[Place, int],
        ends: dict[Place, int],
        frontiers: int,
    ) -> None:
        before, last = self.position, self.world.frontiers[frontiers - 1]
        number = before.newest.number + 1 if before.newest else 1
        writer, spans = ArchiveWriter(self.archive.files), []
        for place, its in sorted(parts.items()):
            rows = CutRows(PREFIX, number, *place)
            columns = [list(column) for column in zip(*its, strict=True)]
            writer.add(rows.add(*columns))
            root = rows.tree.root().hex()
            start, end = starts.get(place, 0), ends[place]
            spans.append(CutSpan(*place, start, end, rows.events, rows.tree.count, root))
        record = CutRecord(
            pipeline="shop",
            number=number,
            above=before.applied.seq,
            epoch=last.epoch,
            lsn=str(last.lsn),
            seq=last.seq,
            committed_at_us=last.committed_at_us,
            place=frontiers,
            chain="",
            spans=tuple(spans),
            root=layout.root(spans),
            previous=before.digest,
            archived_at_us=0,
        )
        applied = Applied(
            "shop", 1, last.epoch, last.lsn, last.seq, last.committed_at_us, frontiers,
            by_topic(ends),
        )  # fmt: skip
        after = ArchivePosition(applied, record, layout.digest(layout.encode(record)))
        writer.add(of_cut_record(PREFIX, record))
        self.archive.commit(writer.finish(), after, "WRITE")
        self.position, self._done = after, frontiers
