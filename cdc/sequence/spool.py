"""Hold what open transactions have streamed until Postgres reports their end.

With `streaming`, the walsender sends large transactions piece by piece before they commit, several
of them interleaved. The spool keeps each one's bytes in order, in memory while all of them together
are small and in one file per transaction beyond that, and returns them at the commit. Nothing here
outlives the session: after a crash Postgres streams every open transaction from its beginning.

Subtransactions nest, so everything written between a subtransaction's first byte and its abort is
its own or its children's: an abort truncates the transaction to that byte, as Postgres' own apply
worker does. When a (sub)transaction writes again after its children, they can no longer be aborted
without it; an xid is never older than its parent's. So first bytes and xids ascend together, and
two arrays are enough, of the subtransactions that may still be aborted alone.

Files are private to one process: a directory of its own inside `directory`, locked while the
process lives, so that the next spool there removes what a killed process left, and nothing else.
They are opened for each write and once for reading, so that no number of transactions runs out of
file descriptors.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from array import array
from bisect import bisect_left
from collections import deque
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cdc.errors import ConfigError, SpoolError

if TYPE_CHECKING:
    from collections.abc import Iterator

# What all open transactions together may keep in memory; the walsender's own pieces are
# logical_decoding_work_mem large, 64 MB by default, so this only keeps small ones off the disk.
MEMORY_BYTES: Final = 16 << 20
# The size of a chunk, rounded up to where an append ended.
CHUNK_BYTES: Final = 1 << 20

# Not configuration errors: space and descriptors become free again, a disk is replaced.
_PASSING: Final = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE}

# What is read at once: a chunk of many rows, or a piece of a huge one.
_READ_BYTES: Final = 2 << 20

_XID_MASK: Final = 0xFFFFFFFF


class _Transaction:
    """One open transaction's bytes: `written` of them in the file, the rest in `buffer`."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.written = 0
        self.has_file = False
        # Where chunks may end: no message is split, and one mark per chunk costs next to nothing.
        self.marks = array("Q")
        # The subtransactions that may still be aborted alone, as distances from the transaction's
        # xid (which wrap as xids do), and where each one's bytes start.
        self.xids = array("I")
        self.begins = array("Q")

    @property
    def size(self) -> int:
        return self.written + len(self.buffer)

    def enter(self, distance: int) -> None:
        """Note that the subtransaction at `distance` writes next."""
        xids, begin = self.xids, self.size
        while xids and xids[-1] > distance:
            xids.pop()
            begin = self.begins.pop()
        if distance and not (xids and xids[-1] == distance):
            xids.append(distance)
            self.begins.append(begin)

    def leave(self, distance: int) -> int | None:
        """Forget the subtransaction and what followed; return its first byte, None if none."""
        index = bisect_left(self.xids, distance)
        if index == len(self.xids) or self.xids[index] != distance:
            return None
        begin = self.begins[index]
        del self.xids[index:], self.begins[index:]
        return begin

    def mark(self) -> None:
        """Allow a chunk to end here if it is large enough."""
        if self.size - (self.marks[-1] if self.marks else 0) >= CHUNK_BYTES:
            self.marks.append(self.size)


class Committed:
    """A committed transaction's bytes, in chunks that end where an append ended.

    Each chunk is followed by `padding`. The file is already unlinked: it is deleted once this is
    read to its end, closed or dropped.
    """

    def __init__(
        self, spool: Spool, transaction: _Transaction, descriptor: int, padding: bytes
    ) -> None:
        self._spool, self._padding = spool, padding
        self._descriptor = descriptor
        self._written, self._buffer = transaction.written, transaction.buffer
        ends = transaction.marks
        if transaction.size > (ends[-1] if ends else 0):
            ends.append(transaction.size)
        self._ends = deque(ends)
        self._at = 0

    @property
    def next_bytes(self) -> int:
        """How long the next chunk is; 0 if there is none."""
        return self._ends[0] - self._at if self._ends else 0

    def __iter__(self) -> Committed:
        return self

    def __next__(self) -> bytes:
        if not self._ends:
            self.close()
            raise StopIteration
        end = self._ends.popleft()
        begin, self._at = self._at, end
        # Assembled where it is read: a row may be a gigabyte and must not be in memory twice.
        chunk = BytesIO()
        self._spool.read(self._descriptor, begin, min(end, self._written), chunk)
        if end > self._written:
            start = max(0, begin - self._written)
            chunk.write(self._buffer[start : end - self._written])
        chunk.write(self._padding)
        return chunk.getvalue()

    def close(self) -> None:
        """Free memory and disk; what was not read is lost."""
        self._ends.clear()
        self._buffer = bytearray()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


