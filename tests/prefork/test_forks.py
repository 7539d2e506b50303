"""Workers of a Ray that steepest starts: forks of a template, of which nothing is left, or as Ray starts them."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from steepest.runtime.prefork import template, worker_start
from tests.processes import until

WORKER = "/ray/default_worker.py"
SECONDS = 60.0
PROGRAM = """
import json, os, sys
import ray
from steepest.runtime.connection import start_ray

@ray.remote
class Worker:
    def look(self):
        import random, numpy, torch
        drawn = random.random(), float(numpy.random.random()), torch.initial_seed()
        return os.getpid(), os.getppid(), drawn, os.nice(0)

start_ray(2)
workers = [Worker.remote() for _ in range(2)]
node = ray._private.worker._global_node
own = [each[0].process.pid for each in node.all_processes.values()]
template = node.all_processes.get("worker_template")
print(json.dumps([template and template[0].process.pid, own, ray.get([w.look.remote() for w in workers])]), flush=True)
sys.stdin.read()
"""


def end(descriptor: int) -> bool:
    """Return whether the process of a descriptor ends within a time."""
    ended = bool(select.select([descriptor], [], [], SECONDS)[0])
    os.close(descriptor)
    return ended


@pytest.mark.few(1)
@pytest.mark.ray
@pytest.mark.long
@pytest.mark.parametrize("killed", [False, True])
def test_workers_are_forks_of_which_nothing_is_left(killed: bool) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with program:
        look_at(program, killed)


def look_at(program: subprocess.Popen[bytes], killed: bool) -> None:
    """Check what a program's workers are, end it, and see that all its processes end."""
    assert program.stdin is not None
    assert program.stdout is not None
    parent, own, workers = json.loads(program.stdout.readline())
    pids = {pid for pid, *_ in workers}
    assert parent in own
    assert len(pids) == 2
    assert {each for _, each, *_ in workers} == {parent}
    first, second = (drawn for _, _, drawn, _ in workers)
    assert not set(first) & set(second)
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    assert {nice for *_, nice in workers} == {min(priority + 15, 19)}  # Ray's for workers
    processes = [os.pidfd_open(pid) for pid in (*pids, *own)]
    if killed:
        program.send_signal(signal.SIGKILL)
    program.stdin.close()
    program.wait(SECONDS)
    assert all(end(each) for each in processes)


@pytest.mark.full
@pytest.mark.ray
def test_without_a_template_workers_start_as_ray_starts_them() -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=b"",
        stdout=subprocess.PIPE,
        env={**os.environ, "MKL_NUM_THREADS": "2"},
        check=True,
        timeout=2 * SECONDS,
    )
    parent, own, workers = json.loads(found.stdout)
    assert parent is None
    assert {each for _, each, *_ in workers} <= {*own}  # the raylet


@pytest.mark.parametrize("case", ["missing", "ended", "slow", "other"])
def test_a_template_that_does_not_answer_is_done_without(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, started = secrets.token_hex(8), list[object]()
    monkeypatch.setenv(worker_start.TEMPLATE, name)
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append(arguments))
    monkeypatch.setattr(worker_start.hand_over, "__defaults__", (0.05,))
    if case == "other":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX) as door:
        if case != "missing":
            door.bind(f"\0{name}")
            door.listen()
        if case == "ended":
            door.close()
        worker_start.main([WORKER, "--a=b"])
        if case == "other":  # it is told nothing
            with door.accept()[0] as told:
                assert told.recv(1) == b""
    assert started == [[sys.executable, WORKER, "--a=b"]]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_worker_that_was_started_otherwise_is_not_forked_too() -> None:
    """The fork waits for the word that it is to be the worker."""
    starter, other = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        starter.close()
        template._work(other)
    other.close()
    request = json.dumps([["/none"], dict(os.environ), os.getcwd(), [0, "0"]]).encode()
    socket.send_fds(starter, [len(request).to_bytes(4, "big")], [0, 1, 2])
    starter.sendall(request)
    assert starter.recv(1) == worker_start.READY
    starter.close()  # its time was over
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize(
    ("name", "value"), [("OMP_NUM_THREADS", "2"), ("OPENBLAS_NUM_THREADS", "8")]
)
def test_no_template_where_libraries_start_threads(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert template.start_template() is None


def test_no_template_with_another_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "TESTED", "2.6")
    assert template.start_template() is None


def test_neither_file_imports_ray() -> None:
    """The template begins before its process knows the raylet, whose number Ray reads when it is imported."""
    text = (
        "import sys, steepest.runtime.prefork.template as t; "
        "[__import__(each) for each in t.MODULES]; sys.exit('ray' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", text], check=True, cwd=Path(__file__).parents[2])


def test_a_template_passes_over_who_has_ended_before_it_looks() -> None:
    """It asks the next one for Ray's variables, which a child of the raylet has."""
    told = {"RAY_RAYLET_PID": "7", "OTHER": "8"}
    with subprocess.Popen(["cat"], env=told, stdin=subprocess.PIPE) as process:
        until(
            lambda: template.ray_variables(process.pid) == {"RAY_RAYLET_PID": "7"}
        )  # exec is over
    assert template.ray_variables(process.pid) == {}
