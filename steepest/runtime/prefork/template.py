"""The template of Ray's workers: a process that has imported what workers use, and forks them.

A worker that begins as a fork has torch and Ray in a hundredth of the seconds that their imports take, and shares the
memory of their code. `start_template` starts the process, before Ray; Ray's raylet starts `worker_start`, which hands
the worker over to it. The fork then runs Ray's own ``default_worker.py``. It has one thread and has drawn no random
number when it forks. The template ends with the process that has started it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
import os
import random
import runpy
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from steepest.core.config.run import environment_variable, set_environment
from steepest.runtime.prefork.worker_start import GO, READY, is_same_user, peer

TESTED = "2.60"  # version of Ray
#: What workers import before there is a raylet, and then: see `_import_ray`.
MODULES = (
    "torch",
    "steepest.core.models.torch",
    "steepest.tables.modules.torch_model",
    "msgspec",
    "yaml",
    "jsonschema",
)
RAY_MODULES = (
    "ray.actor",
    "steepest.runtime.ray_runtime",
    "steepest.runtime.process",
    "steepest.loop.model",
)
#: Numbers of threads that libraries read when they are loaded; with one they start none.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_NO_JOB = "ffffffff"  # Ray tells a worker its job when it has one for it
_PROGRAM = (
    "import json, sys; own = sys.path[1:]; sys.path[:] = json.load(sys.stdin); "
    "from steepest.runtime.prefork.template import serve; serve(own, *map(int, sys.argv[1:]))"
)


@dataclass(frozen=True)
class Template:
    """A template that this process has started.

    Attributes:
        name: of its socket.
        process: in which it runs.
    """

    name: str
    process: subprocess.Popen[bytes]

    def end(self) -> None:
        """End it; workers that it has forked are Ray's, and stay."""
        self.process.kill()
        self.process.wait()


def start_template() -> Template | None:
    """Start a template, and return without waiting for its imports.

    Return None if workers should start in Ray's own way: on other systems than Linux, with a version of Ray that
    steepest is not tested with, and if the environment asks for several threads, which libraries start when they are
    loaded.
    """
    several = any(environment_variable(name) not in (None, "1") for name in _THREADS)
    if several or sys.platform != "linux" or not hasattr(os, "pidfd_open") or not _is_tested():
        return None
    name = f"steepest-template-{secrets.token_hex(16)}"
    own = os.pidfd_open(os.getpid())
    with socket.socket(socket.AF_UNIX) as door:  # workers may ask at once, and wait
        door.bind(f"\0{name}")
        door.listen(256)
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(door.fileno()), str(own)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(door.fileno(), own),
            env={**os.environ, **dict.fromkeys(_THREADS, "1")},
            start_new_session=True,  # Ctrl-C is the driver's
        )
    os.close(own)
    assert process.stdin is not None
    with process.stdin as file:
        file.write(json.dumps([each for each in sys.path if isinstance(each, str)]).encode())
    return Template(name, process)


def _is_tested() -> bool:
    try:
        return importlib.metadata.version("ray").startswith(f"{TESTED}.")
    except importlib.metadata.PackageNotFoundError:
        return False


def serve(path: Sequence[str], door: int, driver: int) -> None:
    """Import what workers use, then fork one for each connection, until the driver ends; does not return.

    The first to connect is a child of the raylet; Ray is imported then.

    Args:
        path: `sys.path` of a worker without its first entry.
        door: descriptor of the socket that listens.
        driver: descriptor of the driver's process.

    Raises:
        RuntimeError: an import has started a thread, which forks would not have.
    """
    for module in MODULES:
        importlib.import_module(module)
    listening, ready = socket.socket(fileno=door), False
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no worker remains as a zombie
    while driver not in select.select([door, driver], [], [])[0]:
        client, _ = listening.accept()
        if is_same_user(client):
            if not ready:
                if not (variables := ray_variables(peer(client)[0])):
                    client.close()  # the next one is asked
                    continue
                _import_ray(variables)
                sys.path[:] = path
                ready = True
            if os.fork() == 0:
                listening.close()
                os.close(driver)
                _work(client)
        client.close()
    os._exit(0)


def ray_variables(pid: int) -> dict[str, str]:
    """Return Ray's variables in the environment of a process of this user; none if it has ended."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = [os.fsdecode(each).partition("=") for each in file.read().split(b"\0")]
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {name: value for name, _, value in variables if name.startswith("RAY_")}


def _import_ray(variables: dict[str, str]) -> None:
    """Import Ray, and modules that need it, with the environment variables that Ray gives a child of the raylet.

    Ray reads them when it is imported: the raylet's number, and whether tokens are used.
    """
    set_environment({**variables, "RAY_JOB_ID": _NO_JOB})
    for module in RAY_MODULES:
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"an import has started {threads - 1} threads: workers are no forks")
    gc.collect()
    gc.freeze()  # otherwise the collector would write to each object, which copies its page


def _work(client: socket.socket) -> None:
    """Become the worker that `worker_start.hand_over` asks for; does not return."""
    import numpy
    import torch

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, descriptors, _, _ = socket.recv_fds(client, 4, 3)
    if not length:  # it wants no worker, but has told that there is a raylet
        os._exit(0)
    request = client.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
    arguments, environment, directory, (priority, memory_score) = json.loads(request)
    client.sendall(READY)
    if client.recv(1) != GO:  # it has started the worker itself
        os._exit(0)
    client.close()
    os.setpgid(0, 0)  # as the raylet does it
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.setpriority(os.PRIO_PROCESS, 0, priority)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(memory_score)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    random.seed()  # as processes draw that have just been started
    numpy.random.seed()
    torch.default_generator.seed()
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")
    sys.exit()
