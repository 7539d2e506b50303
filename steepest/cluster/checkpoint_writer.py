"""Checkpoints written beside training, which a disk that hangs neither stops nor keeps from ending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from steepest.errors import CheckpointError
from steepest.tensors.safetensors_file import Progress


@dataclass(eq=False)
class _Work:
    moved: float  # when it last got on
    file: Path
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    hung: bool = False  # whether it was given up waiting for
    then: Callable[[], None] | None = (
        None  # what to do when it is over; nobody waits for it any more
    )


class Writer:
    """Writes one thing at a time, on a thread that does not keep the interpreter from ending.

    A thread that hangs in a system call cannot be ended: it is left behind, and nothing else is
    written until it returns.

    Args:
        folder: where it writes, for messages.
        patience: seconds in which it may get nowhere.
        clock: in seconds.
    """

    def __init__(
        self, folder: Path, patience: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._patience = patience
        self._clock = clock
        self._work: _Work | None = None

    def start(self, write: Callable[[Progress], None]) -> None:
        """Has something written; `settled` must have been true.

        Args:
            write: calls its argument with the file that it works on, whenever it gets on.
        """
        self._work = work = _Work(self._clock(), self._folder)

        def progress(file: Path) -> None:
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
        """Waits for what is being written, as long as it gets on; whether it is done.

        Raises:
            What came of it, unless it was given up waiting for before.
        """
        if (work := self._work) is None:
            return True
        while not work.done.wait(max(work.moved + self._patience - self._clock(), 0)):
            if self._clock() - work.moved >= self._patience:
                work.hung = True
                return False
        self._work = None
        if work.error is not None and not work.hung:
            raise work.error
        return True

    def where(self) -> str:
        """What hangs, in words."""
        assert self._work is not None
        return (
            f"writing {self._work.file} has not got on for {self._clock() - self._work.moved:.0f} "
            f"s (Checkpoints(write_timeout={self._patience:g})): is its disk there?"
        )

    def end(self, then: Callable[[], None]) -> None:
        """Nothing else will be written; what hung is given up, should it ever get on.

        Args:
            then: called when nothing is being written; perhaps twice, perhaps on another thread,
                perhaps never.
        """
        if (work := self._work) is None:
            then()
            return
        work.then = then
        if work.done.is_set():
            then()
