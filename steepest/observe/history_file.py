"""The file of a run's history, a line of JSON for each row; in an object store, several of them."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

from steepest.data.storage.files import open_file
from steepest.data.storage.object_storage import ObjectStorage
from steepest.data.storage.places import ObjectUrl, StoragePlace

HISTORY = "history.jsonl"
RECORD = "job.jsonl"  # of the rows of a `JobRecord`
REPORTS = "reports.jsonl"  # of the rows of `Reports`
_SUFFIX = ".jsonl"
_ALL = "all"
_TOGETHER = 1000  # lines that are decoded at once


def history_file(folder: StoragePlace, name: str = HISTORY) -> HistoryRows:
    """Return the rows of a history beside its checkpoints; `RECORD`, `REPORTS` for those of its record and reports."""
    if isinstance(folder, ObjectUrl):
        place = folder / name.removesuffix(_SUFFIX)
        return HistorySegments(place, ObjectStorage.of(folder.scheme))
    return HistoryFile(folder / name)


def read_rows(folder: StoragePlace, name: str = HISTORY) -> Iterator[dict[str, Any] | None]:
    """Yield the rows beside checkpoints, as they are now; None for each line that is none.

    Raises:
        OSError: they are not there, or cannot be read.
    """
    if isinstance(folder, ObjectUrl):
        place = folder / name.removesuffix(_SUFFIX)
        yield from HistorySegments(place, ObjectStorage.of(folder.scheme)).read()
        return
    with open_file(folder / name) as file:
        for _, row in _rows(file):
            yield row


class HistoryRows(ABC):
    """Rows of a history, at `path`, that outlive the driver; JSON's missing numbers (NaN, infinities) are null.

    A row of a step that is taken again replaces the rows of that step and of later ones, except events.
    """

    path: Any

    def __init__(self) -> None:
        self._last = -1  # the greatest step of a row that is no event

    def resume(self, step: int, newest: int | None = None) -> list[dict[str, Any]]:
        """Cut the rows back to a step; return those that stay (the last `newest`): those until it, and events.

        Args:
            step: the number of committed steps; 0 empties the file.

        Raises:
            OSError: the rows cannot be read or written.
        """
        rows: deque[dict[str, Any]] = deque(maxlen=newest)
        self._keep(lambda row: _is_until(row, step), rows.append)
        self._last = step if rows else -1
        return list(rows)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows, and wait until they are durable; OSError: they cannot be written."""
        rows = list(rows)
        steps = [row["step"] for row in rows if row["kind"] == "step"]
        if steps and steps[0] <= self._last:
            self._keep(lambda row: _is_before(row, steps[0]), more=_encode(rows))
        else:
            self._add(_encode(rows))
        if steps:
            self._last = steps[-1]

    @abstractmethod
    def _add(self, lines: bytes) -> None:
        """Append lines."""

    @abstractmethod
    def _keep(
        self,
        stays: Callable[[dict[str, Any]], bool],
        take: Callable[[dict[str, Any]], object] = lambda row: None,
        more: bytes = b"",
    ) -> None:
        """Remove rows that do not stay, call `take` with each other one, and append `more`, at once."""


class HistoryFile(HistoryRows):
    """A file of JSON lines, which need not exist, to which rows are appended, whole or not at all."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def _add(self, lines: bytes) -> None:
        with open(self.path, "ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())

    def _keep(
        self,
        stays: Callable[[dict[str, Any]], bool],
        take: Callable[[dict[str, Any]], object] = lambda row: None,
        more: bytes = b"",
    ) -> None:
        """Do so without having the file in memory; one from which nothing has to be removed is not written anew."""
        if not self.path.exists():
            if more:
                self._add(more)
            return
        unfinished, size = self.path.with_name(f".{self.path.name}"), 0  # size: of what stays
        with contextlib.ExitStack() as opened:
            old = opened.enter_context(open_file(self.path))
            new: BinaryIO | None = None
            for line, row in _rows(old):
                if row is not None and stays(row):
                    take(row)
                    if new is None and line.endswith(b"\n"):
                        size += len(line)
                        continue
                    new = new or opened.enter_context(_copied(self.path, size, unfinished))
                    new.write(line.rstrip(b"\n") + b"\n")
                else:
                    new = new or opened.enter_context(_copied(self.path, size, unfinished))
            if new is None and not more:
                return
            new = new or opened.enter_context(_copied(self.path, size, unfinished))
            new.write(more)
            new.flush()
            os.fsync(new.fileno())
        os.replace(unfinished, self.path)


class GrowingFile:
    """A file of rows that another process appends to, or writes anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity = 0
        self._read = 0  # bytes

    @property
    def is_there(self) -> bool:
        """Whether it was there when it was read."""
        return self._identity != 0

    def is_another(self) -> bool:
        """Return whether the file was replaced or cut since it was read."""
        try:
            with open_file(self._path) as file:
                identity, size = _identity(file)
        except FileNotFoundError:
            return self._identity != 0
        return identity != self._identity or size < self._read

    def rows(self) -> Iterator[dict[str, Any] | None]:
        """Yield the rows of the lines that are whole since; None for each that is none.

        Raises:
            OSError: it is not there.
        """
        with open_file(self._path) as file:
            self._identity, _ = _identity(file)
            file.seek(self._read)
            for line, row in _rows(file):
                if line.endswith(b"\n"):  # else it is being written
                    self._read += len(line)
                    yield row

    def begin_again(self) -> None:
        """Yield all rows next."""
        self._identity = self._read = 0


