"""Rows in a file of this machine, by number: what is written goes to its end, in one piece.

The file is a log of records, a row and its number each, in segments of a MB. A row that is written anew leaves its
earlier record without use; the segment with the least rows still in use is written again elsewhere when room is needed
(Rosenblum and Ousterhout, "The design and implementation of a log-structured file system", 1992). So rows that are
written together cost one write, wherever they were before. The file has no name: it is gone with its process, since
what outlives a process is in checkpoints and copies.

Reads go through a mapping of the file, which the system's cache serves where it can; several threads read where many
rows are asked for, so that a disk has several requests at once.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from steepest.core.system import system
from steepest.data.storage.nameless import nameless_file
from steepest.errors import ResourcesError
from steepest.tables.rows.kernels import Int32s, Int64s, kernel, read_only

Octets = npt.NDArray[np.uint8]
_SEGMENT_BYTES = 1 << 20
_SPARE = 4  # segments more than rows need, to write to while others are cleaned
_AT_ONCE = 512  # rows; of more, several threads read
_THREADS = 8
_PAGE = 4096
_NONE = -1
_NUMBER_BYTES = 4
_UNKNOWN_SECONDS = 1e-4  # of a row's read, as long as none was measured: a fast disk's


@kernel
def _read(records: Octets, slots: Int64s, rows: Octets) -> None:
    width = rows.shape[1]
    for at in range(len(slots)):
        source, target = records[slots[at]], rows[at]
        for octet in range(width):
            target[octet] = source[octet]


@kernel
def _touch(records: Octets, slots: Int64s) -> int:
    """Read a byte of each page of some records; return their sum, or the compiler would leave them out."""
    total, width = 0, records.shape[1]
    for slot in slots:
        for octet in range(0, width, _PAGE):
            total += records[slot, octet]
        total += records[slot, width - 1]
    return total


@kernel
def _write(records: Octets, begin: int, numbers: Octets, rows: Octets) -> None:
    width = rows.shape[1]
    for at in range(len(rows)):
        target, source = records[begin + at], rows[at]
        for octet in range(width):
            target[octet] = source[octet]
        for octet in range(_NUMBER_BYTES):
            target[width + octet] = numbers[at, octet]


@kernel
def _forget(numbers: Int32s, where: Int32s, segment: int, used: Int64s) -> None:
    for number in numbers:
        if where[number]:
            used[(where[number] - 1) // segment] -= 1
            where[number] = 0


@lru_cache(maxsize=1)
def _readers() -> ThreadPoolExecutor:
    """Return the threads that read for all logs of this process."""
    return ThreadPoolExecutor(_THREADS, "steepest rows on disk")


@lru_cache(maxsize=1)
def _readers_ahead() -> ThreadPoolExecutor:
    """Return the threads that read ahead: reads that are waited for do not queue behind these."""
    return ThreadPoolExecutor(_THREADS, "steepest rows ahead")


class RowLog:
    """Rows of one size on disk, by number.

    Args:
        directory: of the file; it is made if it is not there.
        row_bytes: of a row.
        most: rows that there will be at most, with numbers from 0 to `most` - 1.
        where: the record of each row plus one, int32 (most,), 0 for those that are not here; it is kept up to date.
        segment: records in a segment; by default those of a MB.

    Attributes:
        directory: of the file.
        seconds: that reads and writes have taken.
        since: when the one under way began, on the system's clock; None between two.
        row_seconds: what the read of a row takes of late, by itself: a disk's 0.1 ms, or 0.2 µs of the system's cache.

    Raises:
        ResourcesError: the directory cannot be written.
    """

    def __init__(
        self, directory: str, row_bytes: int, most: int, where: Int32s, segment: int | None = None
    ) -> None:
        self.directory, self._where = directory, where
        self.seconds = 0.0
        self.since: float | None = None
        self.row_seconds = _UNKNOWN_SECONDS
        record = row_bytes + _NUMBER_BYTES
        self._row_bytes, self._record = row_bytes, record
        self._allocated = 0  # segments of the file that the disk has room for
        self._segment = segment or max(_SEGMENT_BYTES // record, 1)
        segments = self._needed(most)
        try:
            self._file = nameless_file(directory)
        except OSError as error:
            raise ResourcesError(
                f"directory {directory!r} cannot hold rows of an embedding table: {error}. Give a "
                "table's directory= one that each server's node has and may write to"
            ) from error
        weakref.finalize(self, os.close, self._file)
        try:
            os.ftruncate(self._file, segments * self._segment * record)
            mapped = mmap.mmap(self._file, segments * self._segment * record)
        except (OSError, ValueError) as error:
            raise self._failed(error) from error
        if hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)
        self._records: Octets = np.frombuffer(mapped, np.uint8).reshape(-1, record)
        self._used = np.zeros(segments, np.int64)  # by segment, its records in use
        self._free: list[int] = []  # segments without records in use
        self._open, self._fill = (
            _NONE,
            self._segment,
        )  # the segment that is written to, and its records so far

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the time of a block as spent on the disk."""
        began = self.since = system().now()
        try:
            yield
        finally:
            self.since = None
            self.seconds += system().now() - began

    def __len__(self) -> int:
        """Return how many rows are here."""
        return int(self._used.sum())

    @property
    def nbytes(self) -> int:
        """The bytes on disk that are taken."""
        return int(self._allocated * self._segment * self._record)

    def _needed(self, rows: int) -> int:
        """Return the segments with which so many rows always find room, a third of them without use."""
        return -(-3 * rows // (2 * self._segment)) + _SPARE

    def require(self, rows: int) -> None:
        """Reserve room on disk for `rows` rows, so that no later write fails for lack of room.

        Raises:
            ResourcesError: the disk has not; nothing has changed.
        """
        needed = self._needed(rows)
        size = self._segment * self._record
        while self._allocated < needed:
            try:
                with self._timed():
                    os.posix_fallocate(self._file, self._allocated * size, size)
            except OSError as error:
                raise self._failed(error, needed * size) from error
            self._free.append(self._allocated)
            self._allocated += 1

    def _failed(self, error: Exception, wanted: int = 0) -> ResourcesError:
        """Return the error of a file that cannot have so many bytes."""
        full = isinstance(error, OSError) and error.errno in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EFBIG,
        )
        what = "has no room for more rows of an embedding table" if full else "cannot hold rows"
        disk = os.fstatvfs(self._file)
        return ResourcesError(
            f"directory {self.directory!r} of {platform.node()} {what}: {error}. Its file has "
            f"{self.nbytes:,} bytes and wants {wanted:,}; {disk.f_bavail * disk.f_frsize:,} are free there. Rows are "
            "as they were: they can be saved, and training goes on when there is room. Make room, give a table's "
            "directory= a larger disk, set its capacity, or use more servers"
        )

    def read_ahead(self, numbers: Int32s) -> list[Future[int]]:
        """Read rows of this log into the system's cache, on other threads; the log does not change."""
        slots = np.sort(self._where[numbers].astype(np.int64) - 1)
        each = -(-len(slots) // _THREADS)
        parts = [slots[begin : begin + each] for begin in range(0, len(slots), each)]
        return [_readers_ahead().submit(self._touch, part) for part in parts]

    def _touch(self, slots: Int64s) -> int:
        """Read some records to the system's cache, and note what that took."""
        began = system().now()
        used = _touch(self._records, slots)
        self.note((system().now() - began) / max(len(slots), 1), 0.5)
        return used

    def note(self, seconds: float, weight: float | None = None) -> None:
        """Count a row's read into `row_seconds`; any thread may."""
        # Without a weight a longer one counts more: what was read ahead is in the cache, and tells nothing of the disk.
        if weight is None:
            weight = 0.5 if seconds > self.row_seconds else 1 / 16
        self.row_seconds += weight * (seconds - self.row_seconds)

    def read(self, numbers: Int32s, rows: Octets) -> None:
        """Copy rows that are here to `rows`, (n, row_bytes), contiguous."""
        before = self.seconds
        with self._timed():
            self._read(numbers, rows)
        if 0 < len(numbers) <= _AT_ONCE:  # not by several threads
            self.note((self.seconds - before) / len(numbers))

    def _read(self, numbers: Int32s, rows: Octets) -> None:
        slots = self._where[numbers].astype(np.int64) - 1
        if len(slots) <= _AT_ONCE:
            _read(self._records, slots, rows)
            return
        each = -(-len(slots) // _THREADS)
        parts = [slice(begin, begin + each) for begin in range(0, len(slots), each)]
        futures = [
            _readers().submit(_read, self._records, slots[part], rows[part]) for part in parts
        ]
        for future in futures:
            future.result()

    def write(self, numbers: Int32s, rows: Octets) -> None:
        """Write distinct rows, (n, row_bytes), contiguous; for which `require` has taken room."""
        self.forget(numbers)
        with self._timed():
            self._write(numbers, rows)

    def _write(self, numbers: Int32s, rows: Octets) -> None:
        begin = 0
        while begin < len(numbers):
            if self._fill == self._segment:
                self._begin_segment()
            count = min(self._segment - self._fill, len(numbers) - begin)
            self._append(numbers[begin : begin + count], rows[begin : begin + count])
            begin += count

    def _append(self, numbers: Int32s, rows: Octets) -> None:
        """Write rows to the open segment, which has room for them."""
        first = self._open * self._segment + self._fill
        named = np.ascontiguousarray(numbers, np.int32).view(np.uint8).reshape(-1, _NUMBER_BYTES)
        _write(self._records, first, named, rows)
        self._where[numbers] = np.arange(first + 1, first + 1 + len(numbers), dtype=np.int32)
        self._used[self._open] += len(numbers)
        self._fill += len(numbers)

    def _begin_segment(self) -> None:
        """Open a segment without records in use; while few are left, write those of others again."""
        self._open, self._fill = self._free.pop(), 0
        while len(self._free) < 2:
            self._clean()

    def _clean(self) -> None:
        """Write the rows of the segment with the fewest in use to others, so that it is free."""
        used = self._used[: self._allocated].copy()
        used[[*self._free, self._open]] = self._segment + 1
        victim = int(used.argmin())
        begin = victim * self._segment
        records = self._records[begin : begin + self._segment]
        numbers = np.ascontiguousarray(records[:, self._row_bytes :]).view(np.int32)[:, 0]
        within = (numbers >= 0) & (numbers < len(self._where))
        slots = np.arange(begin + 1, begin + 1 + self._segment)
        live = np.flatnonzero(within & (self._where[np.where(within, numbers, 0)] == slots))
        self._used[victim] = 0
        done = 0
        while done < len(live):
            if self._fill == self._segment:
                self._open, self._fill = self._free.pop(), 0
            part = live[done : done + self._segment - self._fill]
            self._append(numbers[part], np.ascontiguousarray(records[part, : self._row_bytes]))
            done += len(part)
        self._free.append(victim)

    def forget(self, numbers: Int32s) -> None:
        """Forget rows; those that are not here are ignored."""
        _forget(read_only(numbers, np.int32), self._where, self._segment, self._used)
