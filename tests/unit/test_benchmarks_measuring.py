"""A figure depends on what reads the clock and the counters, and on what finds the stream's end."""

from __future__ import annotations

import os
import struct
import time
from typing import TYPE_CHECKING

import pytest

from benchmarks import commit_reader, measure, raw_reader
from benchmarks.arrivals import Slow, percentiles, slowest
from benchmarks.contents import row_id
from benchmarks.failure import BenchmarkError

if TYPE_CHECKING:
    from pathlib import Path


def test_cpu_seconds_are_read_past_a_command_with_blanks_and_parentheses() -> None:
    """The program chooses its command's name; a naive split would shift every field."""
    ticks = os.sysconf("SC_CLK_TCK")
    stat = f"42 (a b) c) S {' '.join(['0'] * 10)} {3 * ticks} {2 * ticks} 0 0 0"
    assert measure.parse_cpu_seconds(stat) == 5.0


def test_own_cpu_seconds_grow_with_work() -> None:
    before = measure.cpu_seconds(os.getpid())
    deadline = time.monotonic() + 60
    while measure.cpu_seconds(os.getpid()) == before:
        assert time.monotonic() < deadline
    assert measure.family_cpu_seconds(os.getpid()) >= before


def test_a_processs_cpu_is_shared_out_among_its_threads() -> None:
    threads = measure.thread_cpu_seconds(os.getpid())
    assert threads["loop"] > 0  # this thread, which imported all of this
    assert sum(threads.values()) <= measure.cpu_seconds(os.getpid()) + 0.05


def test_a_process_that_has_ended_has_used_nothing() -> None:
    assert measure.cpu_seconds(2**22 + 1) == 0.0
    assert measure.peak_rss_mb(2**22 + 1) == 0.0


def test_peak_memory_is_the_high_water_mark_in_megabytes() -> None:
    status = "Name:\tx\nVmPeak:\t  999999 kB\nVmHWM:\t  100000 kB\nVmRSS:\t  50000 kB\n"
    assert measure.parse_peak_rss_mb(status) == 102.4
    assert measure.parse_peak_rss_mb("Name:\tzombie\n") == 0.0


def test_a_folders_size_excludes_the_log(tmp_path: Path) -> None:
    (tmp_path / "spool" / "1").mkdir(parents=True)
    (tmp_path / "spool" / "1" / "771").write_bytes(b"x" * 2_000_000)
    (tmp_path / "log").write_bytes(b"x" * 1_000_000)
    assert measure.folder_mb(tmp_path, without="log") == 2.0


def test_foreign_load_is_never_negative() -> None:
    """Counters of machine and processes tick separately; a small surplus of ours is ignored."""
    own = iter([0.0, 1e9])
    foreign = measure.Foreign(lambda: next(own))
    assert foreign.cores() == 0.0


def keepalive(wal_end: int) -> bytes:
    return struct.pack("!cIcQQ?", b"d", 22, b"k", wal_end, 0, False)  # noqa: FBT003 - no reply wanted


def test_a_drain_ends_with_a_keepalive_at_the_end_lsn() -> None:
    assert raw_reader.caught_up(keepalive(100), 100)
    assert raw_reader.caught_up(b"row" + keepalive(101), 100)


def test_a_drain_does_not_end_before_the_end_lsn() -> None:
    assert not raw_reader.caught_up(b"", 100)
    assert not raw_reader.caught_up(keepalive(99), 100)
    assert not raw_reader.caught_up(keepalive(100)[:-1], 100)
    assert not raw_reader.caught_up(keepalive(100) + b"row", 100)


def test_lsns_are_read_as_postgres_writes_them() -> None:
    assert raw_reader.parse_lsn("1/A") == (1 << 32) + 10


def test_the_commit_time_is_in_the_begin_message() -> None:
    begin = struct.pack("!cQQqcQqI", b"w", 1, 2, 3, b"B", 4, 5_000_000, 6)
    assert commit_reader.commit_time_us(begin) == 946_684_805_000_000
    insert = b"w" + begin[1:25] + b"I" + begin[26:]
    assert commit_reader.commit_time_us(insert) is None
    assert commit_reader.commit_time_us(keepalive(1)[5:]) is None


def test_percentiles_are_latencies_that_were_measured() -> None:
    shown = percentiles([float(each) for each in range(1000, 0, -1)])
    assert (shown.events, shown.p50_ms, shown.p99_ms) == (1000, 501.0, 991.0)
    assert (shown.p999_ms, shown.max_ms) == (1000.0, 1000.0)
    assert percentiles([7.0]).p99_ms == 7.0


def test_the_histogram_holds_every_latency_below_its_bound() -> None:
    shown = percentiles([0.5, 9.99, 10.0, 11.0, 999.0, 1000.0, 5000.0])
    assert shown.histogram == {"<1": 1, "<10": 1, "<12": 2, "<1000": 1, ">=1000": 2}


def test_slow_changes_are_listed_by_the_stretch_of_their_commits() -> None:
    """A reader that is away from 1.0 to 1.5 s delays what was committed then, and nothing else."""
    ms = 1_000
    commits = range(7_000 * ms, 10_000 * ms, 10 * ms)
    away = (8_000 * ms, 8_500 * ms)
    pairs = [(at, away[1] if away[0] <= at < away[1] else at + 5 * ms) for at in commits]
    pairs.append((9_995 * ms, 10_995 * ms))
    assert slowest(reversed(pairs), 7_000 * ms, 100.0) == [
        Slow(at_s=1.0, for_s=0.39, changes=40, max_ms=500.0),
        Slow(at_s=3.0, for_s=0.0, changes=1, max_ms=1000.0),
    ]


def test_an_empty_window_has_no_percentiles() -> None:
    with pytest.raises(BenchmarkError, match="no row was committed"):
        percentiles([])


@pytest.mark.parametrize(
    ("key", "number"),
    [(b'{"id":7}', 7), (b'{"id": 12}', 12), (b'{"other":7}', -1), (None, -1), ("text", -1)],
)
def test_the_row_is_identified_by_its_key(key: str | bytes | None, number: int) -> None:
    assert row_id(key) == number
