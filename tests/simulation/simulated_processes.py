"""Simulated nodes and processes: started, killed, stopped and cut off on virtual time."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tests.simulation.simulated_channels import Wires
from tests.simulation.virtual_threads import Scheduler, VirtualThread, Waiters

_FIRST_PID = 100_000_000  # above all that a kernel gives: nothing real can be hit by mistake


@dataclass(eq=False)
class Node:
    """A machine.

    Attributes:
        id, host: its name for Ray, and its address.
        cpus: how many CPUs Ray may give away.
        reachable: whether its link works.
        alive: whether it runs.
        known_alive: whether Ray takes it for alive.
    """

    id: str
    host: str
    cpus: int
    reachable: bool = True
    alive: bool = True
    known_alive: bool = True


@dataclass(eq=False)
class SimulatedProcess:
    """A process of the job.

    Attributes:
        pid: of the process.
        where: its node.
        alive, stopped: whether it runs; whether it was stopped by a signal.
        name: in what is told of it.
        threads_free: calls that wait for one of its actor's threads.
    """

    world: World
    pid: int
    where: Node
    on_death: Callable[[str, bool], None]
    alive: bool = True
    stopped: bool = False
    name: str = ""
    threads_free: Waiters = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name} ({self.pid - _FIRST_PID})"

    @property
    def node(self) -> str:
        """The id of its node."""
        return self.where.id

    def spawn(self, body: Callable[[], None], name: str) -> VirtualThread:
        """Start a thread of the process."""
        return self.world.scheduler.spawn(body, f"{name} of {self}", self)


class World:
    """Nodes and processes; the driver is no process of these, and lives on the first node.

    Args:
        scheduler: the clock.
        dice: draws how long things take.
        cpus: of each node.

    Attributes:
        processes: all that were ever started, in order.
        events: calls and messages sent, and calls ended, so far.
        on_event: called at each of these.
        on_node_loss: called when Ray notices that a node is gone.
        starts: least and most seconds that a process takes to start.
        call_seconds: most seconds that a call, or its result, is on its way.
        notice, node_notice: most seconds after which Ray knows that a process, or a node, is gone.
    """

    def __init__(self, scheduler: Scheduler, dice: random.Random, cpus: tuple[int, ...]) -> None:
        self.scheduler, self.dice = scheduler, dice
        self.nodes = [
            Node(f"{number + 10:02x}" * 28, f"10.0.0.{number + 1}", count)
            for number, count in enumerate(cpus)
        ]
        self.processes: list[SimulatedProcess] = []
        self.events = 0
        self.on_event: Callable[[], None] = lambda: None
        self.on_node_loss: Callable[[Node], None] = lambda node: None
        self.starts = dice.choice(((0.01, 0.05), (0.2, 2.0)))
        self.call_seconds = dice.choice((1e-3, 2e-2))
        self.notice = dice.choice((1e-3, 0.1, 1.5))
        self.node_notice = dice.choice((1.0, 12.0))
        self.further: dict[str, float] = {}  # resources of each node, which are always free
        self._pids = itertools.count(_FIRST_PID)
        self.wires = Wires(scheduler, dice, self.here, self.reaches, self.event)

    # -- where -----------------------------------------------------------------------------------

    def here(self) -> SimulatedProcess | None:
        """Return the process of the thread that runs; None for the driver."""
        owner: SimulatedProcess | None = self.scheduler.current.owner
        return owner

    def here_node(self) -> Node:
        """Return the node of the thread that runs."""
        here = self.here()
        return self.nodes[0] if here is None else here.where

    def reaches(self, one: SimulatedProcess | None, other: SimulatedProcess | None) -> bool:
        """Return whether messages pass between two processes."""
        a, b = (self.nodes[0] if each is None else each.where for each in (one, other))
        return a is b or (a.reachable and b.reachable)

    # -- time ------------------------------------------------------------------------------------

    def event(self) -> None:
        """Count an event; the faults that are due at it happen."""
        if not self.scheduler.current.doomed:  # what the dead do counts no more
            self.events += 1
            self.on_event()

    def later(self, most: float, function: Callable[[], None]) -> None:
        """Call a function after a random time of at most so many seconds."""
        self.scheduler.at(self.scheduler.now + self.dice.uniform(0.0, most), function)

    # -- life ------------------------------------------------------------------------------------

    def start_process(self, node: Node, on_death: Callable[[str, bool], None]) -> SimulatedProcess:
        """Start a process on a node.

        Args:
            node: the node; where it is dead or out of reach, nothing comes of the process.
            on_death: called with the cause of its death, and whether its node has gone too.
        """
        process = SimulatedProcess(self, next(self._pids), node, on_death)
        self.processes.append(process)
        if not (node.alive and node.reachable):
            process.alive = False
            self.later(self.node_notice, partial(on_death, "The node is gone.", True))
        return process

    def living(self) -> list[SimulatedProcess]:
        """Return the processes that run."""
        return [process for process in self.processes if process.alive]

    def kill(self, process: SimulatedProcess, why: str, *, silently: bool = False) -> None:
        """End a process at once, in the middle of whatever it does.

        Args:
            process: the process.
            why: it ends, as Ray explains it.
            silently: whether its channels do not close, because its node has gone too.
        """
        if not process.alive:
            return
        process.alive = process.stopped = False
        self.wires.drop(process, silently=silently)
        self.scheduler.kill(process)
        process.on_death(why, silently)

    def stop(self, process: SimulatedProcess) -> None:
        """Stop a process, its channels open, until `resume` or `kill`."""
        process.stopped = process.alive

    def resume(self, process: SimulatedProcess) -> None:
        """Let a stopped process go on."""
        process.stopped = False
        self.scheduler.resume(process)

    def lose(self, node: Node, *, silently: bool) -> None:
        """End a node with all its processes.

        Args:
            node: not the driver's.
            silently: whether channels to it stay open; otherwise its kernel closes them.
        """
        assert node is not self.nodes[0]
        node.alive = False
        for process in self.living():
            if process.where is node:
                self.kill(process, "The actor died because its node has died.", silently=silently)
        self._forget(node)

    def cut(self, node: Node) -> None:
        """Cut a node's link for ever; its processes run on, and reach each other."""
        assert node is not self.nodes[0]
        node.reachable = False
        for process in self.living():
            if process.where is node:
                process.on_death("The actor died because its node has died.", True)
        self._forget(node)

    def _forget(self, node: Node) -> None:
        node.reachable = False

        def notice() -> None:
            node.known_alive = False
            self.on_node_loss(node)

        self.scheduler.at(self.scheduler.now + self.node_notice, notice)

    # -- what the program sees -------------------------------------------------------------------

    def getpid(self) -> int:
        """Return the id of the process whose thread runs."""
        here = self.here()
        return os.getpid() if here is None else here.pid

    def exit(self, code: int) -> None:
        """Do what `os._exit` does in the process whose thread runs."""
        here = self.here()
        assert here is not None, "the driver is to end"
        self.kill(here, f"Worker exits with code {code}")
        self.scheduler.unwind()

    def send_signal(self, pid: int, number: int) -> None:
        """Do what `os.kill` does with a simulated process.

        Raises:
            ProcessLookupError: there is none.
        """
        for process in self.living():
            if process.pid == pid and process.where is self.here_node():
                if number == signal.SIGKILL:
                    self.kill(process, "The process was killed. connection error code 2.")
                elif number == signal.SIGSTOP:
                    self.stop(process)
                elif number == signal.SIGCONT:
                    self.resume(process)
                return
        raise ProcessLookupError(pid)

    def processor_use(self, pid: int) -> tuple[float, bool] | None:
        """Return the processor time of a process of this node; None if it is stopped or gone."""
        for process in self.living():
            if process.pid == pid and not process.stopped and process.where is self.here_node():
                return 0.0, False
        return None

    def processor_state(self, pid: int) -> str:
        """Return what the kernel says of a process of this node."""
        for process in self.living():
            if process.pid == pid and process.where is self.here_node():
                return "is stopped by a signal" if process.stopped else "sleeps"
        return "is gone"
