"""Hand over to the stream: one Kafka transaction that moves the resume record to the snapshot.

It is written with the daemon's own transactional ids, as `cdc.log.resume.write_fenced` does, so
that an older daemon is fenced. From then on the log holds everything up to the consistent point,
with the frontier record that states it, and the daemon streams from there.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from cdc.errors import FencedError, GapError, UnavailableError
from cdc.log import digests, frontiers, names, reader, resume, topics
from cdc.log.completeness import Completeness
from cdc.log.publisher import fence
from cdc.log.records import FrontierRecord, Replacement, ResumePosition
from cdc.snapshot.incremental import topic as incremental_topic
from cdc.snapshot.initial import due, topic

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cdc.config import Config
    from cdc.log.records import ResumeIdentity, SchemaRecord
    from cdc.snapshot.initial.records import SnapshotPlan, SnapshotState, Stage


def write(config: Config, plan: SnapshotPlan, token: str) -> SnapshotState:
    """Commit the hand-over and return the last state. Blocks. Fences: only while it is due.

    Raises FencedError where the snapshot is no longer the one of `token`.
    """
    publisher = fence(config)
    # In this order: where a successor has handed over since, the state read later shows it.
    resumed = reader.read_resume(config)
    known = topic.read(config)
    if resumed is None:
        raise GapError("the resume record is missing", hint="`cdc teardown --topics`, `cdc setup`")
    due.expect_open(resumed)
    state = check_mine(known.state, "running", token)
    now_us = time.time_ns() // 1_000
    schema_topic = reader.read_schema_topic(config)
    versions = schema_topic.versions()
    position = resume.forward(resumed[1], _position(plan, known, resumed[1], versions))
    publisher.add(*resume.record(config, _identity(config, plan, resumed[0])))
    frontier = _frontier(config, plan, known, resumed[1], position, schema_topic.since(0))
    position = replace(position, chain=frontier.chain, schemas_end=schema_topic.end)
    publisher.add(*resume.record(config, position))
    publisher.add(*frontiers.record(config, frontier))
    mine = [each for each in known.ranges if each.generation == plan.generation]
    rows = [each for each in mine if each.part == "rows"]
    done = replace(
        state,
        stage="done",
        next_seq=plan.next_seq,
        rows=sum(each.rows for each in rows),
        bytes=sum(each.bytes for each in rows),
        seconds=max(0.0, (now_us - plan.taken_at_us) / 1e6),
        at_us=now_us,
        direct=direct_topics(plan),
    )
    publisher.add(*topic.state_record(config, done))
    for each in _replacements(plan, versions, now_us):
        publisher.add(*incremental_topic.replacement_record(config, each))
    for incremental in incremental_topic.read(config):
        if incremental.left_empty:  # the topic is full again
            filled = replace(incremental, emptied_under=0)
            publisher.add(*incremental_topic.incremental_record(config, filled))
    for key in known.keys:  # what is not needed once the snapshot is done
        publisher.add(names.snapshot_topic(config.prefix), key, None)
    publisher.commit()
    return done


def _replacements(
    plan: SnapshotPlan, versions: list[SchemaRecord], now_us: int
) -> Iterator[Replacement]:
    """Yield what the snapshot has replaced of tables that were renamed or recreated meanwhile.

    Of older generations it has deleted every row that is not in this one.
    """
    for name in Completeness(versions).incomplete_names:
        yield Replacement(
            pipeline=plan.pipeline,
            schema=name[0],
            table=name[1],
            schema_id=versions[-1].schema_id,
            snapshot=f"initial {plan.generation}",
            at_us=now_us,
        )


def direct_topics(plan: SnapshotPlan) -> tuple[str, ...]:
    """Return the topics of the tables that a plan copies directly into their store."""
    direct = (each for each in plan.tables if each.kind == "direct")
    return tuple(sorted({plan.schemas[each.schema_id].topic for each in direct}))


def check_mine(state: SnapshotState | None, stage: Stage, token: str) -> SnapshotState:
    """Return the state; raise FencedError where `token` did not write it."""
    if state is None or (state.stage, state.token) != (stage, token):
        raise FencedError(
            "another process has taken over the initial snapshot",
            hint="this one starts over and finds what there is to do",
        )
    return state


def _identity(config: Config, plan: SnapshotPlan, identity: ResumeIdentity) -> ResumeIdentity:
    """Return the identity with the plan's topics pinned, and the publication as it was then."""
    counts = {plan.schemas[t.schema_id].topic: t.partitions for t in plan.tables}
    new = sorted(counts.keys() - identity.partitions.keys())
    found = topics.describe(topics.admin(config), new)
    if lacking := set(new) - found.keys():
        raise UnavailableError(
            f"the brokers do not show topic {min(lacking)}, which the snapshot writes to",
            hint="the daemon asks again; see that all brokers run",
        )
    return replace(
        identity,
        snapshot="done",
        publication=plan.publication,
        partitions=identity.partitions | {name: each.partitions for name, each in found.items()},
        topic_ids=identity.topic_ids | {name: each.topic_id for name, each in found.items()},
    )


