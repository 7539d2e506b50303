"""Programs that use plain processes: the example, and what is left of one that is ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 120.0


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start Python with arguments in a session of its own, which is killed at the end."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, env=environment, start_new_session=True,
    ) as program:  # fmt: skip
        try:
            yield program
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)


def members(session: int) -> set[int]:
    """Return the processes of a session that have not ended."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, sid = stat.read_text().rpartition(")")[2].split()[:4]
            if int(sid) == session and state != "Z":
                found.add(int(stat.parent.name))
    return found


@pytest.mark.parametrize(
    ("sent", "start_method"),
    [
        (signal.SIGINT, "spawn"),
        (signal.SIGINT, "forkserver"),
        (signal.SIGTERM, "forkserver"),
        (signal.SIGKILL, "forkserver"),
    ],
)
def test_no_process_is_left_of_a_program_that_is_ended(
    sent: signal.Signals, start_method: str
) -> None:
    with started("-m", "tests.core.program", start_method) as program:
        assert program.stdout is not None
        workers = set(map(int, program.stdout.readline().split()))
        running = members(program.pid)
        assert len(workers) == 2, program.communicate(timeout=SECONDS)
        assert running >= {program.pid, *workers}
        ends = {pid: os.pidfd_open(pid) for pid in running}
        if sent == signal.SIGINT:  # as a terminal does
            os.killpg(program.pid, sent)
        else:
            os.kill(program.pid, sent)
        _, errors = program.communicate(timeout=SECONDS)

        for pid, end in ends.items():
            assert wait([end], SECONDS), f"process {pid} is left"
            os.close(end)
        assert members(program.pid) == set()
        assert errors.count("Traceback") == (1 if sent == signal.SIGINT else 0), errors


@pytest.mark.parametrize(
    "strategy",
    ["ps", *(pytest.param(name, marks=pytest.mark.long) for name in ("async", "ssp", "allreduce"))],
)
def test_the_example_survives_the_death_of_a_worker(strategy: str) -> None:
    with started("examples/core_digits.py", strategy) as program:
        assert program.stdout is not None
        pids = re.findall(r"\d+", program.stdout.readline())
        os.kill(int(pids[1]), signal.SIGKILL)
        output, errors = program.communicate(timeout=SECONDS)

    assert program.returncode == 0, errors
    assert f"worker 1 (pid {pids[1]}) died: killed by SIGKILL" in errors
    found = re.fullmatch(rf"{strategy}: (\d+\.\d)% after 2[34]\d steps\n", output)
    assert found is not None, output
    assert float(found[1]) > 88
