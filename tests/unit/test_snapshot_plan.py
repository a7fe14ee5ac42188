"""Plans: ranges and their seqs, what to delete of older generations; records; progress. Pure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cdc.config import Config, Log, Snapshot, Source, TableRule
from cdc.errors import ConfigError, RewrittenError
from cdc.events import LSN
from cdc.log import records as log_records
from cdc.log.records import PinnedPublication, SchemaColumn, SchemaRecord
from cdc.operate.doctor.snapshot import check_snapshot
from cdc.operate.facts import SnapshotFacts, SourceFacts
from cdc.operate.findings import Finding, Severity
from cdc.sequence.relations import Relations
from cdc.snapshot.initial.export import waited_for
from cdc.snapshot.initial.handover import direct_topics
from cdc.snapshot.initial.plan import Seqs, cut, keyless, stale_partitions, version
from cdc.snapshot.initial.progress import SnapshotProgress
from cdc.snapshot.initial.records import (
    RangeRecord,
    SnapshotPlan,
    SnapshotState,
    SnapshotTable,
    StalePartition,
)
from cdc.source.described import DescribedTable, Heap, SentColumn
from cdc.source.lookups import SentTable, TableFacts
from cdc.source.server import OpenTransaction, Server
from cdc.source.volumes import Volume
from tests.unit.test_control_doctor import SERVER

CONFIG = Config(
    pipeline="shop",
    source=Source(dsn="postgresql://a@b/c"),
    log=Log(bootstrap_servers="x:1"),
    tables={
        "public.direct": TableRule(snapshot="direct"),
        "public.leaf2": TableRule(snapshot="none"),
        "public.few": TableRule(snapshot_where="n > 1"),
    },
)
PAGE = 8192


def heap(name: str, pages: int, **changed: object) -> Heap:
    fields: dict[str, object] = {
        "oid": 7, "schema": "public", "name": name, "kind": "r", "persistence": "p",
        "access_method": "heap", "filenode": 70, "filenode_now": 70, "bytes": pages * PAGE,
        "rows": pages * 10, "attnums": {"id": 2},
    }  # fmt: skip
    return Heap(**{**fields, **changed})  # type: ignore[arg-type]


def described(name: str, *heaps: Heap, where: str | None = None) -> DescribedTable:
    return DescribedTable(
        oid=7, schema="public", name=name, replica_identity="d",
        columns=(SentColumn("id", 23, -1, True),), types={}, outputs=('"id"',),  # noqa: FBT003
        facts=TableFacts(("id",), {"id": False}), published=SentTable((("id", 23, -1),), where),
        heaps=heaps,
    )  # fmt: skip


def planned(
    *tables: DescribedTable, range_pages: int = 8, first_seq: int = 1
) -> tuple[list[SnapshotTable], int]:
    relations, seqs = Relations("shop", [], 0), Seqs(first_seq)
    found = []
    config = replace(CONFIG, snapshot=Snapshot(range_bytes=PAGE * range_pages))
    for table in tables:
        schema, _ = version(CONFIG, relations, table, LSN(1))
        found += cut(config, table, schema, 3, PAGE, seqs)
    return found, seqs.next


def plan_of(tables: list[SnapshotTable], next_seq: int, tasks: int = 2) -> SnapshotPlan:
    schema = SchemaRecord(
        schema_id=1, relation_id=7, schema="public", table="t", topic="shop.public.t",
        replica_identity="d", from_lsn=LSN(1), key=("id",),
        columns=(
            SchemaColumn(name="id", type_id=23, type="int4", type_modifier=-1, nullable=False),
        ),
    )  # fmt: skip
    return SnapshotPlan(
        pipeline="shop", generation=2, token="t", epoch=1, database="shop",
        publication=PinnedPublication("p", 1, {}), snapshot="0-1", lsn=LSN(0x16E9058),
        taken_at_us=5, tasks=tasks, first_seq=1, next_seq=next_seq, tables=tuple(tables),
        schemas={each.schema_id: schema for each in tables},
    )  # fmt: skip


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=6),
    st.integers(1, 64),
    st.integers(1, 5),
    st.integers(1, 2**40),
)
def test_every_page_is_in_one_range_and_every_seq_in_one_block(
    sizes: list[int], range_pages: int, tasks: int, first_seq: int
) -> None:
    tables, end = planned(
        *(described(f"t{n}", heap(f"t{n}", size)) for n, size in enumerate(sizes)),
        range_pages=range_pages, first_seq=first_seq,
    )  # fmt: skip
    plan = plan_of(tables, end, tasks)
    ranges = list(plan.ranges())
    at = first_seq
    for each in ranges:
        assert each.first_page is not None
        assert each.end_page is not None
        assert each.first_seq == at
        # 291 empty rows fit on a page of 8 kB.
        assert each.capacity == (each.end_page - each.first_page) * 291
        at += each.capacity
    assert at == end
    pages = sum((each.end_page or 0) - (each.first_page or 0) for each in ranges)
    assert pages == sum(sizes)
    shared = [each for task in range(tasks) for each in plan.ranges_of(task)]
    assert sorted((each.table, each.number) for each in shared) == [
        (each.table, each.number) for each in ranges
    ]


def test_a_relation_without_pages_is_one_range_and_choices_are_kept() -> None:
    columnar = heap("col", 3, access_method="columnar")
    tables, _ = planned(
        described("col", columnar),
        described("direct", heap("direct", 0)),
        described("parts", heap("leaf1", 2), heap("leaf2", 2)),
        described("few", heap("few", 1), where="(id < 9)"),
    )
    assert [each.relation for each in tables] == [
        '"public"."col"', '"public"."direct"', '"public"."leaf1"', '"public"."few"',
    ]  # fmt: skip
    assert [(r.first_page, r.capacity) for r in tables[0].ranges(0)] == [(None, 1 << 40)]
    # An empty table's mirror must be emptied too: one range records that the table was empty.
    assert [(each.kind, len(list(each.ranges(0)))) for each in tables[:3]] == [
        ("log", 1), ("direct", 1), ("log", 1),
    ]  # fmt: skip
    assert tables[3].where == "((id < 9)) AND (n > 1)"
    assert direct_topics(plan_of(tables, 1)) == ("shop.public.t",)
    assert direct_topics(plan_of([tables[0], *tables[2:]], 1)) == ()


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"filenode_now": 71}, RewrittenError),
        ({"filenode_now": None}, RewrittenError),
        ({"kind": "f"}, ConfigError),
        ({"persistence": "u"}, ConfigError),
    ],
)
def test_a_table_that_cannot_be_copied_is_refused(
    changed: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"public\.t"):
        planned(described("t", heap("t", 1, **changed)))


def test_of_older_generations_keys_are_deleted_and_keyless_tables_truncated() -> None:
    keyed, bare = plan_of([], 1).schemas, SchemaRecord
    assert not keyed
    versions = [
        bare(schema_id=n, relation_id=n, schema="public", table=t, topic=f"shop.public.{t}",
             replica_identity="d", from_lsn=LSN(1), key=key, columns=())
        for n, t, key in ((1, "a", ("id",)), (2, "b", ()), (3, "c", ()), (4, "c", ("id",)))
    ]  # fmt: skip
    events = {("shop.public.a", 1): 5, ("shop.public.b", 0): 2, ("shop.public.c", 0): 1,
              ("shop.public.a", 0): 0, ("shop.cdc.dead", 0): 3}  # fmt: skip
    assert [each.schema_id for each in keyless(events, versions)] == [2, 4]
    seqs = Seqs(100)
    assert stale_partitions(events, versions, seqs) == [
        StalePartition(schema_id=1, topic="shop.public.a", partition=1, events=5, first_seq=100)
    ]
    assert seqs.next == 105


def test_records_are_exact_both_ways() -> None:
    tables, end = planned(described("t", heap("t", 20)))
    head = log_records.decode(
        SnapshotPlan, log_records.encode(plan_of([], end)), "shop.cdc.snapshot"
    )
    assert head == plan_of([], end)
    done = RangeRecord(
        generation=1, part="gone", table=0, number=3, rows=2, bytes=9,
        ends=(("shop.public.t", 1, 2),), seconds=0.5,
    )  # fmt: skip
    state = SnapshotState(pipeline="shop", stage="running", token="x", next_seq=2**60)
    for record in (*tables, done, state):
        again = log_records.decode(type(record), log_records.encode(record), "shop.cdc.snapshot")
        assert again == record
    with pytest.raises(ConfigError, match="format 2"):
        log_records.decode(SnapshotState, b'{"format": 2}', "shop.cdc.snapshot")


def test_progress_counts_each_range_once_and_estimates_the_time_left() -> None:
    tables, end = planned(described("t", heap("t", 20)))
    plan = plan_of(tables, end)
    progress = SnapshotProgress(plan, 0.0)
    progress.report(0.0)
    done = RangeRecord(generation=2, table=0, number=0, rows=80, bytes=800, ends=(), seconds=1.0)
    progress.reported(0, 0, 40, 400)
    assert progress.report(1.0).rows == 40
    progress.finished(done)
    progress.finished(done)
    progress.reported(0, 0, 80, 800)
    report = progress.report(2.0)
    assert (report.rows, report.bytes, report.percent) == (80, 800, 40.0)
    assert report.rows_per_second == 40
    assert report.seconds_left == pytest.approx(3.0)
    assert "40 %, 80 rows" in report.words()
    progress.restart(
        [RangeRecord(generation=2, table=0, number=n, rows=1, bytes=1, ends=(), seconds=0.0)
         for n in (1, 2)]
    )  # fmt: skip
    assert progress.complete
    assert progress.report(3.0).seconds_left == 0
    # A generation without ranges is complete at once.
    assert SnapshotProgress(plan_of([], 1), 0.0).report(0.0).percent == 100


def test_the_doctor_shows_what_a_snapshot_needs_and_costs() -> None:
    big = Volume("public", "t", 10_000_000, 10 << 30, may_select=True, hidden=False)
    snapshot = SnapshotFacts([big], 1e6, None)
    facts = SourceFacts(SERVER, None, None, [], [], set_up=False, snapshot=snapshot)

    def judge(
        config: Config = CONFIG,
        server: Server = SERVER,
        **changes: Any,  # noqa: ANN401 - fields of a tuple
    ) -> list[Finding]:
        changed = facts._replace(server=server, snapshot=snapshot._replace(**changes))
        return list(check_snapshot(config, changed))

    (cost,) = judge()
    assert cost.severity is Severity.NOTE
    assert "10,000,000 rows, 10.0 GiB, in about 7 min with 2 tasks" in cost.what
    small = SERVER._replace(settings={**SERVER.settings, "max_slot_wal_keep_size": "100"})
    assert judge(server=small)[-1].severity is Severity.WARNING
    idle = SERVER._replace(settings={**SERVER.settings, "idle_replication_slot_timeout": "60"})
    assert "invalidates it after 60 s" in judge(server=idle)[0].what
    full = SERVER._replace(slots_in_use=int(SERVER.settings["max_replication_slots"]) - 1)
    assert "max_replication_slots" in judge(server=full)[0].what
    shut = big._replace(may_select=False, hidden=True)
    shown = [each.fix for each in judge(volumes=[shut])[:2]]
    assert 'GRANT SELECT ON "public"."t"' in shown[0]
    assert "BYPASSRLS" in shown[1]
    old = SERVER._replace(version=150_004, in_recovery=True)
    assert "from 16 on" in judge(standby=old)[0].what
    slow = Snapshot(rows_per_second=1_000)
    paced = Config(pipeline="shop", source=CONFIG.source, log=CONFIG.log, snapshot=slow)
    assert "in about 3 h" in judge(paced)[0].what


def test_the_processes_that_are_waited_for_are_named() -> None:
    shown = waited_for([OpenTransaction(12, None, 61.0), OpenTransaction(None, "x", 3.0)])
    assert shown == "waiting for 2 transactions that write to end; the oldest: pid 12, 61 s"
    assert "prepared 'x'" in waited_for([OpenTransaction(None, "x", 3.0)])
