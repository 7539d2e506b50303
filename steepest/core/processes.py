"""The runtime of plain processes: `multiprocessing`'s children, called through pipes."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import threading
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from multiprocessing.connection import Connection
from typing import Any

from steepest.core.runtime import OnSystem, Process
from steepest.errors import (
    ConfigurationError,
    PeerLostError,
    describe_error,
    described_error,
    raised_by_user,
)
from steepest.validation import require_choice

_CLOSE_SECONDS = 5.0
_UNKNOWN = 255  # what multiprocessing says of a child whose fork server has died, which alone knows how it ended
_METHODS = ("forkserver", "spawn")


class ProcessRuntime(OnSystem):
    """Processes of this machine, children of this one; see `Runtime`.

    Calls and answers are pickled and travel through two pipes, which only the parent and that child
    have; nothing that comes from a socket is unpickled. A program's main module is imported again in
    each child, so it starts a trainer under ``if __name__ == "__main__":``.

    Children ignore SIGINT, which a terminal sends to all processes at once: the parent ends them. A
    child whose parent has died reads the end of its pipe, and exits.

    Args:
        start_method: of `multiprocessing`. "forkserver" starts one interpreter, which imports torch, and
            forks children from it in hundredths of a second; they have the environment variables of the
            first start, and import the program's modules themselves. "spawn" starts an interpreter for
            each child, in seconds.
    """

    def __init__(self, start_method: str = "forkserver") -> None:
        require_choice("start_method", start_method, _METHODS)
        self._context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(["steepest.core.worker_process"])
        self._children: list[_Child] = []
        atexit.register(self.close)

    def start(self, name: str, body: type, *arguments: Any) -> Process:
        """Start a child, see `Runtime.start`."""
        made = pickled(f"what {name} needs", (body, arguments))
        child = _Child(name, self._context)
        self._children.append(child)
        self.start_thread(child.write, f"to {name}")
        self.start_thread(child.read, f"from {name}")
        child.requests.put(_frame(0, made))
        return child

    def call(self, process: Process, method: str, *arguments: Any) -> Future[Any]:
        """Call a method in a child, see `Runtime.call`."""
        return _own(process).call(pickled(f"what {process.name} needs", (method, arguments)))

    def watch(self, process: Process) -> Future[str]:
        """Return the future of a child's end, see `Runtime.watch`."""
        return _own(process).ended

    def end(self, process: Process) -> None:
        """Kill a child."""
        _own(process).kill()

    def close(self) -> None:
        """Kill all children, and wait until they are gone."""
        atexit.unregister(self.close)
        with contextlib.ExitStack() as ending:  # raises when all of it is done
            ending.callback(wait_for, [child.ended for child in self._children], _CLOSE_SECONDS)
            for child in self._children:
                ending.callback(child.kill)


