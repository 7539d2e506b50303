"""Of a program on processes of this machine that is ended amid training nothing is left, whatever ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 120.0


def children(pid: int) -> set[int]:
    """Return the processes that a process has started, and those that these have."""
    found = set[int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found |= {int(stat.parent.name), *children(int(stat.parent.name))}
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (signal.SIGINT, -signal.SIGINT),
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_no_process_is_left(sent: signal.Signals, status: int) -> None:
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, "-m", "tests.driver.ended_program"], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as program:  # fmt: skip
        assert program.stdout is not None
        workers = set(map(int, program.stdout.readline().split()))
        running = children(program.pid)
        ends = {pid: os.pidfd_open(pid) for pid in running}
        assert len(workers) == 2
        assert running > workers  # and their template
        if sent == signal.SIGINT:  # as a terminal does
            os.killpg(program.pid, sent)
        else:
            os.kill(program.pid, sent)
        _, errors = program.communicate(timeout=SECONDS)

    assert program.returncode == status, errors
    assert errors.count("Traceback") == (sent == signal.SIGINT), errors
    for pid, end in ends.items():
        assert wait([end], SECONDS), f"process {pid} is left"
        os.close(end)
    assert set(os.listdir("/dev/shm")) <= before
