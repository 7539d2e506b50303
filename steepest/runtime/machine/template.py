"""The template of this machine's processes: it has imported what they use, and forks them.

A fork has torch in a hundredth of the seconds that its import takes. The template has one thread, and ends with the
program that has started it; its forks end with it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import os
import random
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from steepest.core.config.run import environment_of_process, set_environment
from steepest.runtime.machine import process
from steepest.runtime.machine.launching import FORK_DESCRIPTORS
from steepest.runtime.machine.notice import Notice
from steepest.runtime.machine.parcels import Frames

#: What processes use, imported before the first fork.
MODULES = (
    "msgspec",
    "steepest.runtime.process",
    "steepest.loop.model",
    "steepest.tables.modules.torch_model",
)
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG, see prctl(2)


def serve(control: int, driver: int, notice: int) -> None:
    """Import what processes use, then fork one for each request, until the driver ends; does not return.

    A request has a number and what `begin_as` takes, with the three descriptors of the process. It is answered by
    ("started", number, pid) with a descriptor of the process (pidfd), and when that has ended by
    ("ended", number, status) with the status of `os.waitstatus_to_exitcode`.

    Args:
        control: descriptor of the socket to the driver.
        driver: descriptor of the driver's process.
        notice: descriptor of `Notice`.

    Raises:
        RuntimeError: an import has started a thread, which forks would not have.
    """
    for module in MODULES:
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"an import has started {threads - 1} threads, which forks would lack")
    gc.collect()
    gc.freeze()  # otherwise the collector would write to each object, which copies its page
    frames = Frames(socket.socket(fileno=control))
    forks: dict[int, tuple[int, int]] = {}  # number and pid, by the descriptor of the process
    while driver not in (ready := select.select([control, driver, *forks], [], [])[0]):
        for descriptor in ready:
            if descriptor in forks:
                number, pid = forks.pop(descriptor)
                os.close(descriptor)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                frames.send(("ended", number, status))
            else:
                _fork(frames, driver, notice, forks)
    os._exit(0)


def _fork(frames: Frames, driver: int, notice: int, forks: dict[int, tuple[int, int]]) -> None:
    """Fork the process of the next request."""
    try:
        (number, settings), _, ends = frames.receive(FORK_DESCRIPTORS)
    except (EOFError, ConnectionError):  # the driver has ended
        os._exit(0)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        for descriptor in (frames.socket.fileno(), driver, *forks):
            os.close(descriptor)
        begin_as(settings, ends, parent, notice)
    for descriptor in ends:
        os.close(descriptor)
    descriptor = os.pidfd_open(pid)
    forks[descriptor] = number, pid
    frames.send(("started", number, pid), descriptors=[descriptor])


def begin_as(settings: Mapping[str, Any], ends: Sequence[int], parent: int, notice: int) -> None:
    """Become a process of a job; does not return.

    Args:
        settings: the "environment", "directory", "path" where modules are looked for, and "name".
        ends: descriptors of the socket to the driver, of its standard output, and of its standard error.
        parent: the template's number.
        notice: descriptor of `Notice`.
    """
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended meanwhile
        os._exit(1)
    sock, *printed = ends
    for descriptor, target in zip(printed, (1, 2), strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    errors = io.FileIO(2, "w", closefd=False)
    sys.stderr = io.TextIOWrapper(errors, errors="backslashreplace", write_through=True)
    environment = settings["environment"]
    set_environment({**dict.fromkeys(environment_of_process()), **environment})
    os.chdir(settings["directory"])
    sys.path[:] = settings["path"]
    _draw_anew()
    process.serve(socket.socket(fileno=sock), settings["name"], Notice(notice))


def _draw_anew() -> None:
    """Seed all generators as in a process that has just been started."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.default_generator.seed()
