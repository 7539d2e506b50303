"""An update that a server has applied in part, because the user's optimizer raised in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from steepest.core.messages.membership import Failed
from steepest.core.messages.snapshots import SnapshotEnd
from steepest.errors import describe_error, described_by


@dataclass(frozen=True)
class RaisedUpdate:
    """A committed update, to `version`, in which the optimizer raised: the server's chunks are of no version."""

    # error, traceback, kind: of the exception, see `steepest.errors.describe_error`.

    version: int
    error: str
    traceback: str
    kind: str = ""

    @classmethod
    def of(cls, version: int, error: BaseException) -> RaisedUpdate:
        """Return the update to a version in which the optimizer raised an exception."""
        return cls(version, **describe_error(error))

    def to_coordinator(self, generation: int) -> Failed:
        """Return the message by which the coordinator learns of it."""
        return Failed(generation, 0, self.version, self.error, self.traceback, self.kind)

    def to_reader(self, at: tuple[int, int], sequence: int, *, open_to_all: bool) -> SnapshotEnd:
        """Return what a reader at a generation and version is sent instead of weights."""
        # open_to_all: readers hear of it from servers alone; a job's client has the traceback from the coordinator.
        why = f"its optimizer raised in the update to version {self.version}: {self.error}"
        described: dict[str, Any] = described_by(self) if open_to_all else {}
        return SnapshotEnd(at[0], sequence, at[1], given_up=why, **described)
