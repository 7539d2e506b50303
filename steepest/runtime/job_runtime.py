"""The seam to the system that runs a job's processes: how they are placed, started, called, watched and ended.

`runtime()` returns the runtime of this process, in the driver and in all others: Ray, processes of this machine, or a
simulation.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from steepest.core.config.run import cluster_address
from steepest.core.messages.message import Peer
from steepest.core.transport.channel import ChannelSink
from steepest.core.transport.encryption import Encryption
from steepest.core.transport.sockets import WireTransport


class CallError(Exception):
    """A call has ended otherwise than by a result."""


class CallRaisedError(CallError):
    """The process has raised an exception, or was not sent an argument.

    Attributes:
        cause: the exception; if an argument is the result of another call, the error of that call.
    """

    def __init__(self, text: str, cause: BaseException) -> None:
        super().__init__(text)
        self.cause = cause


class ProcessDiedError(CallError):
    """The process has died; the message has the reason, as far as it is known."""


class ProcessAwayError(ProcessDiedError):
    """The process has died, and is started again."""


class ResultLostError(CallError):
    """The result was lost with the process that had it."""


class UnreadableError(CallError):
    """An argument or the result cannot be unpickled."""


class LateError(CallError):
    """The call has not ended in time."""


class Call(ABC):
    """A call of a process, or a value that was `put`; as an argument of another call it stands for its result.

    Results pass from process to process, and through the driver only if it asks for them.
    """

    @abstractmethod
    def done(self) -> bool:
        """Return whether it has ended."""

    @abstractmethod
    def get(self, timeout: float | None = None) -> Any:
        """Return the result when it is there; raise the error of the call, or `LateError`."""

    @abstractmethod
    def future(self) -> Future[Any]:
        """Return a future of the result, which the driver thereby asks for."""


class Group(Protocol):
    """Room that was asked for as a whole."""

    @property
    def id(self) -> Any:
        """Its `hex` is the name."""

    @property
    def bundle_specs(self) -> list[dict[str, float]]:
        """The resources of each of its bundles."""


class JobRuntime(Protocol):
    """The services of the system that runs a job's driver and processes, beyond a clock and threads (`System`).

    A driver on many nodes asks for room, chooses where a process runs, passes results of one process
    to another, has several calls run in a process at a time, and looks for nodes that will go.
    """

    @property
    def name(self) -> str:
        """Its name in `RunConfig(runtime=)`."""

    @property
    def in_words(self) -> str:
        """The name in messages of the place where it runs processes, such as "this machine"."""

    @property
    def owns_process(self) -> bool:
        """Whether each process of the job is an operating system's process of its own, and may change all of it."""

    # -- the connection --------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether this process is connected; if not, a call would connect it."""

    @property
    def job(self) -> str:
        """The name of this connection."""

    def connect(self, cpus: int | None = None, *, verbose: bool = False) -> bool:
        """Connect, unless this process is connected; return whether this call did."""

    def shutdown(self) -> None:
        """Disconnect; processes end."""

    def answers(self, seconds: float) -> bool:
        """Return whether the system that runs the processes can be reached, within some seconds."""

    def leaves_sigterm(self, handler: object, status: int) -> bool:
        """Return whether the driver's handler of SIGTERM may be replaced: it is the runtime's, or the system's.

        Args:
            handler: as `signal.getsignal` has it.
            status: the exit status with which the program is to end, also if it waits in a call.
        """

    # -- processes -------------------------------------------------------------------------------

    def start(
        self, body: type, arguments: Sequence[Any], at: tuple[Group, int], **needs: float
    ) -> Any:
        """Start a process that makes `body(*arguments)` in a bundle of a group; return its handle without waiting.

        Args:
            body: whose methods are called.
            arguments: the first one is the process' name.
            at: a group and the number of a bundle.
            needs: cpus, gpus of the bundle; calls that may run at a time.
        """

    def call(self, process: Any, method: str, *arguments: Any) -> Call:
        """Call a method of a process' body."""

    def end(self, process: Any) -> None:
        """Kill a process, without waiting."""

    def show_output(self, processes: Collection[Any]) -> None:
        """Return when all output of processes is on this process' terminal, or after some seconds."""

    def put(self, value: Any) -> Call:
        """Keep a value, which is pickled once, for calls of several processes."""

    def get(self, calls: Collection[Call], timeout: float | None = None) -> list[Any]:
        """Return the results of calls; raise the first error."""

    def wait(
        self, calls: Collection[Call], seconds: float | None, number: int | None = None
    ) -> list[Call]:
        """Wait until a number of calls (by default all) have ended, or some seconds; return as many ended calls."""

    # -- this process ------------------------------------------------------------------------------

    @property
    def node(self) -> str:
        """The id of its node."""

    @property
    def host(self) -> str:
        """The address of its node."""

    @property
    def pid(self) -> int:
        """Its number."""

    def exit(self, status: int) -> None:
        """End it at once."""

    def kill(self, pid: int) -> None:
        """Kill a process of this node; nothing happens if there is none."""

    def name_process(self, name: str) -> None:
        """Show it under a name."""

    def processor_use(self, pid: int) -> tuple[float, bool] | None:
        """Return the use of processors by a process of this node, see `places.processor_use`."""

    def processor_state(self, pid: int) -> str:
        """Return the kernel's state of a process of this node, in words."""

    def last_lines(self, node: str, pid: int, logs: tuple[str, ...]) -> list[str]:
        """Return the last lines of a process' output, as far as they are kept; CallError if its node is gone.

        Args:
            node, pid: where it ran.
            logs: paths there of the files that it has printed to.
        """

    def transport(
        self,
        token: bytes,
        peers: tuple[Peer, ...],
        node: str,
        sink: ChannelSink,
        ways: str = "wire",
        encryption: Encryption | None = None,
    ) -> WireTransport:
        """Return the channels of a process, for the arguments see `WireTransport`."""

    # -- nodes and room ------------------------------------------------------------------------------

    @property
    def may_grow(self) -> bool:
        """Whether nodes may join."""

    @property
    def shares(self) -> bool:
        """Whether groups are placed although there are fewer CPUs, or GPUs, than they ask for, and share them."""

    def nodes(self) -> dict[str, Mapping[str, float]]:
        """Return the living nodes by id, with the resources of each."""

    def leaving_nodes(self) -> dict[str, float]:
        """Return the nodes that will go, with deadlines of `System.time`; 0 for an unknown deadline."""

    def free_by_node(self) -> dict[str, dict[str, float]]:
        """Return the free resources of each node."""

    def total(self) -> dict[str, float]:
        """Return the resources of all nodes."""

    def free(self) -> dict[str, float]:
        """Return the free resources of all nodes."""

    def group_around(self) -> Group | None:
        """Return the group whose bundles this process' own processes are to use, or None."""

    def ask(
        self,
        bundles: Sequence[dict[str, float]],
        how: str,
        without: Collection[str] = (),
        node: str | None = None,
    ) -> Group:
        """Ask for a group of bundles without waiting for it: not on some nodes, if possible on `node`."""

    def bundles(self, group: Group) -> dict[int, str]:
        """Return the node of each bundle of a group; "" of one that has no room yet."""

    def is_placed(self, group: Group) -> bool:
        """Return whether all bundles of a group have their room."""

    def give_back(self, group: Group) -> None:
        """Give a group's room back; processes there end."""

    def reserved(self, without: Collection[str]) -> list[dict[str, float]]:
        """Return the bundles that groups hold, except groups of some names."""


