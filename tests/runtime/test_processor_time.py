"""A process' processor time, as the kernel tells it: what computes is seen to, what is stopped or gone is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from steepest.runtime.places import processor_use

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
