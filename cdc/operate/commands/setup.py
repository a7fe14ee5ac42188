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
from cdc.operate import facts, start_checks
from cdc.operate.commands import migrations, setup_publication
from cdc.operate.commands.setup_columns import HiddenColumns
from cdc.operate.commands.steps import CommandStep, Did
from cdc.operate.doctor import requirements
from cdc.operate.doctor.failover import FAILOVER_MAJOR
from cdc.operate.readable import listed, size
from cdc.publication import continuity, diff
from cdc.publication import objects as source_setup
from cdc.snapshot.initial import topic
from cdc.snapshot.initial.records import SnapshotState
from cdc.source.connection import connect
from cdc.source.publications import (
    Publication,
    read_pinned,
    read_pinned_with_tables,
    read_publication,
)
from cdc.source.server import Server, open_transactions, read_server
from cdc.source.slots import Slot, read_slot
from cdc.source.tables import SourceTable, count_rows

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from confluent_kafka.admin import AdminClient

    from cdc.config import Config
    from cdc.log.resume import Resume
    from cdc.publication.plan import Plan
    from cdc.source.connection import Connection


class _Checked(NamedTuple):
    """What the steps use, once all checks have passed."""

    server: Server
    tables: list[SourceTable]
    wanted: Plan
    slot: Slot | None
    record: Resume | None
    hidden: HiddenColumns


def set_up(config: Config, *, adopt_slot: bool = False) -> Iterator[CommandStep]:
    """Create what is missing, reporting each step. Raises what prevents it, with its fix.

    Everything is checked before anything is created; what a failed first setup created is removed
    again.
    """
    client = topics.admin(config)
    with connect(config) as connection, ExitStack() as undo:
        ready = _checked(connection, config, client, adopt_slot=adopt_slot)
        _, tables, wanted, slot, record, hidden = ready
        if record is not None and slot is not None:
            record = yield from _membership(connection, config, slot, record, tables)
        yield from migrations.up(config, facts.enabled_migrations(config))
        if record is not None:
            # Before a table is published: the daemon may receive its first row at once.
            yield from hidden.write()
        state = read_publication(connection, config.publication)
        yield from setup_publication.publish(connection, config, wanted, state, record)
        if state is None:
            undo.callback(_unpublish, connection, config)
        yield from _identities(tables)
        described: dict[str, topics.Described] = {}
        yield from _topics(client, config, tables, described, undo, new=record is None)
        hidden.read_numbers()  # with what the publication sends from here on
        if record is not None:
            yield from hidden.write()
            yield CommandStep(
                Did.LEFT, f"the log continues from {record[1].end_lsn}, seq {record[1].seq}"
            )
            yield from _rows_since(connection, tables, record[0])
        else:
            yield from _start_log(connection, config, ready, described, undo)
            yield from _rows(config, connection, tables)


# The error that caused the undoing reports what failed, so undoing is silent. Where a slot or a
# resume record exists by then, another setup has succeeded meanwhile and owns what exists.


def _drop(connection: Connection, config: Config) -> None:
    with suppress(CDCError):
        source_setup.drop_slot(connection, config.slot)


def _unpublish(connection: Connection, config: Config) -> None:
    with suppress(CDCError):
        if read_slot(connection, config.slot) is None:
            source_setup.drop_publication(connection, config.publication)


def _delete(client: AdminClient, config: Config, names: list[str]) -> None:
    with suppress(CDCError), connect(config) as connection:
        alone = read_slot(connection, config.slot) is None
        if alone and reader.read_resume(config) is None:
            topics.delete(client, names)


