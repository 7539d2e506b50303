"""Checkpoints written beside training; a disk that hangs blocks neither training nor shutdown."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from steepest.checkpoint import files
from steepest.checkpoint.directory import CheckpointDirectory
from steepest.checkpoint.files import Checkpoints
from steepest.core.system import system
from steepest.data.storage.blocks import Progress
from steepest.data.storage.places import place_of
from steepest.errors import CheckpointError, DeadlineError, PeerLostError, ShutdownError
from steepest.observe.history import History
from steepest.observe.history_file import RECORD, REPORTS, history_file
from steepest.runtime.answers import Answer
from steepest.runtime.driver.directory_lock import DirectoryLock
from steepest.runtime.state.row_read import RowRead, RowsAsTheyCome
from steepest.tables.job.row_messages import Bases

log = logging.getLogger(__name__)
# after each block of 4 MB, where there are rows of tables: they may be many GB
_PAUSE_SECONDS = 0.1


@dataclass(eq=False)
class _Writing:
    """One write in progress."""

    moved: float  # time of its last progress, by the writer's clock
    file: object  # the path or URL that was worked on then
    write: Callable[[Progress], None] | None  # None once it was called
    clock: Callable[[], float]
    over: Answer[None] = field(default_factory=lambda: Answer())
    awaited: Answer[None] = field(default_factory=lambda: Answer())  # once the trainer waits for it
    error: BaseException | None = None  # that ended it
    hung: bool = False  # whether the writer has given up waiting for it
    # what to do when it is over, once the trainer waits for it no more
    then: Callable[[], None] | None = None

    def progress(self, file: object) -> None:
        """Note that a file is being written."""
        self.moved, self.file = self.clock(), file
        if self.hung and self.then is not None:
            raise CheckpointError("the trainer was shut down meanwhile")

    def run(self) -> None:
        """Carry it out, unless that was done; on the writer's thread."""
        write, self.write = self.write, None
        if write is None:
            return
        try:
            write(self.progress)
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            self.error = error
        finally:
            self.over.set_result(None)
            if self.then is not None:
                self.then()


def _do_each(works: SimpleQueue[_Writing | None]) -> None:
    """Carry out one write after the other, until None comes."""
    while True:
        work = works.get()
        if work is None:
            return
        work.run()
        del work  # which holds a state


class Writer:
    """Carries out one write at a time, on a thread that does not keep the interpreter from ending.

    A thread that hangs in a system call cannot be ended: it is left behind, and nothing else is
    written until it returns. If a signal's handler raises in `start` or `settled`, the writer stays
    consistent: the next `settled` hands over a write that the thread has not received.
    """

    def __init__(
        self, folder: object, patience: float, clock: Callable[[], float] | None = None
    ) -> None:
        self._folder = folder
        self._patience = patience
        self._clock = clock or system().now
        self._work: _Writing | None = None
        self._works: SimpleQueue[_Writing | None] | None = None  # while a thread serves it

    def _served(self) -> SimpleQueue[_Writing | None]:
        """Return the queue of the thread, which is started if there is none."""
        if self._works is None:
            works: SimpleQueue[_Writing | None] = system().queue()
            try:
                system().start(partial(_do_each, works), "steepest-keeping")
                self._works = works
            except BaseException:
                works.put(None)
                raise
        return self._works

    def start(self, write: Callable[[Progress], None]) -> None:
        """Begin to write on another thread; `settled` must have returned True."""
        works = self._served()
        self._work = work = _Writing(self._clock(), self._folder, write, self._clock)
        works.put(work)

    def await_write(self) -> bool:
        """Wait for what is being written while it makes progress; return whether it is over."""
        if (work := self._work) is None:
            return True
        if work.write is not None:
            self._served().put(work)
        work.awaited.set_result(None)
        while not work.over.wait(max(work.moved + self._patience - self._clock(), 0)):
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
        """Write nothing more; a write that hangs is given up if it ever makes progress."""
        works, self._works = self._works, None
        if works is not None:
            works.put(None)
        if (work := self._work) is None:
            then()
            return
        work.then = then
        if work.over.done():
            then()


class _Chain(NamedTuple):
    """The checkpoint that the next one continues."""

    link: files.BaseLink
    place: Bases  # the instant of its rows
    increments: int  # since the last whole one


class _Unwritten(NamedTuple):
    """Rows that are not in their files, and the numbers to give to `wrote`."""

    history: tuple[list[dict[str, Any]], int]
    record: tuple[list[dict[str, Any]], int]
    reports: tuple[list[dict[str, Any]], int]


