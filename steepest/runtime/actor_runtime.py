"""The core's `Runtime` on what runs a job's processes: Ray's actors, or those of a simulation."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any

from steepest.core.processes import make, perform, pickled, settle
from steepest.core.runtime import OnSystem, Process
from steepest.core.system import system
from steepest.errors import PeerLostError
from steepest.runtime.job_runtime import Group, runtime

_CLOSE_SECONDS = 5.0


class ActorRuntime(OnSystem):
    """Processes of a cluster, each in a place of its own; see `Runtime`.

    What was sent to a process waits here until its turn has come. Ray says why a process has ended.

    Args:
        cpus: that each process reserves.
    """

    def __init__(self, cpus: float = 1.0) -> None:
        self._began = runtime().connect()
        self._cpus = cpus
        self._actors: list[_Actor] = []

    def start(self, name: str, body: type, *arguments: Any) -> Process:
        """Start an actor as soon as there is room, see `Runtime.start`."""
        made = pickled(f"what {name} needs", (body, arguments))
        group = runtime().ask([{"CPU": self._cpus}], "PACK")
        handle = runtime().start(
            _Hosted, (f"steepest {name}", made), (group, 0), cpus=self._cpus, gpus=0, calls=2
        )
        self._actors.append(_Actor(name, handle, group))
        return self._actors[-1]

    def call(self, process: Process, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of an actor's body, see `Runtime.call`."""
        return _own(process).call(pickled(f"what {process.name} needs", (method, arguments)))

    def watch(self, process: Process) -> Future[str]:
        """Return the future of an actor's end, see `Runtime.watch`."""
        return _own(process).ended

    def end(self, process: Process) -> None:
        """Kill an actor."""
        runtime().end(_own(process).handle)

    def close(self) -> None:
        """Kill all actors, and wait until they are gone; disconnect, if this has connected."""
        until = self.now() + _CLOSE_SECONDS
        for actor in self._actors if runtime().is_up else ():
            self.end(actor)
        for actor in self._actors if runtime().is_up else ():
            self.wait([actor.ended], until - self.now())
            runtime().give_back(actor.group)
        self._actors = []
        if self._began:
            self._began = False
            runtime().shutdown()


class _Actor:
    """An actor, and its calls, of which it is sent one at a time."""

    def __init__(self, name: str, handle: Any, group: Group) -> None:
        self.name, self.handle, self.group = name, handle, group
        self.ended: Future[str] = Future()
        self._calls: deque[tuple[bytes, Future[Any]]] = deque()  # the first one is sent
        self._cause = ""  # of its end
        self._lock = system().lock()  # of the calls and the cause
        self._pid: Future[int] = runtime().call(handle, "pid").future()
        runtime().call(handle, "stay").future().add_done_callback(self._end)

    @property
    def pid(self) -> int:
        """The number of its process; 0 until it is up."""
        up = self._pid.done() and self._pid.exception() is None
        return int(self._pid.result(0)) if up else 0

    def call(self, request: bytes) -> Future[Any]:
        """Send a request when its turn comes; return the future of its answer."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._cause:
                answer.set_exception(self._lost())
                return answer
            self._calls.append((request, answer))
            if len(self._calls) > 1:
                return answer
        self._send(request)
        return answer

    def _send(self, request: bytes) -> None:
        """Send a request to a process of which the number is known: who has an answer may ask for it."""

        def send(pid: Future[int]) -> None:
            runtime().call(self.handle, "perform", request).future().add_done_callback(self._take)

        self._pid.add_done_callback(send)

    def _take(self, answer: Future[tuple[bool, bytes]]) -> None:
        """Give a call its answer, and send the next one; the dead give none, as `stay` tells."""
        if answer.exception() is not None:
            return
        with self._lock:
            if self._cause:
                return
            _, call = self._calls.popleft()
            following = self._calls[0][0] if self._calls else None
        settle(call, self.name, *answer.result())
        if following is not None:
            self._send(following)

    def _end(self, staying: Future[None]) -> None:
        """Note how the process has ended; fail the calls that it has not answered."""
        cause = " ".join(str(staying.exception()).split())
        with self._lock:
            calls, self._calls, self._cause = self._calls, deque(), cause
        for _, call in calls:
            call.set_exception(self._lost())
        self.ended.set_result(cause)

    def _lost(self) -> PeerLostError:
        return PeerLostError(f"{self.name} (pid {self.pid}) died: {self._cause}")


def _own(process: Process) -> _Actor:
    assert isinstance(process, _Actor)
    return process


class _Hosted:
    """In the process: the body, and the calls of it."""

    def __init__(self, name: str, made: bytes) -> None:
        runtime().name_process(name)
        self._body = make(made)

    def pid(self) -> int:
        return runtime().pid

    def stay(self) -> None:
        """Return never."""
        system().event().wait()

    def perform(self, request: bytes) -> tuple[bool, bytes]:
        """Run a method of the body."""
        return perform(self._body, request)