def _checked(
    connection: Connection, config: Config, client: AdminClient, *, adopt_slot: bool
) -> _Checked:
    """Return what the steps use; raise where one of them would fail. Creates nothing."""
    reach(config)
    source = facts.source_facts(connection, config)
    tables = source_setup.matched_tables(config, source.tables)
    server, slot = source.server, source.slot
    published = facts.tables_facts(connection, config, server, tables, source.publication)
    wanted, state = published.wanted, published.state
    setup_publication.refuse_problems(wanted)
    record = reader.read_resume(config)
    # A log that has not started has none: with records in its topics it is refused below.
    numbers = reader.read_column_numbers(config) if record is not None else []
    hidden = HiddenColumns(connection, config, tables, numbers)
    hidden.read_numbers()
    hidden.refuse_new_masks(slot)
    _check_slot_and_log(config, server, slot, record, adopt_slot=adopt_slot)
    setup_publication.check(config, wanted, state, slot, record)
    if record is not None:
        start_checks.refuse_gaps(config, slot, record)
    refused = facts.publication_refusal(connection, config, published)
    source = source._replace(
        set_up=record is not None,
        able=source.able._replace(publication=refused),
        snapshot=facts.snapshot_facts(connection, config, tables, started=record is not None),
    )
    requirements.refuse(config, source)
    if record is None:
        _refuse_used(
            config, topics.describe(client, [t.name for t in facts.wanted_topics(config, tables)])
        )
        brokers = log_inspection.cluster(client).brokers
        if config.log.replication_factor > brokers:
            raise ConfigError(
                f"log.replication_factor is {config.log.replication_factor}, and the cluster has"
                f" {brokers} brokers",
                hint=f"set log.replication_factor to {min(3, brokers)}",
            )
    return _Checked(server, tables, wanted, slot, record, hidden)


def _check_slot_and_log(
    config: Config,
    server: Server,
    slot: Slot | None,
    record: Resume | None,
    *,
    adopt_slot: bool,
) -> None:
    """Raise where slot and log do not match, or one of them is missing."""
    if record is not None:
        # First: the slot of a log that comes from elsewhere is not missing, it is there.
        continuity.require_same_database(record[0], server.system_identifier, server.database)
    if record is not None and slot is None:
        raise GapError(
            f"the log ends at {record[1].end_lsn}, but the slot {config.slot} is missing: "
            "the changes since then are lost",
            hint="start over with `cdc teardown --topics`, then `cdc setup`; or keep the old log "
            "and give the new pipeline another log.prefix",
        )
    if slot is None:
        return
    if slot.is_foreign(server.database):
        raise ConfigError(
            f"the slot {slot.name} belongs to something else (plugin {slot.plugin}, database "
            f"{slot.database})",
            hint="give this pipeline another source.slot",
        )
    continuity.require_one_phase(config, slot)
    if record is None and not adopt_slot:
        raise ConfigError(
            f"the slot {slot.name} exists, but the log has no record of it: which of its changes "
            "were read before is unknown",
            hint="if nothing else uses it, `cdc slot drop`, then `cdc setup`; to start at its "
            f"position ({slot.confirmed_flush_lsn}), `cdc setup --adopt-slot`",
        )


def _membership(
    connection: Connection,
    config: Config,
    slot: Slot,
    record: Resume,
    tables: list[SourceTable],
) -> Generator[CommandStep, None, Resume]:
    """Accept that a table has left the publication for good; refuse to add one back unnoticed.

    Returns the resume record as it is from then on.
    """
    identity, position = record
    old = identity.publication
    if read_publication(connection, config.publication) is None:
        return record
    now, existing = read_pinned_with_tables(connection, old.name, old)
    found = diff.gaps(old, now, existing)
    if error := diff.combined_error([gap for gap in found if not gap.is_removal]):
        raise error
    removed = diff.unpublished(old, now)
    running = slot.active_pid is not None
    if not removed or (running and not existing.intersection(removed)):
        return record  # a dropped table may stay in the record
    back = sorted({each.catalog_name for each in tables}.intersection(removed))
    if back:
        raise GapError(
            f"{listed(back)} left the publication {config.publication} while the log continued; "
            "changes since then are in no stream",
            hint="put it back with `cdc table add`, which reads it again; or leave it out of "
            "source.tables and run `cdc setup` again to continue without it",
        )
    if running:
        raise ConfigError(
            f"{listed(removed)} left the publication, and a daemon is running",
            hint="stop the daemon, then run `cdc setup` again to continue without it",
        )
    kept = msgspec.structs.replace(identity, publication=now)
    resume.write_fenced(config, kept, position, read=record)
    yield CommandStep(Did.DONE, f"the log continues without {listed(removed)}")
    return kept, position


