"""The driver's end of processes of this machine: forked by the template, called, watched, ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

from steepest.core.config.run import environment_of_process
from steepest.core.system import system
from steepest.runtime.answers import Answer
from steepest.runtime.job_runtime import CallError, CallRaisedError, ProcessDiedError
from steepest.runtime.machine.launching import searched, start_template
from steepest.runtime.machine.notice import Notice
from steepest.runtime.machine.parcels import Frames, OpenParcel, Parcel, ParcelCall, opened
from steepest.runtime.places import MOST_LINES

_LONGEST = 2000  # characters of a line that is kept
_PRINTED_SECONDS = 1.0  # in which what a process has printed is printed here
_LOOK_SECONDS = 0.002
#: In which the template tells how a process has ended, and killed processes are gone.
_GONE_SECONDS = 5.0


class ForkedProcess:
    """One process: its socket, its output, and the calls that it has not answered.

    Args:
        name: of the process.
        gone: is called when it has ended and its socket is closed.
    """

    def __init__(self, name: str, gone: Callable[[], object]) -> None:
        self.name, self._gone = name, gone
        self.pid = 0  # until it has started
        self.how: Answer[str] = Answer()  # it has ended, as the template says it
        self._cause: str | None = None  # of its end
        self._descriptor: int | None = None  # of the process, while it runs
        self._killed = False
        self._numbers = itertools.count(1)
        self._calls: dict[int, ParcelCall] = {}
        self._lock = threading.RLock()
        self._requests: queue.SimpleQueue[tuple[int, Parcel] | None] = queue.SimpleQueue()
        self._failed = ""  # why it could not be made
        own, theirs = socket.socketpair()
        self._frames = Frames(own)
        printed = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
        self.ends = [theirs.detach(), *(end for _, end in printed)]
        self._output = _Output(self, [begin for begin, _ in printed])
        system().start(self._write, f"to {name}")
        self._reader = system().start(self._read, f"from {name}")

    # -- its life ---------------------------------------------------------------------------------

    def started(self, pid: int, descriptor: int) -> None:
        """Note that it runs, and its descriptor."""
        with self._lock:
            self.pid, self._descriptor = pid, descriptor
            if self._killed:
                self.kill()

    def kill(self) -> None:
        """Kill it, now or when it has started."""
        with self._lock:
            self._killed = True
            if self._descriptor is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def ended(self, how: str) -> None:
        """Note how it has ended, in words; its earlier answers are still read."""
        self.how.set_result(how)
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
        with contextlib.suppress(OSError):  # children of its own may hold the other end open
            self._frames.socket.shutdown(socket.SHUT_RD)

    def join(self, seconds: float) -> None:
        """Return when its end is noted and all of its output is printed, or after some seconds."""
        self._reader.join(seconds)
        self.output.join()

    def drop_ends(self) -> None:
        """Close its ends here, once the template has them."""
        for end in self.ends:
            os.close(end)
        self.ends = []

    @property
    def output(self) -> _Output:
        """What it prints."""
        return self._output

    # -- calls ------------------------------------------------------------------------------------

    def ask(self, content: OpenParcel) -> ParcelCall:
        """Send a request when the calls in it have ended; return the call."""
        call = ParcelCall()
        with self._lock:
            if self._cause is not None:
                call.parcel.set_exception(ProcessDiedError(self._cause))
                return call
            number = next(self._numbers)
            self._calls[number] = call
        self._send_when_ready(number, content)
        return call

    def make(self, content: OpenParcel) -> None:
        """Send the request to make its body."""
        self._send_when_ready(0, content)

    def _send_when_ready(self, number: int, content: OpenParcel) -> None:
        missing = [call for call in content.calls if not call.done()]
        if missing:
            again = partial(self._send_when_ready, number, content)
            missing[0].parcel.add_done_callback(lambda _: again())
            return
        try:
            self._requests.put((number, content.closed()))
        except CallError as error:
            words = f"an argument is missing: {error}"
            self._settle(number, CallRaisedError(words, getattr(error, "cause", error)))

    def _settle(self, number: int, end: Parcel | CallError) -> None:
        """End a call, if it has not ended."""
        with self._lock:
            call = self._calls.pop(number, None)
        if call is None:
            return
        if isinstance(end, Parcel):
            call.parcel.set_result(end)
        else:
            call.parcel.set_exception(end)

    def _write(self) -> None:
        """Write requests, until the process has ended."""
        with contextlib.suppress(OSError):  # it has ended, as `_read` notices
            while (request := self._requests.get()) is not None:
                self._frames.send(*request)

    def _read(self) -> None:
        """Take answers until the process has ended, and note that."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                told, parcel, _ = self._frames.receive()
                if told[0] == "named":
                    self.name = told[1].removeprefix("steepest ")
                elif told[0] == "failed":
                    self._failed = told[1]
                else:
                    self._take(told[1], told[2], parcel)
        self._end()

    def _take(self, number: int, well: bool, parcel: Parcel | None) -> None:
        """End a call as the process has answered."""
        assert parcel is not None
        if well:
            self._settle(number, parcel)
            return
        try:
            text, cause = opened(parcel)
        except CallError as error:
            text, cause = str(error), error
        self._settle(number, CallRaisedError(text, cause))

    def _end(self) -> None:
        """Note why it has ended, and fail its unanswered calls."""
        try:
            cause = self.how.result(_GONE_SECONDS)
        except FutureTimeoutError:
            self.kill()
            cause = "its connection has ended"
        if self._failed:
            cause = f"it could not be made: {self._failed}"
        with self._lock:
            self._cause, calls, self._calls = cause, self._calls, {}
        self._requests.put(None)
        self._frames.socket.close()
        for call in calls.values():
            call.parcel.set_exception(ProcessDiedError(cause))
        self.how.add_done_callback(lambda _: self._gone())


