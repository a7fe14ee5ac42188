"""The spool's edge cases: full disks, missing files, dying processes, many of everything."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from cdc.errors import ConfigError, Policy, SpoolError
from cdc.sequence.spool import Committed, Spool, spool_directory

MB = 1 << 20


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    it = Spool(tmp_path / "spools", memory_bytes=1_000)
    yield it
    it.close()


def on_disk(spool: Spool) -> int:
    return sum(path.stat().st_size for path in spool.folder.iterdir())


def deleted_files(spool: Spool) -> list[int]:
    """Return the sizes of files of the spool that have no name, and that this process has open."""
    sizes = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            name = str(link.readlink())
        except FileNotFoundError:  # that of this listing
            continue
        if name.startswith(str(spool.folder)) and name.endswith(" (deleted)"):
            sizes.append(link.stat().st_size)
    return sizes


def joined(reader: Committed) -> bytes:
    return b"".join(reader)


def test_a_small_transaction_never_reaches_the_disk(spool: Spool) -> None:
    spool.append(7, 7, b"abc")
    spool.append(7, 8, memoryview(b"def"))
    assert (spool.memory_bytes, on_disk(spool), len(spool.open_xids)) == (6, 0, 1)
    assert joined(spool.commit(7)) == b"abcdef"
    assert (spool.memory_bytes, len(spool.open_xids)) == (0, 0)


def test_a_transaction_that_streamed_nothing_is_empty(spool: Spool) -> None:
    assert joined(spool.commit(7)) == b""
    spool.abort(7, 7)
    spool.abort(7, 8)


def test_what_is_not_read_to_its_end_is_given_back_when_dropped(spool: Spool) -> None:
    spool.append(7, 7, bytes(5_000))
    spool.append(7, 7, bytes(5_000))
    reader = spool.commit(7)
    assert list(spool.folder.iterdir()) == []  # it has no name from the start
    assert deleted_files(spool) == [10_000]
    del reader
    gc.collect()
    assert deleted_files(spool) == []


def test_a_reader_outlives_its_spool(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", memory_bytes=0)
    spool.append(7, 7, b"abc")
    spool.append(8, 8, b"def")
    reader = spool.commit(7)
    spool.close()
    assert deleted_files(spool) == [3]
    assert joined(reader) == b"abc"
    assert deleted_files(spool) == []


def test_a_transaction_that_was_cut_back_to_nothing_goes_on(spool: Spool) -> None:
    spool.append(7, 8, bytes(5_000))
    spool.abort(7, 8)
    assert on_disk(spool) == 0
    spool.append(7, 9, b"x" * 5_000)
    assert joined(spool.commit(7)) == b"x" * 5_000
    spool.append(7, 8, bytes(5_000))
    spool.abort(7, 8)
    assert joined(spool.commit(7)) == b""


def test_a_parent_that_writes_after_its_child_takes_it_along(spool: Spool) -> None:
    """Released into its parent, the child is aborted with it, in either order of the reports."""
    for order in ((8, 9), (9, 8)):
        spool.append(7, 7, b"kept")
        spool.append(7, 9, b"child")
        spool.append(7, 8, b"parent")
        for subxid in order:
            spool.abort(7, subxid)
        assert joined(spool.commit(7)) == b"kept"


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_or_broken_disk_is_waited_for(spool: Spool, tmp_path: Path, failure: int) -> None:
    error = OSError(failure, os.strerror(failure))
    with mock.patch("os.pwrite", side_effect=error), pytest.raises(SpoolError) as caught:
        spool.append(7, 7, b"secret" * 1_000)
    assert caught.value.policy is Policy.BACKOFF
    assert "source.spool_dir" in caught.value.hint
    assert str(tmp_path / "spools") in caught.value.hint
    assert "secret" not in str(caught.value)


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """A limit on file size makes the kernel take the same error path."""
    program = f"""
import resource, signal
from pathlib import Path
from cdc.errors import SpoolError
from cdc.sequence.spool import Spool
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
spool = Spool(Path({str(tmp_path / "s")!r}), memory_bytes=0)
try:
    for _ in range(5):
        spool.append(7, 7, bytes(1_000_000))
except SpoolError as error:
    print(error.what)
spool.close()
spool = Spool(Path({str(tmp_path / "s")!r}), memory_bytes=0)
spool.append(7, 7, bytes(1_000_000))
print(sum(map(len, spool.commit(7))))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines == [
        f"spooling a streamed transaction in {tmp_path / 's'}: File too large",
        "1000000",
    ]


