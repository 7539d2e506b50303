"""The whole trainer in one process: driver, workers and servers as virtual threads, on virtual time.

What runs is what runs on Ray: `DistributedSGD`, recovery, each process with its router. They use a
`System` and a `JobRuntime` of the simulation's, which nothing passes by.
Everything that happens by chance is drawn from one seed, so the same seed gives the
same run.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import steepest
from steepest.core.system import system, using
from steepest.runtime import process
from steepest.runtime.job_runtime import using as using_runtime
from steepest.testing.groups import simulated
from tests.simulation.simulated_processes import Node, SimulatedProcess, World
from tests.simulation.simulated_runtime import SimulatedRuntime
from tests.simulation.virtual_primitives import Active, SystemByThread, VirtualSystem
from tests.simulation.virtual_threads import Scheduler, being_virtual

_PACKAGE = os.path.dirname(steepest.__file__) + os.sep
_TESTING = os.path.join(_PACKAGE, "testing") + os.sep


class Interruption:
    """An exception for the driver's main thread, see `Simulation.interrupt`.

    Attributes:
        waits: how often the thread has begun to wait since `Simulation.interrupt` was called.
        struck: whether the exception was raised.
        where: what the thread waited for then, and in which functions of steepest, the innermost
            last.
    """

    def __init__(self, at: int | None, when: Callable[[], object] | None, *, late: bool) -> None:
        self.waits = 0
        self.struck = False
        self.where = ""
        self._at, self._when, self._late = at, when, late

    def forget(self) -> None:
        """Raise nothing from now on; count on."""
        self._at = self._when = None

    def counts(self, *, over: bool) -> bool:
        """Count a wait that begins, or is over; return whether it is to be interrupted now."""
        self.waits += not over
        return self.waits == self._at and over == self._late

    def holds(self) -> bool:
        """Return whether the predicate holds."""
        return self._when is not None and bool(self._when())

    def strike(self, where: str) -> None:
        """Note where the exception is raised."""
        self.forget()
        self.struck, self.where = True, where


class Simulation:
    """A cluster of some nodes in which the calling thread is the driver of a job.

    Args:
        seed: of everything that happens by chance.
        cpus: of each node; the driver is on the first one.
        gpus: of each node, as many as Ray says.
        seconds: of virtual time that all may take.
        switches: from thread to thread that all may take.

    Attributes:
        world: the nodes and processes.
        runtime: where its jobs run.
        dice: draws the simulation's own chances.

    Example:
        >>> from steepest import DistributedSGD
        >>> from steepest.testing import linear_model_creator
        >>> from tests.simulation.run import Simulation, run_config
        >>> with Simulation(seed=1).running():
        ...     with DistributedSGD(linear_model_creator(), 2, run_config=run_config()) as trainer:
        ...         trainer.fit(steps=3, progress=False).step
        3
    """

    def __init__(
        self,
        seed: int = 0,
        cpus: tuple[int, ...] = (4, 4),
        seconds: float = 3600.0,
        switches: int = 60_000,
        gpus: int = 0,
    ) -> None:
        self.dice = random.Random(seed)
        self.scheduler = Scheduler(self.dice.getrandbits(32), seconds, switches)
        self.world = World(self.scheduler, random.Random(self.dice.getrandbits(32)), cpus)
        self.world.further = {"GPU": float(gpus)} if gpus else {}
        self.runtime = SimulatedRuntime(self.world)
        self._faults: dict[int, list[Callable[[], None]]] = {}  # by the number of an event
        self.world.on_event = self._strike
        self._interruptions: dict[Interruption, BaseException] = {}
        self._main = threading.get_ident()  # the real thread of the driver's main one
        self.scheduler.on_wait = self._count
        self.scheduler.on_switch = self._look

    @contextlib.contextmanager
    def running(self) -> Iterator[Simulation]:
        """Simulate what the calling thread does in a block; afterwards all processes have ended."""
        assert Active.scheduler is None, "another simulation runs"
        self._main = threading.get_ident()
        affinity, threads = os.sched_getaffinity(0), torch.get_num_threads()
        virtual = VirtualSystem(self.scheduler, self.dice.getrandbits(32))
        by_thread: Any = SystemByThread(virtual, system())
        with being_virtual(), using(by_thread), using_runtime(self.runtime), simulated_groups():
            Active.scheduler, Active.simulation = self.scheduler, self
            # the baton goes faster from thread to thread on one processor
            os.sched_setaffinity(0, {sorted(affinity)[_number_of_process() % len(affinity)]})
            try:
                yield self
            finally:
                try:
                    self.scheduler.end()
                finally:
                    Active.scheduler = Active.simulation = None
                    os.sched_setaffinity(0, affinity)
                    torch.set_num_threads(threads)

    # -- faults --------------------------------------------------------------------------------

    def at_event(self, after: int, strike: Callable[[], None]) -> None:
        """Let something happen after so many more messages, calls and ends of calls."""
        self._faults.setdefault(self.world.events + max(after, 1), []).append(strike)

    def at_time(self, after: float, strike: Callable[[], None]) -> None:
        """Let something happen after so many more seconds of virtual time."""
        self.scheduler.at(self.scheduler.now + after, strike)

    def forget_faults(self) -> None:
        """Let nothing more happen by `at_event` or `interrupt`."""
        self._faults.clear()
        self._interruptions.clear()

    def interrupt(
        self,
        at: int | None = None,
        *,
        when: Callable[[], object] | None = None,
        error: BaseException | type[BaseException] = KeyboardInterrupt,
        late: bool = False,
    ) -> Interruption:
        """Raise an exception in the driver's main thread once, as the handler of a signal would.

        The main thread is the one that called `running`. It raises the exception in the middle of
        what it waits for: a call, a lock, a future, a sleep. Other threads go on.

        Args:
            at: at which of the thread's waits from now on, counted from 1; with None and without
                `when` waits are only counted.
            when: asked whenever threads switch, must not block; the exception is raised when it
                first returns something true, in the wait that the thread is in.
            error: the exception.
            late: whether it comes when that wait is over, before its result is used, rather than
                when it begins. Only with `at`.

        Returns:
            what counts the waits, and notes where the thread was.
        """
        found = Interruption(at, when, late=late)
        self._interruptions[found] = error() if isinstance(error, type) else error
        return found

    def give_notice(self, node: Node, seconds: float | None = None) -> None:
        """Announce that a node will be taken away, as a cloud does; it is not taken away by this.

        Args:
            node: not the driver's.
            seconds: until then; None if that is not known.
        """
        self.runtime.notices[node.id] = 0.0 if seconds is None else self.scheduler.now + seconds

    def _count(self, over: bool) -> None:
        for each in tuple(self._interruptions):
            if each.counts(over=over):
                self._interrupt(each)

    def _look(self) -> None:
        for each in tuple(self._interruptions):
            if each.holds():
                self._interrupt(each)

    def _interrupt(self, interruption: Interruption) -> None:
        main = self.scheduler.main
        frame = sys._current_frames().get(self._main)
        stack = traceback.extract_stack(frame) if frame is not None else []
        functions = [
            f"{os.path.basename(each.filename)}:{each.lineno} {each.name}"
            for each in stack
            if each.filename.startswith(_PACKAGE) and not each.filename.startswith(_TESTING)
        ]
        interruption.strike(f"{main.waits_for}, in {' > '.join(functions[-8:])}")
        self.scheduler.throw(main, self._interruptions[interruption])

    def _strike(self) -> None:
        for strike in self._faults.pop(self.world.events, ()):
            strike()
        if self.scheduler.current.doomed and not self.scheduler.current.blocked:
            self.scheduler.unwind()

    # -- looking -------------------------------------------------------------------------------

    def living(self) -> list[SimulatedProcess]:
        """Return the processes that run and can be reached."""
        return [process for process in self.world.living() if process.where.reachable]

    def nodes(self) -> Sequence[Node]:
        """Return the nodes that run and can be reached, without the driver's."""
        return [node for node in self.world.nodes[1:] if node.alive and node.reachable]

    def threads(self) -> list[str]:
        """Return the names of the driver's threads that have not ended, without the main one."""
        main = self.scheduler.main
        return [thread.name for thread in self.scheduler.living(None) if thread is not main]

    def settle(self, seconds: float = 10.0) -> None:
        """Let what is under way come to its end, as after an interruption; faults still happen.

        Args:
            seconds: of virtual time.
        """
        self.scheduler.sleep(seconds)

    def leftovers(self, seconds: float = 60.0) -> list[SimulatedProcess]:
        """Return the processes that still run after `seconds` of virtual time, those out of reach too."""
        # After `shutdown`. The seconds are more than the driver's lease of its processes.
        self.scheduler.sleep(seconds)
        return self.world.living()


def _number_of_process() -> int:
    """Return another number in each process of tests that run beside each other."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    return int(worker.removeprefix("gw")) if worker else os.getpid()


@contextlib.contextmanager
def simulated_groups() -> Iterator[None]:
    """Have processes that are simulated add up gradients in simulated process groups."""
    before = process.EXTENSIONS
    process.EXTENSIONS = tuple(map(simulated, before))  # each simulation has groups of its own
    try:
        yield
    finally:
        process.EXTENSIONS = before


def running() -> Simulation | None:
    """Return the simulation that runs; None outside of any."""
    return Active.simulation


def pause(seconds: float) -> None:
    """Let virtual time pass, as a computation does; outside of simulations do nothing."""
    if Active.scheduler is not None:
        Active.scheduler.sleep(seconds)


def run_config(**settings: Any) -> Any:
    """Return a `RunConfig` for simulations: allocators of the C library are left alone.

    Args:
        settings: as of `RunConfig`.
    """
    from steepest.core.config.run import ResourceConfig, RunConfig

    return RunConfig(resources=ResourceConfig(keep_memory=False), **settings)
