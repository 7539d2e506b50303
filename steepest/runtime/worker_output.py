"""Shows all that workers print on the driver's terminal before they end.

Ray's log monitor reads what workers have written into files, and sends it to the driver, some tenths of a second later.
Each worker writes a mark behind its last line; the driver waits for the marks, and does not show them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection
from typing import Any

_MARK = ":steepest_printed:"  # lines that begin with a colon are taken for Ray's own, see `places.last_lines`


def write_marks(token: str) -> list[str]:
    """Write a mark behind what this process has printed to each file of a log; return the marks."""
    written = []
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        path = log_file(descriptor)
        if path and _has_lines(path):
            written.append(f"{token}-{os.getpid()}-{descriptor}")
            os.write(descriptor, f"{_MARK}{written[-1]}\n".encode())
    return written


def log_file(descriptor: int) -> str:
    """Return the path of the file to which a descriptor of this process writes; "" if it is no file."""
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
    return path if path.startswith("/") and os.path.isfile(path) else ""


def _has_lines(path: str) -> bool:
    """Return whether a log has lines that are not Ray's own."""
    with open(path, "rb") as file:
        return any(not line.startswith(b":") for line in file)


class PrintedLines:
    """The marks that have come to this driver.

    Args:
        show: prints lines of workers, as Ray gives them.
    """

    def __init__(self, show: Callable[[dict[str, Any]], object]) -> None:
        self._show = show
        self._marks: set[str] = set()
        self._news = threading.Condition()

    def __call__(self, data: dict[str, Any]) -> None:
        """Show lines without marks."""
        lines, marks = [], []
        for line in data["lines"]:
            before, is_marked, mark = line.partition(_MARK)
            if is_marked:
                marks.append(mark)
            if before or not is_marked:
                lines.append(before)
        if lines:
            self._show({**data, "lines": lines})
        with self._news:
            self._marks.update(marks)
            self._news.notify_all()

    def wait(self, marks: Collection[str], seconds: float) -> bool:
        """Wait until marks have come, so that all before them is shown; return whether they came in time."""
        with self._news:
            return self._news.wait_for(lambda: self._marks.issuperset(marks), seconds)