def test_a_failed_read_is_no_end(spool: Spool) -> None:
    spool.append(7, 7, bytes(5_000))
    reader = spool.commit(7)
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    with mock.patch("os.pread", side_effect=error), pytest.raises(SpoolError):
        next(reader)


def test_a_file_that_somebody_emptied_or_removed_is_noticed(spool: Spool) -> None:
    spool.append(7, 7, bytes(5_000))
    spool.append(8, 8, bytes(5_000))
    spool.append(9, 9, bytes(5_000))
    os.truncate(spool.folder / "7", 10)
    with pytest.raises(SpoolError, match="ends before"):
        joined(spool.commit(7))
    (spool.folder / "8").unlink()
    (spool.folder / "9").unlink()
    with pytest.raises(SpoolError):
        spool.append(8, 8, bytes(5_000))
    with pytest.raises(SpoolError):
        spool.commit(9)


def test_rows_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        spool = Spool(tmp_path / "s", memory_bytes=0)
        spool.append(7, 7, b"abc")
    finally:
        os.umask(before)
    file = spool.folder / "7"
    assert [p.stat().st_mode & 0o777 for p in (tmp_path / "s", file.parent, file)] == [
        0o700,
        0o700,
        0o600,
    ]
    spool.close()


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="not private"):
        Spool(tmp_path / "s")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="can't be used"):
        Spool(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"can't be used"):
        Spool(tmp_path / "file")


def test_a_full_disk_at_the_start_is_waited_for(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("tempfile.mkdtemp", side_effect=error), pytest.raises(SpoolError):
        Spool(tmp_path / "s")


def test_a_killed_process_leaves_its_files_to_the_next_start_and_a_living_one_keeps_its_own(
    tmp_path: Path,
) -> None:
    program = f"""
import sys
from pathlib import Path
from cdc.sequence.spool import Spool
spool = Spool(Path({str(tmp_path / "s")!r}), memory_bytes=0)
spool.append(7, 7, b"abc")
print(spool.folder, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        theirs = Path(other.stdout.readline().strip())
        first = Spool(tmp_path / "s")
        assert (theirs / "7").read_bytes() == b"abc"
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert (theirs / "7").exists()
        second = Spool(tmp_path / "s")
        assert sorted((tmp_path / "s").iterdir()) == sorted([first.folder, second.folder])
    first.close()
    second.close()
    assert list((tmp_path / "s").iterdir()) == []
    second.close()


def test_thousands_of_interleaved_transactions_need_no_more_descriptors(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spool = Spool(tmp_path / "s", memory_bytes=100_000)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 5, hard))
    try:
        for turn in range(3):
            for xid in range(3, 3_003):
                spool.append(xid, xid, b"%d %d " % (turn, xid) * 10)
        assert spool.memory_bytes <= 100_000
        assert on_disk(spool) > 500_000
        for xid in range(3, 3_003):
            expected = b"".join(b"%d %d " % (turn, xid) * 10 for turn in range(3))
            assert joined(spool.commit(xid)) == expected
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        spool.close()


def test_a_hundred_thousand_subtransactions_cost_little(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", memory_bytes=MB)
    tracemalloc.start()
    try:
        for subxid in range(8, 100_008):
            spool.append(7, subxid, b"0123456789")
        held, _ = tracemalloc.get_traced_memory()
        assert held < 4 * MB
        # Roll back the last half in Postgres' order, oldest first: the first abort drops it all.
        for subxid in range(50_008, 100_008):
            spool.abort(7, subxid)
    finally:
        tracemalloc.stop()
    assert sum(map(len, spool.commit(7))) == 500_000
    spool.close()


def test_a_large_transaction_goes_through_in_bounded_memory(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", memory_bytes=4 * MB)
    run, runs = bytes(300_000), 400
    tracemalloc.start()
    try:
        for _ in range(runs):
            spool.append(7, 7, run)
        total = 0
        for chunk in spool.commit(7):
            total += len(chunk)
            assert MB <= len(chunk) < MB + len(run) or total == runs * len(run)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total == runs * len(run)
    assert peak < 16 * MB
    spool.close()


def test_each_pipeline_has_its_own_spool_directory(tmp_path: Path) -> None:
    assert spool_directory(str(tmp_path), "shop").parent == tmp_path
    assert spool_directory(str(tmp_path), "shop") != spool_directory(str(tmp_path), "crm")
    assert spool_directory(None, "shop").is_absolute()
