"""What the log says of the pipeline: read again and again, it costs what is new."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from cdc.log import names, reader, records
from cdc.log.completeness import Completeness
from cdc.log.newest_records import NewestReader, NewestRecords
from cdc.snapshot.incremental import topic as incremental_topic
from cdc.snapshot.incremental.topic import SnapshotEntry
from cdc.snapshot.initial import due, topic

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.records import FrontierRecord, SchemaRecord
    from cdc.log.resume import Resume
    from cdc.snapshot.incremental.records import IncrementalRecord
    from cdc.snapshot.initial.records import SnapshotState

_NOTHING: Final = NewestRecords("")  # of a topic that does not exist


class LogStatus(NamedTuple):
    """What the log holds; only the snapshot's state where there is no resume record."""

    resume: Resume | None = None
    frontier: FrontierRecord | None = None
    schemas: tuple[SchemaRecord, ...] = ()  # every table version, oldest first
    snapshot: SnapshotState | None = None  # the initial one
    incremental_snapshots: tuple[IncrementalRecord, ...] = ()  # oldest first
    completeness: Completeness = Completeness()


class LogStatusReader:
    """Reads the log's own topics, until `close`; what has not changed is not decoded again."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._newest = NewestReader(config)
        self._decoded_at: tuple[tuple[str, int], ...] = ()
        self._decoded = LogStatus()

    def read(self) -> LogStatus:
        """Return what the log holds now. Blocks.

        Raises UnavailableError if the brokers do not answer, GapError if half of the resume record
        is lost.
        """
        config, found = self._config, self._newest.read()
        resumes, frontiers, schemas, snapshots = (
            found.get(topic, _NOTHING) for topic in self._newest.topics
        )
        resume = reader.resume_in(config, resumes.values)
        if resume is None:  # by another reading, which proves it
            resume = reader.read_resume(config)
        at = tuple((each.topic_id, each.next) for each in (schemas, snapshots))
        if at != self._decoded_at:
            self._decoded, self._decoded_at = self._decode(schemas, snapshots), at
        decoded = self._decoded
        snapshot = decoded.snapshot and due.corrected(decoded.snapshot, resume)
        if resume is None:
            return LogStatus(snapshot=snapshot)
        return decoded._replace(
            resume=resume, snapshot=snapshot, frontier=self._frontier(frontiers)
        )

    def _decode(self, schemas: NewestRecords, snapshots: NewestRecords) -> LogStatus:
        config = self._config
        versions = reader.versions_in(names.schema_topic(config.prefix), schemas.values.items())
        entries = list[SnapshotEntry](incremental_topic.entries_in(config, snapshots.values))
        taken = incremental_topic.log_in(config, entries)
        return LogStatus(
            schemas=tuple(versions),
            snapshot=topic.state_in(config, entries),
            incremental_snapshots=tuple(taken.snapshots),
            completeness=incremental_topic.completeness(versions, taken),
        )

    def _frontier(self, frontiers: NewestRecords) -> FrontierRecord | None:
        value = frontiers.values.get(records.frontier_key(self._config.pipeline))
        topic = names.frontier_topic(self._config.prefix)
        return records.decode(records.FrontierRecord, value, topic) if value else None

    def close(self) -> None:
        """Close the connections."""
        self._newest.close()