#: The runtimes by name: their modules and classes.
_KINDS = {
    "ray": ("steepest.runtime.ray_runtime", "RayRuntime"),
    "processes": ("steepest.runtime.machine.runtime", "MachineRuntime"),
}
_used: list[JobRuntime] = []


def _leave() -> None:
    """Let a forked child use a runtime of its own: the processes belong to its parent."""
    _used[:] = [each for each in _used if not each.owns_process]


os.register_at_fork(after_in_child=_leave)


def use(other: JobRuntime) -> None:
    """Have this process use a runtime."""
    _used.append(other)


def runtime() -> JobRuntime:
    """Return the runtime of this process: the one of "auto", until another one is used."""
    if not _used:
        use(_made(chosen("auto")))
    return _used[-1]


def _made(name: str) -> JobRuntime:
    """Return a new runtime by its name, "ray" or "processes"; its modules are imported only now."""
    module, kind = _KINDS[name]
    made: JobRuntime = getattr(importlib.import_module(module), kind)()
    return made


def chosen(name: str) -> str:
    """Return the name of a runtime; "auto" becomes the one that the program has used, or else suits it."""
    if name != "auto":
        return name
    ray = sys.modules.get("ray")
    connected = ray is not None and ray.is_initialized()
    return "ray" if connected or cluster_address() is not None else "processes"


def choose(name: str) -> None:
    """Have this process use the runtime of a name, unless it does, or is simulated."""
    if not _used or (_used[-1].owns_process and _used[-1].name != name):
        _used[-1:] = [_made(name)]


@contextlib.contextmanager
def using(other: JobRuntime) -> Iterator[None]:
    """Have this process use another runtime in a block; trainers that are made in it end in it."""
    before = len(_used)
    use(other)
    try:
        yield
    finally:
        del _used[before:]
