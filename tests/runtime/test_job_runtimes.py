"""What every `JobRuntime` does: processes of this machine, Ray's, and simulated ones."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steepest.core.system import system
from steepest.runtime.job_runtime import (
    Call,
    CallRaisedError,
    JobRuntime,
    LateError,
    ProcessDiedError,
    runtime,
    using,
)
from steepest.runtime.machine.runtime import MachineRuntime
from tests.simulation.run import Simulation

SECONDS = 60.0


class Body:
    """A body for tests."""

    def __init__(self, name: str, first: int) -> None:
        if first < 0:
            raise ValueError("no body with a negative number")
        self.numbers = [first]
        self.come = system().event()

    def file_of(self, function: Any) -> str:
        return str(function.__code__.co_filename)

    def stay(self) -> None:
        """Return never."""
        system().event().wait()

    def add(self, number: int) -> list[int]:
        self.numbers.append(number)
        return sorted(self.numbers)

    def ask(self) -> bool:
        """Wait for `answer`, which another call says meanwhile."""
        return self.come.wait(SECONDS)

    def answer(self) -> None:
        self.come.set()

    def ones(self, count: int) -> np.ndarray[Any, Any]:
        return np.ones(count)

    def sum(self, *arrays: np.ndarray[Any, Any]) -> float:
        """Write to arrays that came as arguments; return the sum of all their elements."""
        for array in arrays:
            total = array.copy()
            total += 1.0
        return float(sum(array.sum() for array in arrays))

    def kept(self, count: int) -> Call:
        """Return a value that is kept here until somebody asks for it."""
        return runtime().put((np.ones(count),))

    def fail(self) -> None:
        raise KeyError("no such key")

    def unsendable(self) -> Any:
        return threading.Lock()

    def end(self, status: int) -> None:
        runtime().exit(status)

    def pid(self) -> int:
        return runtime().pid

    def say(self, words: str) -> None:
        print(words)  # noqa: T201
        print(words, file=sys.stderr, end="")  # noqa: T201


@contextlib.contextmanager
def on_processes(own: MachineRuntime | None = None) -> Iterator[JobRuntime]:
    """A runtime with a template of its own, or that of all tests."""
    here = own or MachineRuntime()
    with using(here):
        here.connect()
        try:
            yield here
        finally:
            if own is None:
                here.close()
            else:
                here.shutdown()


@contextlib.contextmanager
def on_a_simulation() -> Iterator[JobRuntime]:
    with Simulation(1).running() as simulation:
        simulation.runtime.connect()
        yield simulation.runtime


@contextlib.contextmanager
def on_ray() -> Iterator[JobRuntime]:
    from steepest.runtime.ray_runtime import RayRuntime

    own = RayRuntime()
    with using(own):
        yield own


def test_a_signal_is_named_and_all_that_was_printed_is_there(
    machine_of_session: MachineRuntime, capsys: pytest.CaptureFixture[str]
) -> None:
    with on_processes(machine_of_session) as here:
        group = here.ask([{"CPU": 1.0}], "PACK")
        process = here.start(Body, ["steepest worker 1", 1], (group, 0), cpus=1, gpus=0, calls=4)
        stays, pid = here.call(process, "stay"), here.call(process, "pid").get(SECONDS)
        assert Path(f"/proc/{pid}/comm").read_text() == "steepest:w1\n"
        here.call(process, "say", "first").get(SECONDS)
        here.show_output([process])
        assert capsys.readouterr().out == "[worker 1] first\n"
        here.call(process, "say", "last").get(SECONDS)
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(ProcessDiedError, match="killed by SIGTERM"):
            stays.get(SECONDS)
        assert here.last_lines(here.node, pid, ()) == ["first", "last", "firstlast"]
    assert capsys.readouterr() == ("[worker 1] last\n", "[worker 1] firstlast\n")


def test_more_large_values_travel_in_a_message_than_descriptors_with_a_byte(
    machine_of_session: MachineRuntime,
) -> None:
    with on_processes(machine_of_session) as here:
        group = here.ask([{"CPU": 1.0}], "PACK")
        process = here.start(Body, ["steepest worker 1", 1], (group, 0), cpus=1, gpus=0, calls=4)
        value = here.put(np.ones(1 << 17))  # one memory, a descriptor for each time it is given
        assert here.call(process, "sum", *[value] * 300).get(SECONDS) == 300 << 17


@pytest.mark.long
def test_the_end_of_the_template_is_told() -> None:
    with on_processes() as here:
        group = here.ask([{"CPU": 1.0}], "PACK")
        process = here.start(Body, ["steepest worker 1", 1], (group, 0), cpus=1, gpus=0, calls=4)
        here.call(process, "pid").get(SECONDS)
        assert isinstance(here, MachineRuntime)
        assert here._template is not None
        os.kill(here._template._process.pid, signal.SIGKILL)
        with pytest.raises(ProcessDiedError, match="that forks them is gone: it was killed by SIG"):
            here.call(process, "stay").get(SECONDS)
        successor = here.start(Body, ["steepest worker 1", 1], (group, 0), cpus=1, gpus=0, calls=4)
        assert here.call(successor, "add", 2).get(SECONDS) == [1, 2]


@pytest.mark.long
def test_nothing_stays_when_a_runtime_ends() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with on_processes() as here:
        group = here.ask([{"CPU": 1.0}] * 64, "PACK")  # more than there are cores
        process = here.start(Body, ["steepest worker 1", 1], (group, 9), cpus=1, gpus=0, calls=4)
        here.call(process, "ones", 300_000).get(SECONDS)
        pid = here.call(process, "pid").get(SECONDS)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture(
    scope="module", params=["processes", "simulation", pytest.param("ray", marks=pytest.mark.ray)]
)
def here(request: pytest.FixtureRequest) -> Iterator[JobRuntime]:
    """Each runtime in turn: real threads take no time of a simulation."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    machine = request.getfixturevalue("machine_of_session")
    worlds = {
        "processes": partial(on_processes, machine),
        "simulation": on_a_simulation,
        "ray": on_ray,
    }
    with worlds[request.param]() as found:
        yield found