class CheckpointKeeper:
    """Writes checkpoints, and the rows of the history, to one directory beside training.

    If the next checkpoint is due before one is written, training waits for it: so memory holds one
    state at most, and a disk that is too slow is noticed.
    """

    def __init__(
        self,
        policy: Checkpoints,
        lock: DirectoryLock,
        history: History,
        clock: Callable[[], float] | None,
    ) -> None:
        folder = place_of(policy.path)
        self.shelf = CheckpointDirectory(folder, policy.keep)
        self.written: tuple[int, int] | None = None  # the state that is on disk, or need not be
        self.policy = policy
        self._lock = lock
        self._history = history
        self._file = history_file(folder)
        self._record_file = history_file(folder, RECORD)
        self._reports_file = history_file(folder, REPORTS)
        self._writer = Writer(folder, policy.write_timeout, clock)
        self._rows: RowRead | None = None  # those of the checkpoint that is being written
        self._chain: _Chain | None = None

    def resume_history(self, step: int, manifest: Mapping[str, Any], most: int) -> None:
        """Continue the history after the step of a checkpoint with this manifest; keep `most` rows in memory."""
        file = self._file
        try:
            rows = file.resume(step, most)
            file = self._record_file
            record = file.resume(step, most)
            file = self._reports_file
            reports = file.resume(step)
        except OSError as error:
            raise CheckpointError(f"cannot continue {file.path}: {error}") from error
        self._history.resume(step, manifest.get("runs") or {}, rows, record, manifest.get("behind"))
        self._history.reports.resume(reports)

    @property
    def since(self) -> Bases:
        """The instant since which the next checkpoint needs rows of tables; () for all."""
        return () if self._chain is None else self._chain.place

    def start(
        self,
        saved: files.Checkpoint,
        rows: RowRead,
        place: tuple[int, int],
        began: float,
        best: int | None,
    ) -> None:
        """Begin to write a state, for which training has paused."""
        history, paused = self._unwritten(), system().now() - began
        try:
            self._rows, self.written = rows, place
            self._writer.start(
                lambda progress: self._write(saved, rows, history, paused, best, progress)
            )
        except BaseException:  # of a signal's handler: it is not known whether it will be written
            self.written = None
            raise

    def start_history(self) -> None:
        """Begin to write the rows of the history that no checkpoint was written after."""
        rows = self._unwritten()
        if any(unwritten for unwritten, _ in rows):
            self._writer.start(lambda progress: self._write_history(rows, self._held(progress)))

    def _unwritten(self) -> _Unwritten:
        history = self._history
        of_loops = history.reports.unwritten()
        return _Unwritten(history.unwritten(), history.record.unwritten(), of_loops)

    def await_write(self) -> bool:
        """Wait for what is being written, and raise its error; return whether nothing hangs."""
        settled = False
        try:
            settled = self._writer.await_write()
        finally:
            if not settled:
                self.written = None
                if self._rows is not None:
                    self._rows.give_up()
        return settled

    def require_written(self) -> None:
        """Wait for what is being written; raise CheckpointError if it hangs."""
        if not self.await_write():
            raise CheckpointError(f"the last state is not kept: {self.where()}")

    def where(self) -> str:
        """Return which file hangs, and since when, in words."""
        return self._writer.where()

    def end(self) -> None:
        """Write nothing more, and release the directory when no write is going on."""
        self._writer.end(self._lock.release)  # what hangs may yet write there

    # -- on the writer's thread ------------------------------------------------------------------

    def _write(
        self,
        saved: files.Checkpoint,
        rows: RowRead,
        history: _Unwritten,
        paused: float,
        best: int | None,
        progress: Progress,
    ) -> None:
        """Write a checkpoint; log how long it took."""
        step, began, chain = saved.about["step"], system().now(), self._chain

        def paced(file: object) -> None:
            """Note progress, and leave training the processor for a while."""
            held(file)
            self._writer.pause(_PAUSE_SECONDS)

        def awaited() -> bool:
            self._lock.check()
            return self._writer.pause(0.0)

        held = self._held(progress)
        try:
            with rows.given_up_on_error():
                self._write_history(history, held)  # before, so that no row is missing
                streamed = RowsAsTheyCome(rows, awaited, None if chain is None else chain.link)
                pace = held if rows.snapshot is None else paced
                path, link = self.shelf.put(replace(saved, rows=streamed), pace, best)
        except (PeerLostError, ShutdownError, DeadlineError) as error:  # of servers that send rows
            self.written = None
            log.warning("the checkpoint of step %d is not kept, training goes on: %s", step, error)
            return
        except BaseException as error:
            log.error("the checkpoint of step %d is not kept: %s", step, error)
            raise
        increments = chain.increments + 1 if chain and streamed.changes else 0
        whole = not streamed.place or increments >= self.policy.increments  # the next one
        self._chain = None if whole else _Chain(link, streamed.place, increments)
        written = system().now() - began
        self._history.record.kept(step, paused, written)
        log.info("%s: training paused for %.3f s, written in %.3f s", path, paused, written)

    def _write_history(self, rows: _Unwritten, progress: Progress) -> None:
        record, reports = self._history.record, self._history.reports
        for file, (unwritten, number), of in (
            (self._file, rows.history, self._history),
            (self._record_file, rows.record, record),
            (self._reports_file, rows.reports, reports),
        ):
            if unwritten or of is self._history:
                progress(file.path)
                try:
                    file.append(unwritten)
                except OSError as error:
                    raise CheckpointError(f"cannot write {file.path}: {error}") from error
                of.wrote(number)

    def _held(self, progress: Progress) -> Progress:
        """Return a function that notes progress, and ends a write when the lease is lost."""

        def held(file: object) -> None:
            progress(file)
            self._lock.check()

        return held