def _identity(file: BinaryIO) -> tuple[int, int]:
    """Return the inode number of an open file, and its length in bytes."""
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size


class HistorySegments(HistoryRows):
    """Objects of JSON lines below a prefix: each call appends one, since objects of a store cannot grow."""

    # They are numbered; ``000007-all.jsonl`` replaces those before it, which are then removed.

    def __init__(self, path: ObjectUrl, storage: ObjectStorage) -> None:
        super().__init__()
        self.path = path
        self._storage = storage
        self._number = 0

    def _add(self, lines: bytes) -> None:
        if lines:
            self._write(lines)

    def read(self) -> Iterator[dict[str, Any] | None]:
        """Yield all rows; None for each line that is none. FileNotFoundError: there is no object."""
        if not (segments := self._segments()):
            raise FileNotFoundError(f"no rows at {self.path}")
        for each in segments:
            for _, row in _rows(io.BytesIO(self._storage.read(each))):
                yield row

    def _segments(self) -> list[ObjectUrl]:
        """Return the objects that hold the rows, in order; older ones were replaced."""
        segments = [each for each in self._storage.files(self.path) if each.name[:6].isdecimal()]
        segments.sort(key=_number)
        first = max((i for i, each in enumerate(segments) if _ALL in each.name), default=0)
        self._number = max([self._number, *map(_number, segments)])
        return segments[first:]

    def _keep(
        self,
        stays: Callable[[dict[str, Any]], bool],
        take: Callable[[dict[str, Any]], object] = lambda row: None,
        more: bytes = b"",
    ) -> None:
        kept = []
        for each in self._segments():
            for line, row in _rows(io.BytesIO(self._storage.read(each))):
                if row is not None and stays(row):
                    take(row)
                    kept.append(line.rstrip(b"\n") + b"\n")
        if self._segments() or more:
            self._write(b"".join(kept) + more, replace=True)

    def _write(self, lines: bytes, replace: bool = False) -> None:
        before = self._segments() if replace else []
        self._number += 1
        name = f"{self._number:06d}{f'-{_ALL}' * replace}.jsonl"
        self._storage.put(self.path / name, lines)
        self._storage.discard(before)


def _number(segment: ObjectUrl) -> int:
    return int(segment.name[:6])


def _is_until(row: Mapping[str, Any], step: int) -> bool:
    return bool(step) and (row["kind"] == "event" or row["step"] <= step)


def _is_before(row: Mapping[str, Any], step: int) -> bool:
    return bool(row["kind"] == "event" or row["step"] < step)


def _copied(path: Path, size: int, to: Path) -> BinaryIO:
    """Return another file, opened at its end, that has the first `size` bytes of one."""
    shutil.copyfile(path, to)
    os.truncate(to, size)
    return open(to, "ab")


def _rows(file: IO[bytes]) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each line of a file with its row; None for what is none, such as half a line after a crash."""
    # Many lines are decoded at once: rows share the strings of their keys then.
    while lines := list(itertools.islice(file, _TOGETHER)):
        values = _decoded(b"[%s]" % b",".join(lines))
        if not isinstance(values, list) or len(values) != len(lines):
            values = [_decoded(line) for line in lines]
        for line, value in zip(lines, values, strict=True):
            whole = isinstance(value, dict) and value.keys() >= {"kind", "time", "step"}
            yield line, value if whole else None


def _decoded(text: bytes) -> Any:
    """Return the value of a JSON text; None if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _encode(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(_line(row) for row in rows)


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(row, allow_nan=False).encode() + b"\n"
    except ValueError:  # few rows have numbers that JSON has not
        return json.dumps(_finite(row), allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    """Return a value with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value