Start = Callable[..., Any]


@pytest.fixture
def start(here: JobRuntime) -> Iterator[Start]:
    groups = []

    def start(first: int = 1) -> Any:
        groups.append(here.ask([{"CPU": 1.0}], "PACK"))
        return here.start(
            Body, ["steepest worker 1", first], (groups[-1], 0), cpus=1, gpus=0, calls=4
        )

    yield start
    for group in groups:
        here.give_back(group)


def test_a_body_stays_from_call_to_call(here: JobRuntime, start: Start) -> None:
    process = start(2)
    calls = [here.call(process, "add", number) for number in (1, 3)]
    assert max(here.get(calls, SECONDS), key=len) == [1, 2, 3]


def test_calls_of_one_process_run_at_the_same_time(here: JobRuntime, start: Start) -> None:
    process = start()
    waiting = here.call(process, "ask")
    assert here.wait([waiting], 0.0) == []
    here.call(process, "answer")
    assert waiting.get(SECONDS) is True
    assert waiting.done()


@pytest.mark.parametrize("count", [3, 300_000])
def test_results_pass_from_process_to_process(here: JobRuntime, start: Start, count: int) -> None:
    one, other = start(), start()
    result, value = here.call(one, "ones", count), here.put(np.full(count, 2.0))
    assert here.call(other, "sum", result, value).get(SECONDS) == 3.0 * count
    (kept,) = here.call(one, "kept", count).get(SECONDS).get(SECONDS)
    assert kept.tolist() == [1.0] * count


def test_what_a_method_raises_is_the_cause(here: JobRuntime, start: Start) -> None:
    process = start()
    with pytest.raises(CallRaisedError, match="no such key") as caught:
        here.get([here.call(process, "ask"), here.call(process, "fail")], SECONDS)
    assert isinstance(caught.value.cause, KeyError)
    passed_on = here.call(process, "sum", here.call(process, "fail"))
    with pytest.raises(CallRaisedError) as caught:
        passed_on.get(SECONDS)
    assert isinstance(caught.value.cause, KeyError)
    with pytest.raises(CallRaisedError, match="pickle"):
        here.call(process, "unsendable").get(SECONDS)
    assert here.call(process, "add", 2).get(SECONDS) == [1, 2]


def test_a_function_by_value_knows_its_file(here: JobRuntime, start: Start) -> None:
    """So tracebacks of users' functions show their lines."""
    assert here.call(start(), "file_of", lambda: 0).get(SECONDS) == __file__


def test_a_late_call_goes_on(here: JobRuntime, start: Start) -> None:
    process = start()
    waiting = here.call(process, "ask")
    here.call(process, "add", 1).get(SECONDS)
    with pytest.raises(LateError):
        waiting.get(0.01)
    with pytest.raises(LateError):
        here.get([waiting], 0.01)
    here.call(process, "answer")
    assert here.wait([waiting], SECONDS, 1) == [waiting]


def test_the_dead_answer_no_more(here: JobRuntime, start: Start) -> None:
    one, other, unmade = start(), start(), start(-1)
    stays = [here.call(each, "stay") for each in (one, other)]
    here.call(one, "end", 3)
    with pytest.raises(ProcessDiedError, match="3"):
        stays[0].get(SECONDS)
    with pytest.raises(ProcessDiedError):
        here.call(one, "add", 1).get(SECONDS)
    here.end(other)
    with pytest.raises(ProcessDiedError):
        stays[1].get(SECONDS)
    with pytest.raises(ProcessDiedError, match="no body with a negative number"):
        here.call(unmade, "stay").get(SECONDS)


def test_processes_end_with_their_room(here: JobRuntime) -> None:
    group = here.ask([{"CPU": 1.0}, {"CPU": 1.0}], "PACK")
    process = here.start(Body, ["steepest worker 0", 1], (group, 1), cpus=1, gpus=0, calls=4)
    stays = here.call(process, "stay")
    here.call(process, "pid").get(SECONDS)
    assert here.is_placed(group)
    assert set(here.bundles(group).values()) <= set(here.nodes())
    here.give_back(group)
    with pytest.raises(ProcessDiedError):
        stays.get(SECONDS)
