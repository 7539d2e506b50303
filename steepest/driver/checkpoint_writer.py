"""Checkpoints written beside training; a disk that hangs stops neither it nor its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from steepest.errors import CheckpointError
from steepest.storage.blocks import Progress


@dataclass(eq=False)
class _Work:
    """One thing that is being written."""

    moved: float  # time of its last progress, by the writer's clock
    file: object  # the path or URL that was worked on then
    done: threading.Event = field(default_factory=lambda: threading.Event())  # set when it is over
    # set while the trainer waits for it
    awaited: threading.Event = field(default_factory=lambda: threading.Event())
    error: BaseException | None = None  # that ended it
    hung: bool = False  # whether the writer has given up waiting for it
    # what to do when it is over, once the trainer waits for it no more
    then: Callable[[], None] | None = None


class Writer:
    """Writes one thing at a time, on a thread that does not keep the interpreter from ending.

    A thread that hangs in a system call cannot be ended: it is left behind, and nothing else is
    written until it returns.
    """

    def __init__(
        self, folder: object, patience: float, clock: Callable[[], float] | None = None
    ) -> None:
        self._folder = folder
        self._patience = patience
        self._clock = clock or time.monotonic
        self._work: _Work | None = None

    def start(self, write: Callable[[Progress], None]) -> None:
        """Begin to write on another thread; `settled` must have returned True."""
        self._work = work = _Work(self._clock(), self._folder)

        def progress(file: object) -> None:
            work.moved, work.file = self._clock(), file
            if work.hung and work.then is not None:
                raise CheckpointError("the trainer was shut down meanwhile")

        def run() -> None:
            try:
                write(progress)
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                work.error = error
            finally:
                work.done.set()
                if work.then is not None:
                    work.then()

        threading.Thread(target=run, name="steepest-keeping", daemon=True).start()

    def settled(self) -> bool:
        """Wait for what is being written while it makes progress; return whether it is over."""
        if (work := self._work) is None:
            return True
        work.awaited.set()
        while not work.done.wait(max(work.moved + self._patience - self._clock(), 0)):
            if self._clock() - work.moved >= self._patience:
                work.hung = True
                return False
        self._work = None
        if work.error is not None and not work.hung:
            raise work.error
        return True

    def pause(self, seconds: float) -> bool:
        """Return after so many seconds, or as soon as the trainer waits; on the writer's thread."""
        assert self._work is not None
        return self._work.awaited.wait(seconds)

    def where(self) -> str:
        """Return which file hangs, and since when, in words."""
        assert self._work is not None
        return (
            f"writing {self._work.file} has not got on for {self._clock() - self._work.moved:.0f} "
            f"s (Checkpoints(write_timeout={self._patience:g})): is its disk there?"
        )

    def end(self, then: Callable[[], None]) -> None:
        """Write nothing more; what hangs is given up if it ever makes progress."""
        if (work := self._work) is None:
            then()
            return
        work.then = then
        if work.done.is_set():
            then()
