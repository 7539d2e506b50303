"""The Runtime protocol: how a job's processes are started, called, watched and ended."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, Protocol

from steepest.core.system import Thread, system


class Process(Protocol):
    """A handle of a process; the runtime that started it takes it in all other methods."""

    @property
    def name(self) -> str:
        """The name given to `Runtime.start`, for messages."""

    @property
    def pid(self) -> int:
        """The operating system's number of the process; 0 where there is none."""


class Runtime(Protocol):
    """The processes, clock and threads of one driver.

    A trainer reaches the world through a runtime alone: it starts processes, calls them, waits for
    answers and deaths, and ends them. Gradients and weights do not pass through a runtime; they
    travel between the processes' own routers (`steepest.core.transport`). So a runtime carries few and
    small messages, and may be slow.

    An implementation decides where a process runs and how a call travels. `ProcessRuntime` runs
    processes of this machine and sends calls through pipes. `steepest.runtime.actor_runtime` starts
    an actor for each process, of Ray or, in a simulation, of threads that run in turn on virtual
    time; its `watch` is a call that lasts as long as the actor.

    **Processes.** `start` returns at once, before the process is up. The process makes one object,
    its body, with the arguments given to `start`; an exception there ends the process. `call` runs
    a method of the body. Calls of one process run one at a time, in the order in which they were
    made; calls of several processes run at the same time. Methods, arguments and results are
    pickled, so that a body's class and a user's functions are importable in the process.

    **Deaths.** A process dies at any time: killed, out of memory, by `os._exit`. `watch` returns
    the future that then gets the cause in words, such as "killed by SIGKILL". It is set at once,
    not after a timeout, and never fails. All calls of the process without an answer fail with
    PeerLostError before that, and later ones immediately. A process that hangs is alive: callers
    have deadlines, and use `end`.

    **Errors.** What a method raises arrives as text. An exception of `steepest.errors` keeps its
    class; any other becomes ModelRaisedError, with the remote traceback as its cause.

    **Ends.** `end` kills without asking: nothing in the process runs any more. `close` ends all
    processes, and returns when they are gone or after a few seconds; it may be called twice, by any
    thread, and after an interrupt. If the driver's process itself dies, its processes end by
    themselves.

    **Waiting.** `wait` is the only method that blocks (beside `close`). It returns when any of the
    futures is done, or after a number of seconds of `now`, whatever comes first, and raises nothing
    but KeyboardInterrupt. The futures need not be the runtime's own: a trainer also waits for those
    of its router.

    **Threads.** `start_thread` starts a daemon thread; a trainer uses it for its router, which is
    the only thread beside the caller's that runs the library's code in the driver. Futures may be
    completed on any thread.
    """

    def start(self, name: str, body: type, *arguments: Any) -> Process:
        """Start a process that makes `body(*arguments)`; return its handle without waiting.

        Raises:
            ConfigurationError: the arguments cannot be pickled.
        """

    def call(self, process: Process, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of a process' body; return the future of what it returns or raises.

        Raises:
            ConfigurationError: the arguments cannot be pickled.
        """

    def watch(self, process: Process) -> Future[str]:
        """Return the future of the cause of a process' end, in words."""

    def end(self, process: Process) -> None:
        """Kill a process, without waiting; nothing happens if it is dead."""

    def wait(self, futures: Collection[Future[Any]], seconds: float) -> None:
        """Return when a future is done, or after some seconds."""

    def now(self) -> float:
        """Return the time in seconds, on a clock that does not go back."""

    def start_thread(self, body: Callable[[], None], name: str) -> Thread:
        """Start a daemon thread that runs a function, and return it."""

    def close(self) -> None:
        """End all processes."""


class OnSystem:
    """What runtimes take of the system of their process: waits, a clock, threads."""

    def wait(self, futures: Collection[Future[Any]], seconds: float) -> None:
        """Return when a future is done, or after some seconds."""
        system().wait(futures, max(seconds, 0.0))

    def now(self) -> float:
        """Return the clock."""
        return system().now()

    def start_thread(self, body: Callable[[], None], name: str) -> Thread:
        """Start a daemon thread."""
        return system().start(body, name)
