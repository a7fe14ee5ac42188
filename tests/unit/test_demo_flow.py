"""What the demo's view counts, and how it is shown and summed up."""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import orjson
import pytest
from rich.console import Console

from cdc.events import LSN, Frontier
from cdc.log import records
from cdc.log.follower_reports import FollowerRecord
from cdc.playground.demo.flow import WINDOW_SECONDS, Flow, Kill
from cdc.playground.demo.proof import DemoProof
from cdc.playground.demo.stage import DemoOptions, DemoOutcome
from cdc.playground.demo.stores import FollowersProof
from cdc.playground.demo.summary import closing_json, closing_lines
from cdc.playground.demo.tail import Seen
from cdc.playground.demo.view import LineView, Scene, ScreenView, draw, line

NOW = 1_800_000_000.0
HEIGHT = 24
FRONTIERS = "demo.cdc.frontier"


def change(seq: int, committed: float, op: str = "c", table: str = "users") -> Seen:
    source = {"schema": "public", "table": table, "seq": seq}
    value = orjson.dumps({"op": op, "source": source, "ts_us": round(committed * 1e6)})
    return Seen(f"demo.public.{table}", 0, seq, b'{"id":%d}' % seq, value)


def frontier(seq: int, committed: float = 0, holes: int = 0) -> Seen:
    record = records.FrontierRecord(
        pipeline="demo",
        epoch=1,
        lsn=LSN(0x3A4B5C8),
        seq=seq,
        committed_at_us=round(committed * 1e6),
        partitions=(),
        holes=holes,
    )
    return Seen(FRONTIERS, 0, seq, b"{}", records.encode(record))


@pytest.fixture
def flow() -> Flow:
    """A hundred changes in a second, each 20 ms late, one frontier after every tenth."""
    flow = Flow(FRONTIERS)
    for seq in range(1, 101):
        committed = NOW + seq / 100
        flow.take(
            change(seq, committed, "cud"[seq % 3], ("users", "orders")[seq % 2]), committed + 0.02
        )
        if seq % 10 == 0:
            flow.take(frontier(seq), committed + 0.02)
    return flow


def scene(flow: Flow, now: float = NOW + 1.1) -> Scene:
    return Scene(flow, "Lockstep demo", NOW, now, 120, "streaming", 4711, 2)