def _identities(tables: list[SourceTable]) -> Iterator[CommandStep]:
    blind = [str(each) for each in tables if not each.identifies_rows]
    if blind:
        yield CommandStep(
            Did.WARN,
            f"{listed(blind)}: without a key, Postgres now refuses UPDATE and DELETE there; "
            "`cdc doctor` has the SQL that fixes it",
        )


def _topics(
    client: AdminClient,
    config: Config,
    tables: list[SourceTable],
    described: dict[str, topics.Described],
    undo: ExitStack,
    *,
    new: bool,
) -> Iterator[CommandStep]:
    """Create what is missing; write the data topics as they are into `described`."""
    own = topics.internal_topics(config)
    data = facts.wanted_topics(config, tables)[len(own) :]
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
            yield CommandStep(Did.PROGRESS, f"created {so_far:,} of {len(missing):,} topics")
    described.update((topic.name, actual[topic.name]) for topic in data)
    for kind, some in (("own", own), ("data", data)):
        created = [topic.name for topic in some if topic.name not in before]
        if created:
            yield CommandStep(Did.DONE, f"created {len(created)} {kind} topics: {listed(created)}")
        else:
            yield CommandStep(Did.LEFT, f"the {len(some)} {kind} topics exist")
    counts = {name: topic.partitions for name, topic in actual.items()}
    odd = [f"{t.name} ({counts[t.name]})" for t in data if counts[t.name] != t.partitions]
    if odd and new:
        want = config.log.partitions
        yield CommandStep(
            Did.WARN, f"not {want} partitions, and kept so from here on: {listed(odd)}"
        )


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


def _start_log(
    connection: Connection,
    config: Config,
    ready: _Checked,
    described: dict[str, topics.Described],
    undo: ExitStack,
) -> Iterator[CommandStep]:
    """Create the slot, or use the existing one, and write where the log starts."""
    server, slot, hidden = ready.server, ready.slot, ready.hidden
    if slot is None:
        writing = open_transactions(connection)
        if writing:
            yield CommandStep(Did.WARN, f"waiting for {len(writing)} open transactions to end")
        failover = config.source.failover is not False and server.major >= FAILOVER_MAJOR
        lsn = source_setup.create_slot(connection, config.slot, failover=failover)
        # It would keep WAL for a pipeline that does not exist; the next attempt creates another.
        undo.callback(_drop, connection, config)
    else:
        assert slot.confirmed_flush_lsn is not None
        lsn = slot.confirmed_flush_lsn
    due = config.snapshot.mode != "never"
    identity = ResumeIdentity(
        pipeline=config.pipeline,
        epoch=1,
        system_identifier=server.system_identifier,
        timeline=server.timeline,
        database=server.database,
        slot=config.slot,
        publication=read_pinned(connection, config.publication),
        partitions={name: topic.partitions for name, topic in described.items()},
        topic_ids={name: topic.topic_id for name, topic in described.items()},
        snapshot="due" if due else "none",
    )
    numbers = [column_numbers.record(config, each) for each in hidden.new]
    state = SnapshotState(pipeline=config.pipeline, stage="due")
    first = [topic.state_record(config, state)] if due else []
    resume.write_fenced(config, identity, first_position(lsn), *first, *numbers, read=None)
    undo.pop_all()  # from here on the pipeline exists
    how = "created the slot" if slot is None else "took over the slot"
    yield CommandStep(
        Did.DONE, f"{how} {config.slot}; it keeps WAL from now on, also while no daemon reads"
    )
    if numbers:
        yield hidden.written()
    yield CommandStep(Did.DONE, f"wrote the first resume record: the log starts at {lsn}")


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


def _rows_since(
    connection: Connection,
    tables: list[SourceTable],
    identity: ResumeIdentity,
) -> Iterator[CommandStep]:
    """Report which tables are new to the log and had rows before: no event carries those."""
    new = [each for each in tables if each.catalog_name not in identity.publication.tables]
    filled = [str(each) for each in new if not each.may_select or count_rows(connection, each)[0]]
    if filled:
        yield CommandStep(
            Did.WARN,
            f"new in the publication: {listed(filled)}; rows that were there before are not in the"
            f" log: `cdc snapshot {' '.join(filled[:8])}` reads them while the daemon runs",
        )


