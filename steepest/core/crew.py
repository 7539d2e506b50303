"""The worker processes of a trainer: started, asked, awaited, and missed when they have died."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from steepest.core.messages.message import worker_peer
from steepest.core.runtime import Process, Runtime
from steepest.core.worker_process import WorkerProcess
from steepest.errors import DeadlineError, PeerLostError

T = TypeVar("T")
_NOTICE_SECONDS = 5.0  # from a closed connection to the end of its process


class Crew:
    """The living processes of a job's workers, by worker.

    Every wait ends when one of them dies, whatever it is for.

    Args:
        runtime: starts and calls them.
        arguments: of each `WorkerProcess`.
        seconds: within which processes answer.
        doing: returns what the job has come to, such as "after step 3", for errors.
    """

    def __init__(
        self,
        runtime: Runtime,
        arguments: tuple[Any, ...],
        seconds: float,
        doing: Callable[[], str],
    ) -> None:
        self._runtime = runtime
        self._arguments = arguments
        self._seconds = seconds
        self._doing = doing
        self._processes: dict[int, Process] = {}
        self._lives: dict[int, int] = {}  # by worker, the number of its processes so far

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def workers(self) -> list[int]:
        """The workers whose processes live, as far as is known."""
        return sorted(self._processes)

    @property
    def pids(self) -> list[int]:
        """The number of each worker's process, for the operating system."""
        return [self._processes[worker].pid for worker in self.workers]

    def life(self, worker: int) -> int:
        """Return the number of processes that were a worker before its present one."""
        return self._lives[worker] - 1

    def start(self, workers: Iterable[int]) -> None:
        """Start processes for some workers, without waiting."""
        for worker in workers:
            life = self._lives[worker] = self._lives.get(worker, 0) + 1
            name = str(worker_peer(worker)) + (f", life {life}" if life > 1 else "")
            self._processes[worker] = self._runtime.start(name, WorkerProcess, *self._arguments)

    def number_anew(self) -> None:
        """Give the living workers the numbers from 0."""
        workers = self.workers
        self._lives = {new: self._lives[old] for new, old in enumerate(workers)}
        self._processes = {new: self._processes[old] for new, old in enumerate(workers)}

    def take_dead(self) -> dict[int, str]:
        """Forget the processes that are dead; return in words how they died, by worker.

        A closed connection is noticed before the end of its process: that is awaited.
        """
        ends = {worker: self._runtime.watch(one) for worker, one in self._processes.items()}
        self._runtime.wait(ends.values(), _NOTICE_SECONDS)
        dead = {}
        for worker, end in ends.items():
            if end.done():
                dead[worker] = _words(self._processes.pop(worker), end)
        return dead

    def ask(self, what: str, method: str, arguments: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Call a method of workers' processes at the same time; return the results in order.

        Args:
            what: they are to do, for errors.
            method: of `WorkerProcess`.
            arguments: by worker.

        Raises:
            PeerLostError: a process died.
            DeadlineError: a process has not answered in time.
        """
        calls = {
            worker: self._runtime.call(self._processes[worker], method, *given)
            for worker, given in arguments.items()
        }
        began = self._runtime.now()
        return [
            self.wait(call, what, [str(worker_peer(worker))], self._seconds, began)
            for worker, call in calls.items()
        ]

    def wait(
        self,
        future: Future[T],
        what: str,
        who: Sequence[str],
        seconds: float,
        began: float | None = None,
    ) -> T:
        """Return what a future holds, or raise what it does.

        Args:
            future: of an answer, of this process' router or of any process.
            what: is awaited, for the error.
            who: names of those who are to do it.
            seconds: of the wait.
            began: when it began; by default now.

        Raises:
            PeerLostError: a process died.
            DeadlineError: the future is not done in time; names who is late, and the step.
        """
        deadline = (self._runtime.now() if began is None else began) + seconds
        ends = {self._runtime.watch(process): process for process in self._processes.values()}
        while not future.done():
            for end in (end for end in ends if end.done()):
                raise PeerLostError(_words(ends[end], end))
            if (left := deadline - self._runtime.now()) <= 0:
                raise DeadlineError(
                    f"{', '.join(who)} did not {what} within {seconds:g} s, {self._doing()}"
                )
            self._runtime.wait([future, *ends], left)
        return future.result()


def _words(process: Process, end: Future[str]) -> str:
    return f"{process.name} (pid {process.pid}) died: {end.result()}"
