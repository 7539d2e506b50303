"""The code of a process of this machine: it makes the body, and runs the calls of the driver."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from steepest.runtime.job_runtime import CallRaisedError, UnreadableError, use
from steepest.runtime.machine.notice import Notice
from steepest.runtime.machine.parcels import Frames, Parcel, ParcelCall, opened, packed
from steepest.runtime.machine.runtime import MachineRuntime
from steepest.runtime.places import show_command


def serve(sock: socket.socket, name: str, notice: Notice) -> None:
    """Make the body of the first request, and run its methods; does not return.

    The process ends when the driver has closed the socket, whatever it is doing.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's, who ends this process
    # so is the notice, also where a scheduler signals all processes
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    frames = Frames(sock)
    answers: queue.SimpleQueue[tuple[Any, Parcel | None]] = queue.SimpleQueue()

    def show(called: str) -> None:
        _show_in_top(called)
        answers.put((("named", called), None))

    use(MachineRuntime(show, notice))
    coming: queue.SimpleQueue[tuple[int, Parcel]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(frames, coming), daemon=True).start()
    threading.Thread(target=_send, args=(frames, answers), daemon=True).start()
    threading.current_thread().name = name
    _show_in_top(name)
    _, made = coming.get()
    try:
        body_type, arguments, calls = opened(made)
        body = body_type(*_values(arguments))
    except BaseException as error:  # noqa: BLE001 - it ends the process, which the driver hears
        traceback.print_exc()
        frames.send(("failed", f"{type(error).__name__}: {error}"))
        os._exit(1)
    pool = ThreadPoolExecutor(calls, "steepest call")
    while True:
        number, request = coming.get()
        pool.submit(_run, body, number, request, answers)


def _show_in_top(name: str) -> None:
    """Show "steepest worker 12", which is longer than the kernel's 15 characters, as "steepest:w12"."""
    role, _, number = name.removeprefix("steepest ").partition(" ")
    show_command(f"steepest:{role[0]}{number}" if number else f"steepest:{role}")


def _values(arguments: tuple[Any, ...]) -> list[Any]:
    """Return the arguments of a call, with results in place of calls."""
    return [each.get() if isinstance(each, ParcelCall) else each for each in arguments]


def _run(body: Any, number: int, request: Parcel, answers: queue.SimpleQueue[Any]) -> None:
    """Run a method of the body, and answer with its result or exception."""
    try:
        try:
            method, arguments = opened(request)
            values = _values(arguments)
        except UnreadableError as error:
            raise CallRaisedError(str(error), error) from None
        well, result = True, packed(getattr(body, method)(*values)).closed()
    except BaseException as error:  # noqa: BLE001 - the driver's: users' code may call sys.exit()
        well, result = False, _told(error)
    for stream in (sys.stdout, sys.stderr):  # a last line without its end, too
        if not stream.closed:
            stream.flush()
    answers.put((("answer", number, well), result))


def _told(error: BaseException) -> Parcel:
    """Return an exception as a parcel; as words if it cannot be pickled."""
    if isinstance(error, CallRaisedError):
        text, cause = str(error), error.cause
    else:
        text, cause = "".join(traceback.format_exception(error)), error
    try:
        parcel = packed((text, cause)).closed()
        opened(parcel)
    except Exception:  # noqa: BLE001 - of the user's class
        return packed((text, RuntimeError(f"{type(cause).__name__}: {cause}"))).closed()
    return parcel


def _receive(frames: Frames, coming: queue.SimpleQueue[tuple[int, Parcel]]) -> None:
    """Pass on requests; end the process when the driver is gone."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            number, parcel, _ = frames.receive()
            assert parcel is not None
            coming.put((number, parcel))
    os._exit(0)


def _send(frames: Frames, answers: queue.SimpleQueue[tuple[Any, Parcel | None]]) -> None:
    """Send answers, until the driver is gone."""
    with contextlib.suppress(OSError):
        while True:
            frames.send(*answers.get())
    sys.stdout.flush()
    os._exit(0)
