"""A disk that hangs: training goes on without the checkpoint, says which file, and ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from steepest import Checkpoints, StepResult
from steepest.checkpoint import files
from steepest.checkpoint.files import Checkpoint
from steepest.errors import CheckpointError, ConfigurationError
from steepest.observe.history import History
from steepest.runtime.driver.checkpoint_manager import CheckpointManager
from steepest.runtime.driver.checkpoint_writer import Writer
from steepest.runtime.driver.directory_lock import DirectoryLock
from steepest.runtime.owner import Owner
from steepest.runtime.state.row_read import RowRead
from steepest.tables.job.row_messages import Bases
from tests.checkpoint.kept_checkpoints import kept
from tests.checkpoint_contents import content, layouts
from tests.each_moment import each_moment


@dataclass
class Job:
    """What is asked of a job that is trained."""

    step: int = 0
    running: bool = False
    last: StepResult | None = None
    history: History = field(default_factory=History)
    given_up: list[int] = field(
        default_factory=list
    )  # steps at which rows were not awaited any more

    owner: Owner = field(default_factory=Owner)

    @property
    def version(self) -> int:
        return self.step

    def surviving(self, read: Callable[[], Any]) -> Any:
        return read()

    def collect(self, since: Bases = ()) -> tuple[Checkpoint, RowRead]:
        rows = RowRead(layouts()[0], None, give_up=lambda: self.given_up.append(self.step))
        return content(float(self.step), self.step), rows


@dataclass
class Disk:
    """Hangs when told to, wherever a checkpoint is written."""

    now: float = 0.0
    works: threading.Event = field(default_factory=threading.Event)
    stuck: threading.Event = field(default_factory=threading.Event)
    over: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    error: OSError | None = None

    def clock(self) -> float:
        """Hours pass as soon as it hangs."""
        if self.stuck.is_set() and not self.works.is_set():
            self.now += 1000
        return self.now

    def hang(self) -> None:
        self.works.clear()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk, original = Disk(), files.write
    disk.works.set()

    def write(path: Path, saved: Checkpoint, progress: Any) -> None:
        try:
            progress(path / "weights")
            if not disk.works.is_set():
                disk.stuck.set()
                assert disk.works.wait(60)
                disk.stuck.clear()
                if disk.error is not None:
                    raise CheckpointError("cannot write") from disk.error
            original(path, saved, progress)
        finally:
            disk.over.release()

    monkeypatch.setattr(files, "write", write)
    yield disk
    disk.works.set()


def keeping(path: Path, disk: Disk, job: Job) -> CheckpointManager:
    policy = Checkpoints(path, every=10)
    lock = DirectoryLock(policy)
    return CheckpointManager(policy, lock, job, job, job, disk.clock)  # type: ignore[arg-type]


def reach(job: Job, found: CheckpointManager, disk: Disk, step: int) -> None:
    job.step = step
    found.keep_if_due()
    if not disk.works.is_set() and not disk.stuck.is_set():
        assert disk.stuck.wait(60)


@pytest.mark.parametrize("error", [None, OSError(116, "Stale file handle")])
def test_training_goes_on_and_what_is_due_later_is_kept(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture, error: OSError | None
) -> None:
    job = Job()
    found = keeping(tmp_path, disk, job)
    reach(job, found, disk, 10)
    assert disk.over.acquire(timeout=60)
    disk.hang()
    with found.at_end():
        for step in (20, 30, 40):
            reach(job, found, disk, step)
        told = [
            record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
        ]
        assert ["step 30" in told[0], "step 40" in told[1], len(told)] == [True, True, 2]
        assert all(f"{tmp_path}/000002-step-20/weights" in line for line in told)
        assert job.given_up == [30, 40]  # servers keep nothing more for what hangs
        disk.error = error
        disk.works.set()
        assert disk.over.acquire(timeout=60)  # it has come back
        assert found._keeper is not None
        assert found._keeper._writer._work is not None
        assert found._keeper._writer._work.over.wait(60)
        reach(job, found, disk, 50)
    assert kept(tmp_path) == ([10, 50] if error else [10, 20, 50])
    found.close(None)


def test_the_end_does_not_wait_for_ever_and_says_what_is_not_kept(
    tmp_path: Path, disk: Disk
) -> None:
    job, before = Job(), set(threading.enumerate())
    found = keeping(tmp_path, disk, job)
    disk.hang()
    reach(job, found, disk, 10)
    job.step = 15
    for _ in range(2):
        with (
            pytest.raises(CheckpointError, match=rf"writing {tmp_path}/000001-step-10/weights"),
            found.at_end(),
        ):
            pass
    with pytest.raises(CheckpointError, match="write_timeout=600"):
        found.close(None)
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    with pytest.raises(
        CheckpointError, match="keeps its own there"
    ):  # what hangs may yet write there
        DirectoryLock(Checkpoints(tmp_path))
    disk.works.set()
    assert disk.over.acquire(timeout=60)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert kept(tmp_path) == []  # what nobody waits for any more is not left half written
    DirectoryLock(Checkpoints(tmp_path)).release()


def test_with_another_error_the_end_is_quiet(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    found = keeping(tmp_path, disk, job)
    disk.hang()
    reach(job, found, disk, 10)
    with pytest.raises(KeyError), found.at_end():
        raise KeyError
    found.close(KeyError())
    assert "000001-step-10/weights" in caplog.text


def test_a_disk_that_is_slow_is_waited_for(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, original = Job(), files.write

    def slow(path: Path, saved: Checkpoint, progress: Any) -> None:
        for part in range(100):
            disk.now += 500
            progress(path / str(part))
        original(path, saved, progress)

    monkeypatch.setattr(files, "write", slow)
    found = keeping(tmp_path, disk, job)
    with found.at_end():
        for step in (10, 20, 30):
            reach(job, found, disk, step)
    assert kept(tmp_path) == [10, 20, 30]
    found.close(None)


@pytest.mark.parametrize("value", [0, -1.0, "600", float("nan"), float("inf"), True, None])
def test_the_deadline_is_checked(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="write_timeout"):
        Checkpoints("here", write_timeout=value)


def test_a_write_that_a_signal_interrupts_where_it_begins_or_is_awaited_is_made(
    tmp_path: Path,
) -> None:
    """Ctrl-C strikes at each moment of `start` and `settled`; nothing hangs, and what was begun is written."""
    writers: list[Writer] = []
    written: list[int] = []

    def prepare() -> Callable[[], object]:
        number = len(writers)
        writers.append(Writer(tmp_path, patience=60.0))
        writers[-1].start(lambda progress: None)  # which starts the thread
        assert writers[-1].await_write()

        def call() -> None:
            writers[-1].start(lambda progress: written.append(number))
            assert writers[-1].await_write()

        return call

    for _ in each_moment(prepare):
        begun = writers[-1]._work is not None
        assert writers[-1].await_write(), "nothing hangs"
        assert not begun or len(writers) - 1 in written
        writers[-1].end(lambda: None)
    writers[-1].end(lambda: None)
    assert len(writers) > 20
    assert len(set(written)) == len(written), "each once"
