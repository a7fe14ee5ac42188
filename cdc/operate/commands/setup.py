"""Set up and tear down a pipeline: the steps of `cdc setup` and `cdc teardown`.

Setup may be repeated: each step creates what is missing and leaves the rest. The order makes a stop
between any two steps harmless: publication, topics, slot, then at once the first resume record,
which states that the log starts at the slot's consistent point. A slot without that record, or a
record without its slot, is an error: either may hide changes that were never read.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cdc.errors import CDCError, ConfigError, GapError, UnavailableError
from cdc.events import LSN
from cdc.log import absence, column_numbers, reader, resume, topics
from cdc.log import inspection as log_inspection
from cdc.log.client import reach
from cdc.log.records import ResumeIdentity, ResumePosition
from cdc.operate import start_checks as readiness
from cdc.operate.commands import migrations, setup_publication
from cdc.operate.commands.setup_columns import HiddenColumns
from cdc.operate.commands.steps import Did, Step
from cdc.operate.doctor import continuity as doctor_meeting
from cdc.operate.doctor import requirements
from cdc.operate.doctor.failover import FAILOVER_MAJOR
from cdc.operate.findings import listed, size
from cdc.publication import continuity
from cdc.publication import diff as publication
from cdc.publication.plan import has_topic
from cdc.snapshot.initial import topic
from cdc.snapshot.initial.records import SnapshotState
from cdc.source import catalog, membership
from cdc.source import server as inspection
from cdc.source import setup as source_setup
from cdc.source.connection import connect

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    import psycopg
    from confluent_kafka.admin import AdminClient

    from cdc.config import Config
    from cdc.log.resume import Resume
    from cdc.publication.plan import Plan
    from cdc.snapshot.initial.topic import Record


# --- setting up ---


class _Ready(NamedTuple):
    """What the steps use, once all checks have passed."""

    server: inspection.Server
    tables: list[inspection.Table]
    wanted: Plan
    state: membership.State | None  # the publication, where there is one
    slot: inspection.Slot | None
    record: tuple[ResumeIdentity, ResumePosition] | None
    hidden: HiddenColumns


def set_up(config: Config, *, adopt_slot: bool = False) -> Iterator[Step]:
    """Create what is missing, reporting each step. Raises what prevents it, with its fix.

    Everything is checked before anything is created; what a failed first setup created is removed
    again.
    """
    client = topics.admin(config)
    with connect(config) as connection, ExitStack() as undo:
        ready = _checked(connection, config, client, adopt_slot=adopt_slot)
        record, slot, tables = ready.record, ready.slot, ready.tables
        hidden = ready.hidden
        if record is not None and slot is not None:
            record = yield from _membership(connection, config, slot, record, tables)
        yield from migrations.set_up(config)
        if record is not None:
            # Before a table is published: the daemon may receive its first row at once.
            yield from hidden.write()
        state = membership.state(connection, config.publication)
        yield from setup_publication.publish(connection, config, ready.wanted, state, record)
        if state is None:
            undo.callback(_unpublish, connection, config)
        yield from _identities(tables)
        described: dict[str, topics.Described] = {}
        yield from _topics(client, config, tables, described, undo, new=record is None)
        hidden.look()  # with what the publication sends from here on
        if record is not None:
            yield from hidden.write()
            yield Step(Did.LEFT, f"the log goes on from {record[1].end_lsn}, seq {record[1].seq}")
            yield from _rows_since(connection, tables, record[0])
        else:
            yield from _begin(connection, config, ready, described, undo)
            yield from _rows(config, connection, tables)


# The error that caused the undoing reports what failed, so undoing is silent. Where a slot or a
# resume record exists by then, another setup has succeeded meanwhile and owns what exists.


def _drop(connection: psycopg.Connection, config: Config) -> None:
    with suppress(CDCError):
        source_setup.drop_slot(connection, config.slot)


def _unpublish(connection: psycopg.Connection, config: Config) -> None:
    with suppress(CDCError):
        if inspection.slot(connection, config.slot) is None:
            source_setup.drop_publication(connection, config.publication)


def _delete(client: AdminClient, config: Config, names: list[str]) -> None:
    with suppress(CDCError), connect(config) as connection:
        alone = inspection.slot(connection, config.slot) is None
        if alone and reader.read_resume(config) is None:
            topics.delete(client, names)


def _checked(
    connection: psycopg.Connection, config: Config, client: AdminClient, *, adopt_slot: bool
) -> _Ready:
    """Return what the steps use; raise where one of them would fail. Creates nothing."""
    reach(config)
    server = inspection.server(connection)
    tables = source_setup.matched_tables(connection, config)
    wanted = setup_publication.planned(connection, config, server, tables)
    hidden = HiddenColumns(connection, config, tables)
    hidden.look()
    slot = inspection.slot(connection, config.slot)
    hidden.refuse_beside(slot)
    record = reader.read_resume(config)
    _check_meeting(config, server, slot, record, adopt_slot=adopt_slot)
    state = membership.state(connection, config.publication)
    setup_publication.check(connection, config, wanted, state, slot, record)
    if record is not None:
        doctor_meeting.unbroken(config, slot, record)
    facts = readiness.gather(connection, config, set_up=record is not None)
    requirements.refuse(config, readiness.with_snapshot(config, facts))
    if record is None:
        _refuse_used(config, topics.describe(client, [t.name for t in _wanted(config, tables)]))
        brokers = log_inspection.cluster(client).brokers
        if config.log.replication_factor > brokers:
            raise ConfigError(
                f"log.replication_factor is {config.log.replication_factor}, and the cluster has"
                f" {brokers} brokers",
                hint=f"set log.replication_factor to {min(3, brokers)}",
            )
    return _Ready(server, tables, wanted, state, slot, record, hidden)


def _check_meeting(
    config: Config,
    server: inspection.Server,
    slot: inspection.Slot | None,
    record: tuple[ResumeIdentity, ResumePosition] | None,
    *,
    adopt_slot: bool,
) -> None:
    """Raise where slot and log do not match, or one of them is missing."""
    if record is not None and slot is None:
        raise GapError(
            f"the log ends at {record[1].end_lsn}, but the slot {config.slot} is gone, and the "
            "changes since then with it",
            hint="start anew with `cdc teardown --topics`, then `cdc setup`; or keep the old log "
            "and give the new pipeline another log.prefix",
        )
    if slot is None:
        return
    if slot.plugin != source_setup.PLUGIN or slot.database != server.database:
        raise ConfigError(
            f"the slot {slot.name} is somebody else's (plugin {slot.plugin}, database "
            f"{slot.database})",
            hint="give this pipeline another source.slot",
        )
    continuity.one_phase(config, slot)
    if record is None and not adopt_slot:
        raise ConfigError(
            f"the slot {slot.name} exists, but the log has no record of it: which of its changes "
            "were read before is unknown",
            hint="if nobody else uses it, `cdc slot drop`, then `cdc setup`; to begin where it "
            f"stands ({slot.confirmed_flush_lsn}), `cdc setup --adopt-slot`",
        )


def _membership(
    connection: psycopg.Connection,
    config: Config,
    slot: inspection.Slot,
    record: Resume,
    tables: list[inspection.Table],
) -> Generator[Step, None, Resume]:
    """Accept that a table has left the publication for good; refuse to add one back unnoticed.

    Returns the resume record as it is from then on.
    """
    identity, position = record
    old = identity.publication
    if membership.state(connection, config.publication) is None:
        return record
    now, existing = catalog.publication_beside(connection, old.name, old.tables)
    found = publication.gaps(old, now, existing)
    if error := publication.joined([gap for gap in found if not gap.left]):
        raise error
    gone = sorted(set(identity.publication.tables) - set(now.tables))
    running = slot.active_pid is not None
    if not gone or (running and not existing.intersection(gone)):
        return record  # a dropped table may stay in the record
    back = sorted({each.catalog_name for each in tables}.intersection(gone))
    if back:
        raise GapError(
            f"{listed(back)} left the publication {config.publication} while the log went on; "
            "changes made since then are in no stream",
            hint="put it back with `cdc table add`, which reads it anew; or leave it out of "
            "source.tables and run `cdc setup` again to go on without it",
        )
    if running:
        raise ConfigError(
            f"{listed(gone)} left the publication, and a daemon is running",
            hint="stop the daemon, then run `cdc setup` again to go on without it",
        )
    kept = msgspec.structs.replace(identity, publication=now)
    resume.write_fenced(config, kept, position, read=record)
    yield Step(Did.DONE, f"the log goes on without {listed(gone)}")
    return kept, position


def _identities(tables: list[inspection.Table]) -> Iterator[Step]:
    blind = [str(each) for each in tables if not each.identifies_rows]
    if blind:
        yield Step(
            Did.WARN,
            f"{listed(blind)}: without a key, Postgres now refuses UPDATE and DELETE there; "
            "`cdc doctor` has the SQL that mends it",
        )


def _topics(
    client: AdminClient,
    config: Config,
    tables: list[inspection.Table],
    described: dict[str, topics.Described],
    undo: ExitStack,
    *,
    new: bool,
) -> Iterator[Step]:
    """Create what is missing; write the data topics as they are into `described`."""
    own = topics.internal_topics(config)
    data = _wanted(config, tables)[len(own) :]
    names = [topic.name for topic in own + data]
    before = topics.describe(client, names)
    lacking = [name for name in names if name not in before]
    if lacking and (seen := set(lacking) - absence.absent(config, lacking)):
        raise UnavailableError(
            f"the brokers do not agree on whether topic {min(seen)} exists",
            hint="check that all brokers run, then repeat the command",
        )
    if new:
        undo.callback(_delete, client, config, sorted(set(names) - before.keys()))
    missing = [topic for topic in own + data if topic.name not in before]
    actual = dict(before)
    for made in topics.create(client, config, missing):
        actual |= made
        if (so_far := len(actual) - len(before)) < len(missing):
            yield Step(Did.PROGRESS, f"created {so_far:,} of {len(missing):,} topics")
    described.update((topic.name, actual[topic.name]) for topic in data)
    for kind, some in (("own", own), ("data", data)):
        created = [topic.name for topic in some if topic.name not in before]
        if created:
            yield Step(Did.DONE, f"created {len(created)} {kind} topics: {listed(created)}")
        else:
            yield Step(Did.LEFT, f"the {len(some)} {kind} topics exist")
    counts = {name: topic.partitions for name, topic in actual.items()}
    odd = [f"{t.name} ({counts[t.name]})" for t in data if counts[t.name] != t.partitions]
    if odd and new:
        want = config.log.partitions
        yield Step(Did.WARN, f"not {want} partitions, and kept so from here on: {listed(odd)}")


def _refuse_used(config: Config, present: dict[str, topics.Described]) -> None:
    """Raise where a new log would start in topics that already hold records."""
    places = [
        (name, number) for name, topic in present.items() for number in range(topic.partitions)
    ]
    used = sorted({name for (name, _), end in reader.end_offsets(config, places).items() if end})
    if used:
        raise ConfigError(
            f"{listed(used)}: topics that hold records already, but no resume record of the "
            f"pipeline {config.pipeline}",
            hint="give the pipeline a log.prefix of its own, or delete them with "
            "`cdc teardown --topics`",
        )


def _begin(
    connection: psycopg.Connection,
    config: Config,
    ready: _Ready,
    described: dict[str, topics.Described],
    undo: ExitStack,
) -> Iterator[Step]:
    """Create the slot, or use the existing one, and write where the log starts."""
    server, slot, hidden = ready.server, ready.slot, ready.hidden
    if slot is None:
        writing = inspection.holders(connection)
        if writing:
            yield Step(Did.WARN, f"waiting for {len(writing)} open transactions to end")
        failover = config.source.failover is not False and server.major >= FAILOVER_MAJOR
        lsn = source_setup.create_slot(connection, config.slot, failover=failover)
        # It would keep WAL for a pipeline that does not exist; the next attempt creates another.
        undo.callback(_drop, connection, config)
    else:
        assert slot.confirmed_flush_lsn is not None
        lsn = slot.confirmed_flush_lsn
    identity = ResumeIdentity(
        pipeline=config.pipeline,
        epoch=1,
        system_identifier=server.system_identifier,
        timeline=server.timeline,
        database=server.database,
        slot=config.slot,
        publication=catalog.publication(connection, config.publication),
        partitions={name: topic.partitions for name, topic in described.items()},
        topic_ids={name: topic.topic_id for name, topic in described.items()},
        snapshot="none" if config.snapshot.mode == "never" else "due",
    )
    numbers = [column_numbers.record(config, each) for each in hidden.new]
    first = (*_due(config), *numbers)
    resume.write_fenced(config, identity, first_position(lsn), *first, read=None)
    undo.pop_all()  # from here on the pipeline exists
    how = "created the slot" if slot is None else "took over the slot"
    yield Step(Did.DONE, f"{how} {config.slot}; it keeps WAL from now on, also while nobody reads")
    if numbers:
        yield hidden.written()
    yield Step(Did.DONE, f"wrote the first resume record: the log begins at {lsn}")


def _due(config: Config) -> list[Record]:
    """Return the records that make an initial snapshot due, where one is wanted."""
    if config.snapshot.mode == "never":
        return []
    return [topic.state_record(config, SnapshotState(pipeline=config.pipeline, stage="due"))]


def first_position(lsn: LSN) -> ResumePosition:
    """Return the position of an empty log that starts at `lsn`, now.

    A logical message may be the first event; it takes its time from this position.
    """
    now_us = time.time_ns() // 1_000
    return ResumePosition(
        end_lsn=lsn,
        commit_lsn=LSN(0),
        ordinal=0,
        open=False,
        seq=0,
        committed_at_us=now_us,
        schema_id=0,
        owner=f"{socket.gethostname()}:{os.getpid()}:setup",
        at_us=now_us,
    )


def _wanted(config: Config, tables: list[inspection.Table]) -> list[topics.Topic]:
    """Return the topics that the pipeline should have."""
    data = [
        topics.data_topic(config, each.schema, each.name)
        for each in tables
        if has_topic(config, each)
    ]
    return topics.internal_topics(config) + data


def _rows_since(
    connection: psycopg.Connection,
    tables: list[inspection.Table],
    identity: ResumeIdentity,
) -> Iterator[Step]:
    """Report which tables are new to the log and had rows before: no event carries those."""
    new = [each for each in tables if each.catalog_name not in identity.publication.tables]
    filled = [
        str(each)
        for each in new
        if not each.may_select or inspection.count_rows(connection, each)[0]
    ]
    if filled:
        yield Step(
            Did.WARN,
            f"new in the publication: {listed(filled)}; rows that were there before are not in the"
            f" log: `cdc snapshot {' '.join(filled[:8])}` reads them, beside the running daemon",
        )


def _rows(
    config: Config, connection: psycopg.Connection, tables: list[inspection.Table]
) -> Iterator[Step]:
    """Report what happens to the rows that are older than the log."""
    filled, unread = [], []
    for table in tables:
        if not table.may_select:
            unread.append(str(table))
            continue
        count, exact = inspection.count_rows(connection, table)
        if count:
            filled.append(f"{table} ({'' if exact else 'about '}{count:,})")
    if filled and config.snapshot.mode == "initial":
        yield Step(Did.LEFT, f"rows that `cdc run` copies into the log first: {listed(filled)}")
    elif filled:
        yield Step(
            Did.WARN,
            f"rows that were there before the log began are not in it: {listed(filled)}; "
            "a later UPDATE or DELETE of one is",
        )
    if unread:
        stops = config.snapshot.mode == "initial"
        then = ": the initial snapshot takes GRANT SELECT on them" if stops else ""
        yield Step(
            Did.WARN,
            f"may not be read, so unknown whether they hold rows: {listed(unread)}{then}",
        )


# --- tearing down ---


class Remains(NamedTuple):
    """What `tear_down` would remove."""

    slot: inspection.Slot | None
    publication: inspection.Publication | None
    topics: list[str]


def survey(config: Config) -> Remains:
    """Return what exists of the pipeline."""
    with connect(config) as connection:
        slot = inspection.slot(connection, config.slot)
        found = inspection.publication(connection, config.publication)
    return Remains(slot, found, sorted(topics.existing(topics.admin(config), config.prefix)))


def tear_down(config: Config, remains: Remains, *, with_topics: bool) -> Iterator[Step]:
    """Drop slot and publication, and with `with_topics` the log; raise while a daemon streams."""
    with connect(config) as connection:
        if remains.slot is not None:
            source_setup.drop_slot(connection, config.slot)
            kept = size(remains.slot.retained_bytes or 0)
            yield Step(Did.DONE, f"dropped the slot {config.slot}; it released {kept} of WAL")
        else:
            yield Step(Did.LEFT, f"there is no slot {config.slot}")
        if remains.publication is not None:
            source_setup.drop_publication(connection, config.publication)
            yield Step(Did.DONE, f"dropped the publication {config.publication}")
        else:
            yield Step(Did.LEFT, f"there is no publication {config.publication}")
        yield from migrations.tear_down(config, connection)
    if not remains.topics:
        yield Step(Did.LEFT, f"there are no topics {config.prefix}.*")
    elif with_topics:
        topics.delete(topics.admin(config), remains.topics)
        yield Step(Did.DONE, f"deleted {len(remains.topics)} topics: {listed(remains.topics)}")
    else:
        yield Step(
            Did.LEFT,
            f"{len(remains.topics)} topics {config.prefix}.* stay; they can be read, but not be "
            "continued: a new pipeline needs another log.prefix, or --topics",
        )