class _Child:
    """One child: its process, its pipes, and the calls that it has not answered."""

    def __init__(self, name: str, context: Any) -> None:
        self.name = name
        self.ended: Future[str] = Future()
        self.requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._calls: dict[int, Future[Any]] = {}
        self._cause = ""  # of its end
        self._lock = threading.Lock()  # of the calls and the cause
        theirs, self._to = context.Pipe(duplex=False)
        self._from, answers = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(theirs, answers), name=name)
        # a child that is not up yet ignores an interrupt too
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()
            answers.close()
        self.pid = self._process.pid or 0
        # children of the child may hold pipes open, which does not keep this one from its end
        self._sentinel, self._owns = self._process.sentinel, False
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or an old one
            self._sentinel, self._owns = os.pidfd_open(self.pid), True

    def call(self, request: bytes) -> Future[Any]:
        """Send a request; return the future of its answer."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._cause:
                answer.set_exception(self._lost())
                return answer
            number = next(self._numbers)
            self._calls[number] = answer
        self.requests.put(_frame(number, request))
        return answer

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        # The fork server may have reaped it before `read` notices its end: its number may be another's by then.
        with self._lock:
            if self._cause:
                return
            if self._owns:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._sentinel, signal.SIGKILL)
            else:
                self._process.kill()

    def write(self) -> None:
        """Write requests to the pipe, which may be full, until the process has ended."""
        while (request := self.requests.get()) is not None:
            try:
                self._to.send_bytes(request)
            except OSError:  # it has ended, as `read` notices
                break

    def read(self) -> None:
        """Take answers until the process has ended, and tell that."""
        open_ = True
        while True:
            waited = [self._from, self._sentinel] if open_ else [self._sentinel]
            if self._from not in multiprocessing.connection.wait(waited):
                break
            try:
                number, well, answer = _unpickled(self._from.recv_bytes())
            except (EOFError, OSError):
                open_ = False
            else:
                self._answer(number, well, answer)
        self._end()

    def _answer(self, number: int, well: bool, answer: bytes) -> None:
        """Give a call its result, or the error that its method raised."""
        with self._lock:
            call = self._calls.pop(number)
        settle(call, self.name, well, answer)

    def _end(self) -> None:
        """Note how the process ended; fail the calls that it has not answered."""
        with self._lock:
            while (code := self._process.exitcode) is None:
                self._process.join(1.0)
            self._cause = f"exited with code {code}"
            if code == _UNKNOWN:
                self._cause += ", or was killed together with the fork server that started it"
            if code < 0:
                self._cause = f"killed by {signal.Signals(-code).name}"
            calls, self._calls = self._calls, {}
        if self._owns:
            os.close(self._sentinel)
        self.requests.put(None)
        for call in calls.values():
            call.set_exception(self._lost())
        self.ended.set_result(self._cause)

    def _lost(self) -> PeerLostError:
        return PeerLostError(f"{self.name} (pid {self.pid}) died: {self._cause}")


def _own(process: Process) -> _Child:
    assert isinstance(process, _Child)
    return process


def _frame(number: int, content: bytes) -> bytes:
    return pickle.dumps((number, content))


def _unpickled(content: bytes) -> Any:
    return pickle.loads(content)  # noqa: S301 - of a pipe of this program's own


def pickled(what: str, value: Any) -> bytes:
    """Return a value pickled; ConfigurationError if it cannot be."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - the user's objects are pickled by methods of their own
        raise ConfigurationError(
            f"{what} cannot be pickled: {error}; define functions and classes at the top level of a "
            "module, and make in the model creator what cannot be sent"
        ) from None


def _error(name: str, told: dict[str, str]) -> Exception:
    """Return the exception that stands for what a child's method raised."""
    if (own := described_error(told, f"{name}: ")) is not None:
        return own
    return raised_by_user(f"{name}: {told['error']}", told)


def settle(call: Future[Any], name: str, well: bool, answer: bytes) -> None:
    """Give a call of a process its result, or the error that its method raised, as `perform` has returned it."""
    try:
        result = _unpickled(answer)
    except Exception as error:  # noqa: BLE001 - the user's objects are unpickled by methods of their own
        well, result = False, describe_error(error)
    if well:
        call.set_result(result)
    else:
        call.set_exception(_error(name, result))


# -- in the child ------------------------------------------------------------------------------


def make(made: bytes) -> Any:
    """Return a body, made of its pickled class and arguments."""
    body_type, arguments = _unpickled(made)
    return body_type(*arguments)


def perform(body: Any, request: bytes) -> tuple[bool, bytes]:
    """Run a method of a body, with pickled arguments; return whether it went well, and what came of it."""
    try:
        method, arguments = _unpickled(request)
        return True, pickled("the result", getattr(body, method)(*arguments))
    except BaseException as error:  # noqa: BLE001 - the user's code may call sys.exit()
        return False, pickle.dumps(describe_error(error))


def _serve(requests: Connection, answers: Connection) -> None:
    """Make the body and run its methods, until the parent is gone or kills this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    coming: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, coming), daemon=True).start()
    _, made = _unpickled(coming.get())
    body = make(made)
    while True:
        number, request = _unpickled(coming.get())
        answers.send_bytes(pickle.dumps((number, *perform(body, request))))


def _receive(requests: Connection, coming: queue.SimpleQueue[bytes]) -> None:
    """Hand requests on; end the process when the parent is gone, whatever it is doing."""
    while True:
        try:
            coming.put(requests.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