def rendered(flow: Flow, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(draw(scene(flow), width, HEIGHT))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_changes_are_counted_by_table_and_kind(flow: Flow) -> None:
    assert flow.changes.total == 100
    assert flow.tables["users"].rate.total == flow.tables["orders"].rate.total == 50
    assert sum(table.ops["d"] for table in flow.tables.values()) == 33
    assert flow.frontier is not None
    assert flow.frontier.seq == 100


def test_rates_are_those_of_the_last_seconds(flow: Flow) -> None:
    assert flow.changes.per_second(NOW + 1.1) == 100 / WINDOW_SECONDS
    assert flow.transactions.per_second(NOW + 1.1) == 10 / WINDOW_SECONDS
    assert flow.changes.per_second(NOW + 60) == 0


def test_lateness_is_from_commit_to_arrival(flow: Flow) -> None:
    late = flow.lateness_ms(NOW + 1.1)
    assert late is not None
    assert late == pytest.approx((20, 20), abs=0.1)
    assert flow.overall_lateness_ms() == (20, 20)


def test_a_kill_is_recovered_from_by_what_was_committed_after_it(flow: Flow) -> None:
    kill = Kill("broker", NOW + 2)
    flow.kills.append(kill)
    flow.take(change(101, NOW + 1.9), NOW + 9)
    assert kill.recovered_seconds is None
    flow.take(change(102, NOW + 2.5), NOW + 9.5)
    assert kill.recovered_seconds == 7.5


def test_rows_of_the_snapshot_are_read_and_no_changes() -> None:
    """Existing rows are neither late nor the first change; followers do not lack its holes."""
    flow = Flow(FRONTIERS, ["mirror"])
    for seq in range(1, 4):
        flow.take(change(seq, NOW - 9, "r"), NOW)
    flow.take(frontier(9, holes=6), NOW)
    assert (flow.rows_read, flow.changes.total, flow.first_at) == (3, 0, None)
    assert flow.lateness_ms(NOW) is None
    assert flow.lag(reported(0, NOW))[0] == 3
    assert "3 rows and 0 changes in the log" in line(scene(flow))
    assert "read" in rendered(flow, 110)


def test_tombstones_are_not_changes(flow: Flow) -> None:
    flow.take(Seen("demo.public.users", 0, 999, b"{}", None), NOW)
    assert flow.changes.total == 100


@pytest.mark.parametrize("width", [80, 110, 140])
def test_the_picture_fits_its_terminal_and_shows_what_matters(flow: Flow, width: int) -> None:
    flow.kills.append(Kill("Postgres", NOW + 0.5, 3.2))
    text = rendered(flow, width)
    assert all(len(row) <= width for row in text.splitlines())
    assert len(text.splitlines()) < HEIGHT
    for needed in ("0/3A4B5C8", "20 ms", "streaming", "kill -9 Postgres", "3.2 s", "orders"):
        assert needed in text


def test_a_line_shows_the_same_without_a_terminal(flow: Flow) -> None:
    text = line(scene(flow))
    assert "100 changes in the log" in text
    assert "frontier 0/3A4B5C8" in text
    assert "late 20 ms" in text


def test_lines_wait_for_the_first_change_and_then_come_every_other_second(flow: Flow) -> None:
    console = Console(file=io.StringIO(), width=200)
    with LineView(console) as view:
        view.show(scene(Flow(FRONTIERS)))
        view.show(scene(flow))
        view.show(scene(flow))
    assert isinstance(console.file, io.StringIO)
    assert len(console.file.getvalue().splitlines()) == 1


def test_lines_show_each_kill_and_each_recovery_once(flow: Flow) -> None:
    console = Console(file=io.StringIO(), width=200)
    kill = Kill("broker", NOW + 0.5)
    with LineView(console) as view:
        view.show(scene(flow))
        flow.kills.append(kill)
        view.show(scene(flow))
        view.show(scene(flow))
        kill.recovered_seconds = 6.5
        view.show(scene(flow))
        view.show(scene(flow))
    assert isinstance(console.file, io.StringIO)
    assert [row.strip() for row in console.file.getvalue().splitlines()[1:]] == [
        "0.5 s  kill -9 broker",
        "0.5 s  kill -9 broker: flowing again after 6.5 s",
    ]


def test_lateness_is_unknown_while_nothing_comes(flow: Flow) -> None:
    assert flow.lateness_ms(NOW + 60) is None
    assert "late -" in line(scene(flow, NOW + 60))


def test_a_screen_leaves_the_last_picture(flow: Flow) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with ScreenView(console) as view:
        view.show(scene(flow))
    assert isinstance(console.file, io.StringIO)
    assert "in the log" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def outcome(*findings: str, chaos: bool = False) -> DemoOutcome:
    options = DemoOptions(Path("home"), 60.0, chaos, followers=True, seed=7, rate=300, keep=False)
    last = Frontier(1, LSN(0x3A4B5C8), 18412, 0, ())
    proof = DemoProof(not findings, 8, 5210, 18412, 18412, last, findings)
    kills = [Kill("daemon", NOW, 1.5), Kill("broker", NOW, 7.25), Kill("daemon", NOW, 1.0)]
    return DemoOutcome(options, proof, 60.0, 5.4, (8, 21, 90), kills if chaos else [])


def reported(seq: int, committed: float, **more: object) -> FollowerRecord:
    described: dict[str, object] = {
        "pipeline": "demo",
        "follower": "mirror",
        "store": "delta",
        "generation": 1,
        "state": "following",
        "epoch": 1,
        "lsn": LSN(0x3A4B000),
        "seq": seq,
        "committed_at_us": round(committed * 1e6),
        "place": 1,
        "owner": "here",
        "at_us": round(time.time() * 1e6),
    }
    return msgspec.convert(described | more, FollowerRecord)


def test_followers_are_shown_with_frontier_and_lag(flow: Flow) -> None:
    """Also one that no longer reports, whatever its last report was."""
    flow.take(frontier(100, NOW + 1), NOW + 1)
    silent = reported(100, NOW + 1, follower="cache", store="redis", at_us=0)
    flow.note_followers({"mirror": reported(60, NOW + 0.6), "cache": silent}, NOW + 1)
    shown = rendered(flow, 130)
    assert re.search(r"mirror +delta +following +0/3A4B000 +0.4 s +40 ", shown)
    assert re.search(r"cache +redis +silent +0/3A4B000 +0.0 s +0 ", shown)
    assert "mirror following, lag 40 events" in line(scene(flow))


def test_killed_followers_are_back_when_all_have_applied_a_later_change(flow: Flow) -> None:
    kill = Kill("followers", NOW + 2, followed=True)
    flow.kills.append(kill)
    flow.take(change(101, NOW + 3), NOW + 3)
    both = {"mirror": reported(101, NOW + 3), "cache": reported(100, NOW + 1)}
    flow.note_followers(both, NOW + 4)
    assert kill.recovered_seconds is None
    flow.note_followers(both | {"cache": reported(101, NOW + 3)}, NOW + 5)
    assert kill.recovered_seconds == 3


def test_every_store_has_changes_once_each_has_applied_one(flow: Flow) -> None:
    first = NOW + 1 / 100
    rows_alone = {"mirror": reported(0, first), "cache": reported(0, first - 1)}
    flow.note_followers(rows_alone, NOW + 2)
    assert flow.followed_at is None
    flow.note_followers({"cache": reported(1, first)}, NOW + 3)
    flow.note_followers({"cache": reported(2, first + 1)}, NOW + 4)
    assert flow.followed_at == NOW + 3


def test_the_followers_proof_is_printed_too() -> None:
    equal = FollowersProof(equal=True, lsn=LSN(0x3A4B5C8), rows={"mirror": 5210}, findings=())
    (_, described) = closing_lines(replace(outcome(), followers=equal))
    assert described == "demo: every follower equals the database at 0/3A4B5C8 (rows: mirror 5 210)"
    shown = equal._replace(examples=("totals: customer 7, Ada, has 3 orders of 9.90 in total",))
    started = replace(outcome(), followers=shown, every_store_seconds=31.6)
    assert closing_lines(started)[-2:] == [
        "  totals: customer 7, Ada, has 3 orders of 9.90 in total",
        "demo: changes were in the log 5 s after the start, in every store after 32 s",
    ]
    assert orjson.loads(closing_json(started))["every_store_seconds"] == 31.6
    found = equal._replace(equal=False, findings=("cache: public.users: 1 rows differ",))
    wrong = replace(outcome(), followers=found)
    assert closing_lines(wrong)[-2:] == [
        "demo: the followers are NOT proved equal to the database, 1 findings:",
        "  cache: public.users: 1 rows differ",
    ]
    reported_json = orjson.loads(closing_json(wrong))
    assert reported_json["equal"] is False
    assert reported_json["findings"] == ["cache: public.users: 1 rows differ"]


def test_the_closing_line_shows_the_complete_outcome() -> None:
    complete = outcome()
    assert complete.proof is not None
    not_in_log = ("public.t, 2 of 3 rows (snapshot: direct, straight into Delta Lake)",)
    read = replace(complete, proof=complete.proof._replace(initial=412, not_in_log=not_in_log))
    (described, more) = closing_lines(read)
    assert described.startswith("demo: 412 rows read, 18 000 changes in 60 s, 8 tables,")
    assert more == f"demo: not in the log: {not_in_log[0]}"
    (described,) = closing_lines(complete)
    assert described == (
        "demo: 18 412 changes in 60 s, 8 tables, 5 210 rows: the log equals the database"
        " (frontier 0/3A4B5C8, seq 18412)"
    )


def test_chaos_is_reported_in_one_more_line() -> None:
    lines = closing_lines(outcome(chaos=True))
    assert lines[0] == (
        "chaos: 3 kill -9 (2 daemon, 1 broker), seed 7: nothing lost, twice or out of order;"
        " slowest recovery 7.2 s"
    )
    assert len(lines) == 2


def test_findings_are_printed_one_a_line_and_chaos_claims_nothing() -> None:
    lines = closing_lines(outcome("seq 7 is missing from the log", chaos=True))
    assert "nothing lost" not in lines[0]
    assert "is NOT proved equal" in lines[1]
    assert lines[2] == "  seq 7 is missing from the log"


def test_the_json_outcome_holds_what_programs_ask_for() -> None:
    described = orjson.loads(closing_json(outcome("seq 7 is missing from the log", chaos=True)))
    assert described["equal"] is False
    assert described["findings"] == ["seq 7 is missing from the log"]
    assert described["late"] == {"p50_ms": 8, "p99_ms": 21, "max_ms": 90}
    assert [kill["what"] for kill in described["kills"]] == ["daemon", "broker", "daemon"]


def test_an_outcome_without_a_proof_is_reported() -> None:
    unproven = outcome()
    unproven.proof = None
    assert "without a proof" in closing_lines(unproven)[0]
    assert orjson.loads(closing_json(unproven))["equal"] is None


@pytest.mark.parametrize("width", [80, 160])
def test_events_are_shown_in_seq_order_whatever_partition_came_first(width: int) -> None:
    flow = Flow(FRONTIERS)
    for seq in (9_105, 9_101, 9_104, 9_102, 9_103):
        flow.take(change(seq, NOW + 1), NOW + 1)
    shown = re.findall(r"\b910\d\b(?=\s+insert)", rendered(flow, width))
    assert shown == ["9101", "9102", "9103", "9104", "9105"]
