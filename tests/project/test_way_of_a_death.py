"""docs/explanation/ways.md lists the files of a death's way: exactly those that a trace of one passes through."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import pytest

from steepest import Callback, DistributedSGD, StepResult
from tests.reference import Task, samples
from tests.simulation.run import Simulation, run_config
from tests.simulation.virtual_threads import _Carrier
from tests.socket_jobs import running, steps
from tests.struck_jobs import DIED, timed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "steepest"
PACKAGES = (
    "driver",
    "recovery",
    "state",
    "runtime",
    "engine",
    "aggregation",
    "protocol",
    "transport",
)
STEP_SECONDS = 0.3
DIES_AT = 12  # the driver has looked at its processes by then, and taken copies of the state
TASK = timed(Task(data=samples(24)), STEP_SECONDS)


class Trace:
    """The files in which a function is entered for the first time after `begin`, or calls such a one.

    Attributes:
        way: those files, each with the process that was there first, in order.
        functions: the names of such functions, by file.
        heard: that the coordinator has heard of a death.
    """

    def __init__(self, process: Callable[[], str | None]) -> None:
        self.way: dict[str, str] = {}
        self.functions: dict[str, set[str]] = {}
        self.heard = threading.Event()
        self._process = process  # of the calling thread; None if its calls do not count
        self._known: set[CodeType] = set()
        self._files: dict[CodeType, str] = {}
        self._begun = self._ended = False

    def begin(self) -> None:
        """List from now on what is entered that was not entered before."""
        self._begun = True

    def end(self) -> None:
        """List no more."""
        self._ended = True

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Take note of a call, see `sys.setprofile`."""
        code, caller = frame.f_code, frame.f_back
        if event != "call" or self._ended or code in self._known or not self._file(code):
            return
        if (process := self._process()) is None:
            return
        self._known.add(code)
        if self._begun:
            for each in (code,) if caller is None else (caller.f_code, code):
                if file := self._file(each):
                    self.way.setdefault(file, process)
                    self.functions.setdefault(file, set()).add(each.co_name)
            if code.co_name == "lost" and self._file(code) == "core/engine/coordinator_role.py":
                self.heard.set()

    def _file(self, code: CodeType) -> str:
        """Return the file of a function of one of the packages; empty for others."""
        if (file := self._files.get(code)) is None:
            path = Path(code.co_filename)
            inside = path.is_relative_to(PACKAGE) and path.parent.name in PACKAGES
            self._files[code] = file = str(path.relative_to(PACKAGE)) if inside else ""
        return file


@contextmanager
def traced(trace: Trace) -> Iterator[None]:
    """Give a trace the calls of this thread and of those that start in a block."""
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class Death(Callback):
    """Kills a process at a step, and traces what follows until a step is committed after the change."""

    def __init__(self, simulation: Simulation, trace: Trace, name: str) -> None:
        self.simulation, self.trace, self.name = simulation, trace, name
        self.has_died = self.is_over = False

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        if not self.has_died and result.step >= DIES_AT:
            self.has_died = True
            (victim,) = [p for p in self.simulation.living() if self.name in str(p)]
            self.trace.begin()
            self.simulation.world.kill(victim, DIED)
        elif self.is_over:
            self.trace.end()


class Over(logging.Handler):
    """Hears the record of a change."""

    def __init__(self, death: Death) -> None:
        super().__init__()
        self.death = death

    def emit(self, record: logging.LogRecord) -> None:
        self.death.is_over = True


def trace_of(name: str, seed: int = 1) -> Trace:
    """The trace of a process' death in a simulated job, less what the job's start and steps enter."""
    simulation = Simulation(seed)

    def process() -> str | None:
        thread = simulation.scheduler.current
        return None if thread.doomed else "driver" if thread.owner is None else thread.owner.name

    trace = Trace(process)
    death = Death(simulation, trace, name)
    changes, over = logging.getLogger("steepest.changes"), Over(death)
    before = changes.level
    changes.addHandler(over)
    changes.setLevel(logging.INFO)
    try:
        with pytest.MonkeyPatch.context() as patch, traced(trace), simulation.running():
            patch.setattr(_Carrier, "idle", [])  # other threads than those of earlier simulations
            with DistributedSGD(
                TASK.creator(), 2, strategy="ps", run_config=run_config()
            ) as trainer:
                trainer.fit(steps=DIES_AT + 20, callbacks=[death], progress=False)
    finally:
        changes.removeHandler(over)
        changes.setLevel(before)
    assert death.is_over
    return trace


def trace_through_sockets() -> Trace:
    """The trace of a server's process when that of a worker ends; channels are sockets."""

    def process() -> str | None:
        name = threading.current_thread().name
        return name if name == "process of server 0" else None

    trace = Trace(process)
    with traced(trace), running("ps") as (router, client):
        steps(router, client, 3)
        trace.begin()
        router.stop()
        assert trace.heard.wait(60.0)
        trace.end()
    return trace


class Traces(NamedTuple):
    """Of the death of a worker, with sockets and in a simulation, and of that of a server.

    A server's way is longer if processes answer late, which is chance: `another` is a second one.
    """

    sockets: Trace
    worker: Trace
    server: Trace
    another: Trace

    @property
    def way(self) -> dict[str, str]:
        """The files of a worker's death."""
        transport = [file for file in self.sockets.way if file.startswith("core/transport/")]
        return dict.fromkeys(transport, "sockets") | self.worker.way


@pytest.fixture(scope="module")
def traces() -> Traces:
    return Traces(
        trace_through_sockets(), trace_of("worker 1"), trace_of("server 0"), trace_of("server 0", 3)
    )


def listed() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The files that docs/explanation/ways.md lists for deaths of a worker and of a server, with functions."""
    page = (ROOT / "docs" / "explanation" / "ways.md").read_text()
    (section,) = re.findall(r"## The way of a death\n(.*?)\n## ", page, re.DOTALL)
    item = re.compile(r"^\d+\. `steepest/([\w/.]+)` \((.*?)\):", re.MULTILINE)
    worker, server = (
        [(file, re.findall(r"`(\w+)`", names)) for file, names in item.findall(part)]
        for part in section.split("\nA server's death")
    )
    assert len({file for file, _ in worker + server}) == len(worker + server)
    return dict(worker), dict(server)


def check(found: list[str], way: dict[str, str]) -> None:
    """Check that a list has exactly the files of a way, those of each process in their order."""
    assert sorted(found) == sorted(way), {*found} ^ {*way}
    for process in {*way.values()}:
        its = [file for file in way if way[file] == process]
        assert [file for file in found if file in its] == its


def test_the_listed_way_of_a_workers_death_is_the_traced_way(traces: Traces) -> None:
    check(list(listed()[0]), traces.way)


def test_a_servers_death_enters_the_listed_files_besides(traces: Traces) -> None:
    both = {file: who for file, who in traces.server.way.items() if file in traces.another.way}
    check(list(listed()[1]), {file: who for file, who in both.items() if file not in traces.way})


def test_deaths_enter_the_listed_functions(traces: Traces) -> None:
    worker, server = listed()
    for file, names in {**worker, **server}.items():
        entered = set().union(*(trace.functions.get(file, set()) for trace in traces))
        assert names, file
        assert {*names} <= entered, (file, entered)
