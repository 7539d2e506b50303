"""The file of a run's history: a line of JSON for each row."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class HistoryFile:
    """A file of JSON lines, to which rows are appended, whole or not at all.

    A row of a step that is taken again replaces the rows of that step and of later ones, except
    events. Numbers that JSON does not have (NaN, infinities) are null.

    Args:
        path: the file; need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = -1  # the greatest step of a row that is no event

    def resume(self, step: int) -> list[dict[str, Any]]:
        """Cut the file back to a step, and return the rows that stay: those until it, and events.

        Args:
            step: the number of committed steps; 0 empties the file.

        Raises:
            OSError: the file cannot be read or written.
        """
        rows = [r for r in self._read() if step and (r["kind"] == "event" or r["step"] <= step)]
        if self.path.exists():
            self._replace(rows)
        self._last = step if rows else -1
        return rows

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows, and wait until the disk has them.

        Raises:
            OSError: they cannot be written.
        """
        rows = list(rows)
        steps = [row["step"] for row in rows if row["kind"] == "step"]
        if steps and steps[0] <= self._last:
            before = [r for r in self._read() if r["kind"] == "event" or r["step"] < steps[0]]
            self._replace([*before, *rows])
        else:
            with open(self.path, "ab") as file:
                file.write(_encode(rows))
                file.flush()
                os.fsync(file.fileno())
        if steps:
            self._last = steps[-1]

    def _read(self) -> list[dict[str, Any]]:
        """Return the rows of whole lines; what a crash left of the last one is left out."""
        rows: list[dict[str, Any]] = []
        if self.path.exists():
            for line in self.path.read_bytes().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict) and {"kind", "time", "step"} <= row.keys():
                    rows.append(row)
        return rows

    def _replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        unfinished = self.path.with_name(f".{self.path.name}")
        with open(unfinished, "wb") as file:
            file.write(_encode(rows))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, self.path)


def _encode(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(_finite(row), allow_nan=False).encode() + b"\n" for row in rows)


def _finite(value: Any) -> Any:
    """Return a value with null for each number that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(found) for key, found in value.items()}
    return [_finite(found) for found in value] if isinstance(value, (list, tuple)) else value