def _position(
    plan: SnapshotPlan,
    known: topic.InitialLog,
    before: ResumePosition,
    versions: list[SchemaRecord],
) -> ResumePosition:
    return ResumePosition(
        end_lsn=plan.lsn,
        commit_lsn=plan.lsn,
        ordinal=0,
        open=False,
        seq=max(before.seq, newest_seq(plan, known)),
        committed_at_us=plan.taken_at_us,
        schema_id=max((each.schema_id for each in versions), default=0),
        owner=f"{socket.gethostname()}:{os.getpid()}:snapshot",
        at_us=time.time_ns() // 1_000,
    )


def _frontier(
    config: Config,
    plan: SnapshotPlan,
    known: topic.InitialLog,
    before: ResumePosition,
    position: ResumePosition,
    schemas: Iterable[tuple[bytes, bytes | None]],
) -> FrontierRecord:
    """Return the frontier of the consistent point; its events are all committed by now.

    The producers' records of the ranges are mixed in the partitions: a record's seq shows its
    range, and each range's Kafka transaction has a digest of its own.
    """
    events = dict(sorted(known.events.items()))
    hashed = known.digests
    ends = reader.written_ends(config, list(events))
    frontier = FrontierRecord(
        pipeline=config.pipeline,
        epoch=plan.epoch,
        lsn=plan.lsn,
        seq=position.seq,
        committed_at_us=plan.taken_at_us,
        partitions=tuple((*place, ends[place], count) for place, count in events.items()),
        holes=position.seq - before.seq - sum(events.values()),
        blocks=() if hashed is None else known.blocks,
        digests=None if hashed is None else tuple(hashed[place] for place in events),
        schemas=tuple(digests.stated(key, value) for key, value in schemas),
    )
    return digests.sealed(frontier, before.chain)


def newest_seq(plan: SnapshotPlan, known: topic.InitialLog) -> int:
    """Return the newest seq that any event of the plan has; 0 where there is none.

    Of a table that was copied directly into its store, the last seq that a row may have there.
    """
    first = {("rows", each.table, each.number): each.first_seq for each in plan.ranges()}
    direct = (each for each in plan.ranges() if plan.tables[each.table].kind == "direct")
    newest = [0, *(each.first_seq + each.capacity - 1 for each in direct)]
    deleted = [0] * len(plan.stale)
    for at, record in known.done(plan).items():
        if record.part == "rows" and record.rows:
            newest.append(first[at] + record.rows - 1)
        elif record.part == "truncate":
            newest.append(plan.first_seq + record.table)
        elif record.part == "gone":
            deleted[record.table] += record.rows
    newest += [g.first_seq + n - 1 for g, n in zip(plan.stale, deleted, strict=True) if n]
    return max(newest)
