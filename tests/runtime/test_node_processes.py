"""What a node's kernel tells of a process: its processor time, when it began; only that process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from steepest.runtime.job_runtime import using
from steepest.runtime.places import Place, began, kill, processor_use, seconds_up
from steepest.runtime.ray_runtime import RayRuntime

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")


def test_it_grows_while_a_process_computes() -> None:
    before = processor_use(os.getpid())
    assert before is not None
    while (now := processor_use(os.getpid())) is not None and now[0] < before[0] + 0.05:
        sum(range(10_000))
    assert now is not None


def test_a_thread_that_computes_or_waits_for_a_processor_is_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        while True:  # it does once it has started
            use = processor_use(child.pid)
            assert use is not None
            if use[1]:
                break
    finally:
        child.kill()
        child.wait()


def test_a_process_that_is_stopped_defunct_or_gone_computes_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert processor_use(child.pid) is not None
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert processor_use(child.pid) is None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processor_use(child.pid) is None, "defunct"
    child.wait()
    assert child.stdin is not None
    child.stdin.close()
    assert processor_use(child.pid) is None


class _ThisNode(RayRuntime):
    """A runtime of one node, which ends no actors."""

    node = "here"

    def end(self, process: Any) -> None:
        """Do nothing."""


def test_a_process_that_has_the_pid_of_an_earlier_one_is_not_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    born = began(child.pid)
    assert born is not None
    with using(_ThisNode()):
        kill(Place("here", "host", child.pid, (), born - 1), None)
        kill(Place("elsewhere", "host", child.pid, (), born), None)
        child.communicate(b"\n")
        assert child.returncode == 0
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        place = Place("here", "host", child.pid, (), began(child.pid))
        assert (seconds_up(place) or -1.0) >= 0.0
        kill(place, None)
        assert child.wait() == -signal.SIGKILL
        child.communicate()
        assert began(child.pid) is None