def _rows(
    config: Config, connection: Connection, tables: list[SourceTable]
) -> Iterator[CommandStep]:
    """Report what happens to the rows that are older than the log."""
    filled, unread = [], []
    for table in tables:
        if not table.may_select:
            unread.append(str(table))
            continue
        count, exact = count_rows(connection, table)
        if count:
            filled.append(f"{table} ({'' if exact else 'about '}{count:,})")
    if filled and config.snapshot.mode == "initial":
        yield CommandStep(
            Did.LEFT, f"rows that `cdc run` copies into the log first: {listed(filled)}"
        )
    elif filled:
        yield CommandStep(
            Did.WARN,
            f"rows that were there before the log began are not in it: {listed(filled)}; "
            "a later UPDATE or DELETE of one is",
        )
    if unread:
        stops = config.snapshot.mode == "initial"
        then = ": the initial snapshot needs GRANT SELECT on them" if stops else ""
        yield CommandStep(
            Did.WARN,
            f"may not be read, so it is unknown whether they hold rows: {listed(unread)}{then}",
        )


# --- tearing down ---


class Remains(NamedTuple):
    """What `tear_down` would remove."""

    server: Server
    slot: Slot | None
    publication: Publication | None
    topics: list[str]

    @property
    def own_slot(self) -> Slot | None:
        """The slot, unless it is something else's with the same name: names are the cluster's."""
        is_own = self.slot is not None and not self.slot.is_foreign(self.server.database)
        return self.slot if is_own else None

    def expect_own_log(self, config: Config) -> None:
        """Raise if the log comes from another database than the source, or from another slot."""
        record = reader.read_resume(config) if self.topics else None
        if record is not None:
            server = self.server
            continuity.require_same_writer(config, record[0])
            continuity.require_same_database(record[0], server.system_identifier, server.database)


def survey(config: Config) -> Remains:
    with connect(config) as connection:
        server = read_server(connection)
        slot = read_slot(connection, config.slot)
        found = read_publication(connection, config.publication)
    there = sorted(topics.existing(topics.admin(config), config.prefix))
    return Remains(server, slot, found, there)


def tear_down(
    config: Config, remains: Remains, *, with_topics: bool, other_source: bool = False
) -> Iterator[CommandStep]:
    """Drop slot and publication, and with `with_topics` the log; raise while a daemon streams.

    Neither is dropped if either cannot be. What has the slot's name and is something else's stays.
    Nothing is dropped if the log comes from another database, unless `other_source` says so.
    """
    if with_topics and not other_source:
        remains.expect_own_log(config)
    slot, publication = remains.own_slot, remains.publication
    with connect(config) as connection:
        with connection.transaction():
            if publication is not None:
                source_setup.drop_publication(connection, config.publication)
            if slot is not None:
                source_setup.drop_slot(connection, config.slot)
        if slot is not None:
            kept = size(slot.retained_bytes or 0)
            yield CommandStep(
                Did.DONE, f"dropped the slot {config.slot}; it released {kept} of WAL"
            )
        elif remains.slot is not None:
            other = f"plugin {remains.slot.plugin}, database {remains.slot.database}"
            yield CommandStep(Did.LEFT, f"the slot {config.slot} is something else's ({other})")
        else:
            yield CommandStep(Did.LEFT, f"there is no slot {config.slot}")
        if publication is not None:
            yield CommandStep(Did.DONE, f"dropped the publication {config.publication}")
        else:
            yield CommandStep(Did.LEFT, f"there is no publication {config.publication}")
        yield from migrations.tear_down(config, connection)
    if not remains.topics:
        yield CommandStep(Did.LEFT, f"there are no topics {config.prefix}.*")
    elif with_topics:
        topics.delete(topics.admin(config), remains.topics)
        yield CommandStep(
            Did.DONE, f"deleted {len(remains.topics)} topics: {listed(remains.topics)}"
        )
    else:
        yield CommandStep(
            Did.LEFT,
            f"{len(remains.topics)} topics {config.prefix}.* are kept; they can be read, but not "
            "continued: a new pipeline needs another log.prefix, or --topics",
        )
