"""Processes whose driver is stopped for ever, or cut off, end by themselves; a short absence costs nothing."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import ray

from steepest import DeadlineConfig, DistributedSGD
from steepest.errors import ConfigurationError
from steepest.runtime.job_runtime import JobRuntime, using
from steepest.runtime.lease import DriverLease, wait_for_silence
from steepest.testing import linear_model_creator


class Words:
    """Waits that end as they are told to; what is heard stays until it is cleared."""

    def __init__(self, heard: Iterable[bool]) -> None:
        self.heard = list(heard)
        self.waits: list[float] = []
        self.kept = False

    def wait(self, timeout: float) -> bool:
        self.waits.append(timeout)
        self.kept |= self.heard.pop(0)
        return self.kept

    def clear(self) -> None:
        self.kept = False


@pytest.mark.parametrize("before", [[], [True], [False] * 9 + [True], [False, True] * 30])
def test_only_silence_without_a_break_ends_it(before: list[bool]) -> None:
    words = Words([*before, *[False] * 10])
    wait_for_silence(words, 600.0)
    assert words.heard == []
    assert set(words.waits) == {60.0}


class Handle:
    """Of a process, which counts its calls."""

    def __init__(self, fails: bool = False) -> None:
        self.calls, self.fails = [0], fails


class Here:
    """A runtime that calls such processes."""

    is_up = True

    def call(self, process: Handle, method: str) -> None:
        assert method == "renew_lease"
        process.calls[0] += 1
        if process.fails:
            raise RuntimeError("Ray has ended")


def test_every_process_that_is_still_known_hears_from_the_driver() -> None:
    here = Here()
    driver = DriverLease(1e9)  # whose thread never comes to it by itself
    handles = [Handle(fails=True), Handle(), Handle()]
    for index in range(3):
        driver.add(handles[index])
    calls = [handle.calls for handle in handles]
    with using(cast("JobRuntime", here)):
        driver._renew()
        assert calls == [[1], [1], [1]]
        dropped = weakref.ref(handles.pop())
        assert dropped() is None, "a lease keeps no process"
        here.is_up = False
        driver._renew()
        assert calls == [[1], [1], [1]], "a call would begin Ray"
        here.is_up = True
        driver._renew()
        assert calls == [[2], [2], [1]]
    driver.end()


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), None])
def test_a_lease_has_a_length(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="^DeadlineConfig driver="):
        DeadlineConfig(driver=wrong)


# -- on Ray -----------------------------------------------------------------------------------------

DRIVER = """
import sys
from steepest import DeadlineConfig, DistributedSGD, RunConfig
from steepest.testing import linear_model_creator

if __name__ == "__main__":
    run_config = RunConfig(deadlines=DeadlineConfig(driver=float(sys.argv[1])))
    with DistributedSGD(linear_model_creator(), num_workers=2, run_config=run_config) as sgd:
        sgd.step()
        places = sgd._live().places.values()
        print(*(f"{place.pid}:{','.join(place.logs)}" for place in places), flush=True)
        sys.stdin.readline()
        sgd.fit(steps=5, progress=False)
        print(sgd.stats().step, sgd.stats().replaced, flush=True)
"""


class Driver:
    """A driver in a process of its own, which trains, idles until it is told to go on, and trains again."""

    def __init__(self, program: Path, seconds: float) -> None:
        address = ray.get_runtime_context().gcs_address
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(seconds)], stdin=subprocess.PIPE, text=True,
            stdout=subprocess.PIPE, env={**os.environ, "RAY_ADDRESS": address},
        )  # fmt: skip

    def processes(self) -> dict[int, list[Path]]:
        """The log files of each process of its job, by id."""
        assert self.process.stdout is not None
        found = (pair.split(":") for pair in self.process.stdout.readline().split())
        return {int(pid): [Path(log) for log in logs.split(",")] for pid, logs in found}

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def has_ended(pid: int, seconds: float) -> bool:
    """Whether a process ends within so many seconds."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
def test_processes_of_a_driver_that_is_stopped_end_and_others_do_not(tmp_path: Path) -> None:
    program = tmp_path / "driver.py"
    program.write_text(DRIVER)
    stopped, idle, patient = drivers = [Driver(program, seconds) for seconds in (3, 3, 600)]
    try:
        ends, *stay = (driver.processes() for driver in drivers)
        assert [len(processes) for processes in (ends, *stay)] == [3, 3, 3]
        for driver in (stopped, patient):
            driver.process.send_signal(signal.SIGSTOP)
        assert all(has_ended(pid, 60.0) for pid in ends)
        assert not any(has_ended(pid, 0.0) for processes in stay for pid in processes)
        for pid, logs in ends.items():
            told = "".join(log.read_text() for log in logs)
            line = f"(pid {pid}) has heard nothing from the driver for 3 s"
            assert told.count(line) == 1, told
        patient.process.send_signal(signal.SIGCONT)
        for driver in (idle, patient):
            output, _ = driver.process.communicate("go on\n", timeout=60)
            assert output == "6 0\n"
            assert driver.process.returncode == 0
        assert stopped.process.poll() is None, "else Ray has ended its processes"
    finally:
        for driver in drivers:
            driver.end()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_trainer_that_is_shut_down_leaves_no_thread() -> None:
    before = threads()
    with DistributedSGD(linear_model_creator(), num_workers=1):
        (own,) = threads() - before
    own.join(10.0)
    assert not own.is_alive()


def threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "steepest lease"}
