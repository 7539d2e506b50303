"""Two drivers do not keep checkpoints in one directory: the second is refused, until the first has ended or died."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import pytest

from steepest import Checkpoints, DistributedSGD
from steepest.errors import CheckpointError
from steepest.runtime.driver.directory_lock import LOCK, DirectoryLock
from steepest.testing import linear_model_creator
from tests.processes import Child


def hold(pipe: Pipe, path: Path, how: str) -> None:
    """Holds the directory until it is killed, or its pipe closed."""
    lock = DirectoryLock(Checkpoints(path))
    if how == "alone" or not os.fork():  # with a child it is the child that speaks, and lives on
        pipe.send("held")
    pipe.poll(None)
    lock.release()


@contextmanager
def holder(path: Path, how: str = "alone") -> Iterator[Child]:
    """Another process that holds the directory."""
    process = Child(hold, path, how)
    try:
        assert process.hear() == "held"
        yield process
    finally:
        process.kill()


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["alone", "fork"])
def test_a_second_driver_is_refused_until_the_first_is_killed(tmp_path: Path, how: str) -> None:
    path, policy = tmp_path / "deep" / "down", Checkpoints(tmp_path / "deep" / "down")
    with holder(path, how) as process:
        for _ in range(2):  # who was refused leaves no trace
            with pytest.raises(CheckpointError) as caught:
                DirectoryLock(policy)
        said = str(caught.value)
        assert f"{path}: process {process.pid} on {os.uname().nodename} keeps its own there" in said
        assert "give this run another path" in said
        process.process.kill()
        process.process.join()
        lock = DirectoryLock(policy)  # at once
        assert (path / LOCK).read_text() == f"process {os.getpid()} on {os.uname().nodename}"
    lock.release()
    lock.release()
    DirectoryLock(policy).release()


def test_a_trainer_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("steepest.runtime.driver.trainer.Cluster", start)
    held = DirectoryLock(Checkpoints(tmp_path))
    with pytest.raises(CheckpointError, match="give this run another path"):
        DistributedSGD(linear_model_creator(), checkpoints=Checkpoints(tmp_path))
    held.release()
    with pytest.raises(ZeroDivisionError):
        DistributedSGD(linear_model_creator(), checkpoints=Checkpoints(tmp_path))
    DirectoryLock(Checkpoints(tmp_path)).release()  # what could not start holds nothing


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS])
def test_without_locks_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    DirectoryLock(Checkpoints(tmp_path)).release()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{tmp_path} is on a file system without locks" in record.getMessage()


def test_a_directory_that_cannot_be_used_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        with pytest.raises(CheckpointError, match=f"{tmp_path}.*Input/output error"):
            DirectoryLock(Checkpoints(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"cannot keep checkpoints in {tmp_path / 'file'}"):
        DirectoryLock(Checkpoints(tmp_path / "file"))
    DirectoryLock(None).release()


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_a_trainer_holds_its_directory_until_it_is_shut_down(tmp_path: Path) -> None:
    def trainer() -> DistributedSGD:
        return DistributedSGD(linear_model_creator(), checkpoints=Checkpoints(tmp_path))

    first = trainer()
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on"):
        trainer()
    first.fit(steps=2, progress=False)
    first.shutdown()
    with trainer() as second:
        assert second.stats().step == 2