class Spool:
    """Every transaction that is streamed and neither committed nor aborted."""

    def __init__(self, directory: Path, *, memory_bytes: int = MEMORY_BYTES) -> None:
        """Take a private directory inside `directory`, which is created if it is missing.

        Raises ConfigError if `directory` can't be used or is open to other users.
        """
        self.memory_bytes = 0  # held now
        self._limit = memory_bytes
        self._open: dict[int, _Transaction] = {}
        self._lock = -1
        self._directory = directory
        try:
            self.folder = self._take()  # this process's own, with a file for each large one
        except OSError as error:
            if error.errno in _PASSING:
                raise self._error(os.strerror(error.errno)) from error
            raise ConfigError(
                f"the spool's directory {directory} can't be used: {error.strerror}",
                hint="name another in source.spool_dir, on a disk with room for the largest"
                " transactions",
            ) from error

    @property
    def open_xids(self) -> list[int]:
        """The transactions that it holds bytes of."""
        return list(self._open)

    def size(self, xid: int) -> int:
        """Return how many bytes of the transaction there are."""
        transaction = self._open.get(xid)
        return transaction.size if transaction else 0

    def append(self, xid: int, subxid: int, data: bytes | memoryview) -> None:
        """Add complete messages that `subxid` of `xid` wrote (`subxid == xid` for its own).

        Raises SpoolError if the disk is full or broken; that ends the session.
        """
        transaction = self._open.get(xid)
        if transaction is None:
            transaction = self._open[xid] = _Transaction()
        transaction.enter(subxid - xid & _XID_MASK)
        if len(data) > self._limit // 2:
            # A value of many megabytes: not worth a copy.
            self._flush(xid, transaction)
            self._write(xid, transaction, data)
        else:
            transaction.buffer += data
            self.memory_bytes += len(data)
            if self.memory_bytes > self._limit:
                self._flush_largest()
        transaction.mark()

    def abort(self, xid: int, subxid: int) -> None:
        """Drop what `subxid` and its children wrote; everything if it is `xid` itself."""
        transaction = self._open.get(xid)
        if transaction is None:
            return
        if subxid == xid:
            del self._open[xid]
            self._truncate(xid, transaction, 0)
            if transaction.has_file:
                with self._translated():
                    self._path(xid).unlink()
            return
        # A subtransaction that wrote nothing, or was dropped with an earlier one, is not known.
        begin = transaction.leave(subxid - xid & _XID_MASK)
        if begin is not None:
            self._truncate(xid, transaction, begin)

    def commit(self, xid: int, padding: bytes = b"") -> Committed:
        """Return the transaction's bytes, `padding` after each chunk, and forget it."""
        transaction = self._open.pop(xid, None) or _Transaction()
        self.memory_bytes -= len(transaction.buffer)
        descriptor = -1
        if transaction.has_file:
            with self._translated():
                descriptor = os.open(self._path(xid), os.O_RDONLY)
                self._path(xid).unlink()
        return Committed(self, transaction, descriptor, padding)

    def close(self) -> None:
        """Remove every file. What could not be removed is left to the next spool."""
        self.memory_bytes = 0
        self._open.clear()
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    # -- memory and disk ---------------------------------------------------------------------------

    def _flush_largest(self) -> None:
        """Write the largest buffers out, until half the memory is free."""
        largest = sorted(self._open.items(), key=lambda item: len(item[1].buffer), reverse=True)
        for xid, transaction in largest:
            self._flush(xid, transaction)
            if self.memory_bytes <= self._limit // 2:
                break

    def _flush(self, xid: int, transaction: _Transaction) -> None:
        if transaction.buffer:
            buffer, transaction.buffer = transaction.buffer, bytearray()
            self.memory_bytes -= len(buffer)
            self._write(xid, transaction, buffer)

    def _write(
        self, xid: int, transaction: _Transaction, data: bytes | bytearray | memoryview
    ) -> None:
        # Only the first write may create the file: if it was removed meanwhile, it must not be
        # recreated with a hole where its bytes were.
        create = 0 if transaction.has_file else os.O_CREAT | os.O_EXCL
        with self._translated(), memoryview(data) as left:
            descriptor = os.open(self._path(xid), os.O_WRONLY | create, 0o600)
            transaction.has_file = True
            try:
                done = 0
                while done < len(left):
                    done += os.pwrite(descriptor, left[done:], transaction.written + done)
            finally:
                os.close(descriptor)
        transaction.written += done

    def read(self, descriptor: int, begin: int, end: int, into: BytesIO) -> None:
        """Append the file's bytes from `begin` to `end`; raise SpoolError if there are fewer."""
        with self._translated():
            while begin < end:
                part = os.pread(descriptor, min(end - begin, _READ_BYTES), begin)
                if not part:
                    raise self._error("a file ends before the bytes that were written to it")
                into.write(part)
                begin += len(part)

    def _truncate(self, xid: int, transaction: _Transaction, size: int) -> None:
        kept = max(0, size - transaction.written)
        self.memory_bytes -= len(transaction.buffer) - kept
        del transaction.buffer[kept:]
        if size < transaction.written:
            with self._translated():
                os.truncate(self._path(xid), size)
            transaction.written = size
        while transaction.marks and transaction.marks[-1] > size:
            transaction.marks.pop()

    def _path(self, xid: int) -> Path:
        return self.folder / str(xid)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._error(error.strerror or "an input or output error") from error

    def _error(self, why: str) -> SpoolError:
        return SpoolError(
            f"spooling a streamed transaction in {self._directory}: {why}",
            hint=f"make room in {self._directory}, or name another directory in source.spool_dir;"
            " the daemon tries again by itself, and Postgres keeps the WAL until then",
        )

    # -- the directory -----------------------------------------------------------------------------

    def _take(self) -> Path:
        """Return a new directory with our lock on it; remove those that are not locked."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Not a symbolic link: its target could change.
        outer = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            status = os.fstat(outer)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise ConfigError(
                    f"the spool's directory {self._directory} is not private",
                    hint="rows are spooled there: make it the daemon's own with mode 0700, or name"
                    " another in source.spool_dir",
                )
            # One process at a time, or one would remove what another is about to lock.
            fcntl.flock(outer, fcntl.LOCK_EX)
            for left in self._directory.glob("spool.*"):
                with suppress(FileNotFoundError):  # its owner removes it just then
                    lock = _lock(left)
                    if lock >= 0:
                        shutil.rmtree(left, ignore_errors=True)
                        os.close(lock)
            private = Path(tempfile.mkdtemp(prefix="spool.", dir=self._directory))
            self._lock = _lock(private)
            return private
        finally:
            os.close(outer)


def spool_directory(spool_dir: str | None, pipeline: str) -> Path:
    """Return the directory of a pipeline's spools: in `spool_dir`, else in the system's temp."""
    return Path(spool_dir or tempfile.gettempdir()) / f"lockstep-{pipeline}-{os.geteuid()}"


def _lock(directory: Path) -> int:
    """Return a descriptor that holds the directory's lock; -1 if a living process has it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return -1
    return descriptor
