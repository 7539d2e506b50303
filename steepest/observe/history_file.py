"""The file of a run's history, a line of JSON for each row; in an object store, several of them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from steepest.storage.object_storage import ObjectStorage
from steepest.storage.places import ObjectUrl, Place

HISTORY = "history.jsonl"
_SEGMENTS = "history"
_ALL = "all"


class HistoryRows(Protocol):
    """Rows of a history that outlive the driver.

    A row of a step that is taken again replaces the rows of that step and of later ones, except
    events. Numbers that JSON does not have (NaN, infinities) are null.

    Attributes:
        path: where they are.
    """

    path: Any

    def resume(self, step: int) -> list[dict[str, Any]]:
        """Cut the rows back to a step, and return those that stay: those until it, and events.

        Args:
            step: the number of committed steps; 0 empties the file.

        Raises:
            OSError: they cannot be read or written.
        """

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows, and wait until they are durable.

        Raises:
            OSError: they cannot be written.
        """


def history_file(folder: Place) -> HistoryRows:
    """Return the rows of a history beside its checkpoints."""
    if isinstance(folder, ObjectUrl):
        return HistorySegments(folder / _SEGMENTS, ObjectStorage.of(folder.scheme))
    return HistoryFile(folder / HISTORY)


class HistoryFile:
    """A file of JSON lines, to which rows are appended, whole or not at all.

    Args:
        path: the file; need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = -1  # the greatest step of a row that is no event

    def resume(self, step: int) -> list[dict[str, Any]]:
        """Cut the file back to a step, and return the rows that stay."""
        rows = _until(self._read(), step)
        if self.path.exists():
            self._replace(rows)
        self._last = step if rows else -1
        return rows

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows, and wait until the disk has them."""
        rows = list(rows)
        steps = [row["step"] for row in rows if row["kind"] == "step"]
        if steps and steps[0] <= self._last:
            self._replace([*_before(self._read(), steps[0]), *rows])
        else:
            with open(self.path, "ab") as file:
                file.write(_encode(rows))
                file.flush()
                os.fsync(file.fileno())
        if steps:
            self._last = steps[-1]

    def _read(self) -> list[dict[str, Any]]:
        return _decode(self.path.read_bytes()) if self.path.exists() else []

    def _replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        unfinished = self.path.with_name(f".{self.path.name}")
        with open(unfinished, "wb") as file:
            file.write(_encode(rows))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, self.path)


class HistorySegments:
    """Objects of JSON lines: each call appends one, since objects of a store cannot grow.

    They are numbered; ``000007-all.jsonl`` replaces those before it, which are then removed.

    Args:
        path: the prefix in which they are.
        storage: of the prefix.
    """

    def __init__(self, path: ObjectUrl, storage: ObjectStorage) -> None:
        self.path = path
        self._storage = storage
        self._last = -1
        self._number = 0

    def resume(self, step: int) -> list[dict[str, Any]]:
        """Cut the rows back to a step, and return those that stay."""
        there = self._segments()
        kept = _until(self._read(), step)
        if there:
            self._write(kept, replace=True)
        self._last = step if kept else -1
        return kept

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows as another object, or with all earlier ones as one that replaces them."""
        rows = list(rows)
        steps = [row["step"] for row in rows if row["kind"] == "step"]
        if steps and steps[0] <= self._last:
            self._write([*_before(self._read(), steps[0]), *rows], replace=True)
        elif rows:
            self._write(rows)
        if steps:
            self._last = steps[-1]

    def _segments(self) -> list[ObjectUrl]:
        """Return the objects that count, in their order."""
        found = [each for each in self._storage.files(self.path) if each.name[:6].isdecimal()]
        found.sort(key=_number)
        first = max((i for i, each in enumerate(found) if _ALL in each.name), default=0)
        self._number = max([self._number, *map(_number, found)])
        return found[first:]

    def _read(self) -> list[dict[str, Any]]:
        return [row for each in self._segments() for row in _decode(self._storage.read(each))]

    def _write(self, rows: Iterable[Mapping[str, Any]], replace: bool = False) -> None:
        before = self._segments() if replace else []
        self._number += 1
        name = f"{self._number:06d}{f'-{_ALL}' * replace}.jsonl"
        self._storage.put(self.path / name, _encode(rows))
        self._storage.discard(before)


def _number(segment: ObjectUrl) -> int:
    return int(segment.name[:6])


def _until(rows: Iterable[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    return [row for row in rows if step and (row["kind"] == "event" or row["step"] <= step)]


def _before(rows: Iterable[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == "event" or row["step"] < step]


def _decode(raw: bytes) -> list[dict[str, Any]]:
    """Return the rows of whole lines; what a crash left of the last one is left out."""
    rows: list[dict[str, Any]] = []
    for line in raw.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and {"kind", "time", "step"} <= row.keys():
            rows.append(row)
    return rows


def _encode(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(_finite(row), allow_nan=False).encode() + b"\n" for row in rows)


def _finite(value: Any) -> Any:
    """Return a value with null for each number that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(found) for key, found in value.items()}
    return [_finite(found) for found in value] if isinstance(value, (list, tuple)) else value
