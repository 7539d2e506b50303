"""Signals to processes and what happens later, in a simulation as on Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from threading import Thread

from steepest.core.system import system
from tests.simulation.run import running


def send_signal(pid: int, number: int) -> None:
    """Do what `os.kill` does; in a simulation to a process of the calling thread's node."""
    simulation = running()
    (os.kill if simulation is None else simulation.world.send_signal)(pid, number)


def later(seconds: float, function: Callable[[], object]) -> Thread:
    """Call a function after some seconds, on a thread of its own, which is returned."""

    def run() -> None:
        system().event().wait(seconds)
        function()

    return system().start(run, "later")


def kill_this_process() -> None:
    """End the calling process as SIGKILL does."""
    if (simulation := running()) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        simulation.world.exit(-signal.SIGKILL)
