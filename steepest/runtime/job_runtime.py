"""The seam to what runs a job's processes: how they are placed, started, called, watched and ended.

`runtime()` is that of this process, in the driver as in the others: Ray, processes of this machine, or a simulation.
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

from steepest.config.run import cluster_address
from steepest.core.messages.message import Peer
from steepest.core.transport.channel import ChannelSink
from steepest.core.transport.encryption import Encryption
from steepest.core.transport.sockets import WireTransport


class CallError(Exception):
    """A call has ended otherwise than by a result."""


class CallRaisedError(CallError):
    """The process has raised an exception, or was not sent an argument.

    Attributes:
        cause: what it has raised; where an argument is the result of another call, how that has ended.
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
    """What a process was asked, or a value that was `put`; as an argument of a call it stands for its result.

    Results pass from process to process, and through the driver only where it asks for them.
    """

    @abstractmethod
    def done(self) -> bool:
        """Return whether it has ended."""

    @abstractmethod
    def get(self, timeout: float | None = None) -> Any:
        """Return the result when it is there; raise how the call has ended otherwise, or `LateError`."""

    @abstractmethod
    def future(self) -> Future[Any]:
        """Return the future of the result, for which the driver asks thereby."""


class Group(Protocol):
    """Room that was asked for as a whole."""

    @property
    def id(self) -> Any:
        """Its `hex` is the name."""

    @property
    def bundle_specs(self) -> list[dict[str, float]]:
        """The resources of each of its bundles."""


class JobRuntime(Protocol):
    """What a job's driver and processes need of where they run, beyond a clock and threads (`System`).

    Not the core's `Runtime`: a driver on many nodes asks for room, says where a process is to run,
    hands what one process returns to another, has several calls run in a process at a time, and
    looks for nodes that go.
    """

    @property
    def name(self) -> str:
        """What `RunConfig(runtime=)` calls it."""

    @property
    def in_words(self) -> str:
        """What messages call where it runs processes, such as "this machine"."""

    @property
    def owns_process(self) -> bool:
        """Whether a process of the job is one of the system's, of which all may be changed."""

    # -- the connection --------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether this process is connected; a call would connect it anew."""

    @property
    def job(self) -> str:
        """The name of this connection."""

    def connect(self, cpus: int | None = None, *, verbose: bool = False) -> bool:
        """Connect, unless this process is connected; return whether this call did."""

    def shutdown(self) -> None:
        """Disconnect; processes end."""

    def answers(self, seconds: float) -> bool:
        """Return whether what runs the processes can be reached, within some seconds."""

    def leaves_sigterm(self, handler: object, status: int) -> bool:
        """Return whether the driver's handler of SIGTERM may be replaced: it is the runtime's, or the system's.

        Args:
            handler: as `signal.getsignal` has it.
            status: with which the program is to end, whatever it waits for.
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
        """Return when all that processes have printed is on this process' terminal, or after some seconds."""

    def put(self, value: Any) -> Call:
        """Keep a value, which is pickled once, for calls of several processes."""

    def get(self, calls: Collection[Call], timeout: float | None = None) -> list[Any]:
        """Return the results of calls; raise the first error."""

    def wait(
        self, calls: Collection[Call], seconds: float | None, number: int | None = None
    ) -> list[Call]:
        """Wait until a number of calls (all) have ended, or some seconds; return so many of those that have."""

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
        """Return what a process of this node does with processors, see `places.processor_use`."""

    def processor_state(self, pid: int) -> str:
        """Return what the kernel says of a process of this node."""

    def last_lines(self, node: str, pid: int, logs: tuple[str, ...]) -> list[str]:
        """Return the last lines that a process has printed, as far as they are kept; CallError if its node is gone.

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
        """Whether groups are placed where CPUs, or GPUs, are fewer than they ask for, and share them."""

    def nodes(self) -> dict[str, Mapping[str, float]]:
        """Return the living nodes, by id, and what each has."""

    def leaving_nodes(self) -> dict[str, float]:
        """Return the nodes that will go, with deadlines of `System.time`; 0 for one that is not known."""

    def free_by_node(self) -> dict[str, dict[str, float]]:
        """Return what is free on each node."""

    def total(self) -> dict[str, float]:
        """Return what all nodes have."""

    def free(self) -> dict[str, float]:
        """Return what is free on all nodes."""

    def group_around(self) -> Group | None:
        """Return the group whose bundles this process' own processes are to use, or None."""

    def ask(
        self,
        bundles: Sequence[dict[str, float]],
        how: str,
        without: Collection[str] = (),
        node: str | None = None,
    ) -> Group:
        """Ask for a group of bundles, without waiting for it, not on some nodes, if possible on `node`."""

    def bundles(self, group: Group) -> dict[int, str]:
        """Return the node of each bundle of a group; "" of one that has no room yet."""

    def is_placed(self, group: Group) -> bool:
        """Return whether all bundles of a group have their room."""

    def give_back(self, group: Group) -> None:
        """Give a group's room back; processes there end."""

    def reserved(self, without: Collection[str]) -> list[dict[str, float]]:
        """Return the bundles that groups hold, but for those of some names."""


#: The runtimes by name: their modules and classes.
_KINDS = {
    "ray": ("steepest.runtime.ray_runtime", "RayRuntime"),
    "processes": ("steepest.runtime.machine.runtime", "MachineRuntime"),
}
_used: list[JobRuntime] = []


def _leave() -> None:
    """Have a forked child use a runtime of its own: the processes are its parent's."""
    _used[:] = [each for each in _used if not each.owns_process]


os.register_at_fork(after_in_child=_leave)


def use(other: JobRuntime) -> None:
    """Have this process use a runtime."""
    _used.append(other)


def runtime() -> JobRuntime:
    """Return the runtime of this process: that of "auto", until another one is used."""
    if not _used:
        use(_made(chosen("auto")))
    return _used[-1]


def _made(name: str) -> JobRuntime:
    """Return a new runtime by its name: "ray" or "processes"; what it needs is imported then."""
    module, kind = _KINDS[name]
    made: JobRuntime = getattr(importlib.import_module(module), kind)()
    return made


def chosen(name: str) -> str:
    """Return the name of a runtime, which "auto" leaves to what the program has done."""
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