class _Output:
    """The output of a process: a thread prints it here, with the name of the process before each line.

    Args:
        process: the process.
        descriptors: from which its output and its errors are read; they are closed at their ends.

    Attributes:
        lines: that it has printed last.
    """

    def __init__(self, process: ForkedProcess, descriptors: Sequence[int]) -> None:
        self.lines: deque[str] = deque(maxlen=MOST_LINES)
        self._process = process
        self._streams = dict(zip(descriptors, ("stdout", "stderr"), strict=True))
        self._begun = dict.fromkeys(descriptors, b"")  # a line without its end
        self._reading = threading.Lock()  # held until what was read is printed
        self._thread = system().start(self._run, f"output of {process.name}")

    def join(self) -> None:
        """Return when all output so far is printed here, or after a second."""
        until = system().now() + _PRINTED_SECONDS
        while self._thread.is_alive() and system().now() < until:
            with self._reading:
                if not select.select(list(self._streams), [], [], 0)[0]:
                    return
            system().sleep(_LOOK_SECONDS)

    def _run(self) -> None:
        while self._streams:
            ready = select.select(list(self._streams), [], [])[0]
            with self._reading:
                for descriptor in ready:
                    self._take(descriptor)

    def _take(self, descriptor: int) -> None:
        """Print the lines that a descriptor has brought; at its end also an unfinished line."""
        come = os.read(descriptor, 1 << 16)
        *lines, rest = (self._begun[descriptor] + come).split(b"\n")
        if not come:
            lines += [rest] if rest else []
            stream = self._streams.pop(descriptor)
            os.close(descriptor)
        else:
            # a bar is written again and again over itself
            self._begun[descriptor] = rest[rest.rfind(b"\r", 0, -1) + 1 :]
            stream = self._streams[descriptor]
        if lines:
            shown = [line.decode(errors="replace") for line in lines]
            self.lines.extend(line[:_LONGEST] for line in shown)
            file = getattr(sys, stream)
            file.write("".join(f"[{self._process.name}] {line}\n" for line in shown))
            file.flush()


def _in_words(status: int) -> str:
    """Return how a process has ended, by its status."""
    if status >= 0:
        return f"it exited with status {status}"
    name = signal.Signals(-status).name
    return f"it was killed by {name}" + (", or for want of memory" if name == "SIGKILL" else "")


class ForkServer:
    """The template, and the thread that hears from it how processes have started and ended.

    Args:
        notice: that its processes share.
    """

    def __init__(self, notice: Notice) -> None:
        self._process, sock = start_template(notice.descriptor)
        self._frames = Frames(sock)
        self._numbers = itertools.count(1)
        self._forks: dict[int, ForkedProcess] = {}
        self._lock = threading.RLock()
        self.is_over = False
        self._hearing = system().start(self._hear, "steepest template")

    def fork(self, name: str, environment: Mapping[str, str]) -> ForkedProcess:
        """Return a process that will be forked."""
        with self._lock:
            number = next(self._numbers)
            gone = partial(self._forks.pop, number)
            process = ForkedProcess(name.removeprefix("steepest "), gone)
            self._forks[number] = process
            settings = {
                "environment": {**environment_of_process(), **environment},
                "directory": os.getcwd(),
                "path": searched(),
                "name": name,
            }
            try:
                self._frames.send((number, settings), descriptors=process.ends)
            except OSError:
                self._over()
            process.drop_ends()
            return process

    def _hear(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                (what, number, value), _, descriptors = self._frames.receive(1)
                if what == "started":
                    self._forks[number].started(value, *descriptors)
                else:
                    self._forks[number].ended(_in_words(value))
        self._over()
        self._frames.socket.close()

    def _over(self) -> None:
        """Note that the template has ended, and with it its forks."""
        self.is_over = True
        how = "the process that forks them is gone"
        with contextlib.suppress(subprocess.TimeoutExpired):
            how += f": {_in_words(self._process.wait(_GONE_SECONDS))}"
        for process in list(self._forks.values()):
            process.ended(how)

    def end_forks(self) -> None:
        """End all processes; return when they are gone and their output is printed."""
        forks = list(self._forks.values())
        for process in forks:
            process.kill()
        until = system().now() + _GONE_SECONDS
        for process in forks:
            process.join(max(until - system().now(), 0.0))

    def end(self) -> None:
        """End the template, and with it its forks; return when it is gone."""
        self._process.kill()
        self._process.wait()
        self._hearing.join(_GONE_SECONDS)
