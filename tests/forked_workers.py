"""Ray's worker processes as forks of one that has imported torch: a job of the tests starts in tenths of a second.

After `fork_workers()`, raylets start this file where they would start Ray's `setup_worker.py`, with
the same arguments. The first of a raylet's workers to run it leaves a template behind, which
imports what workers use and ends with the raylet. Each worker hands the template its arguments,
environment and output, and ends; a fork of the template then does what Ray's own
`default_worker.py` does. Workers with a runtime environment of their own start as Ray starts them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys

ENVIRONMENT = "--serialized-runtime-env-context="
MODULES = (
    "torch",
    "ray.actor",
    "steepest.runtime.process",
    "steepest.core.models.torch",
    "steepest.tables.modules.torch_model",
    "steepest.testing",
    "pytest",
)


#: arguments of the interpreter that make it Ray's command line, with such raylets
RAY = (
    "-c",
    "from ray.scripts.scripts import main; from tests.forked_workers import fork_workers; fork_workers(); main()",
)


def fork_workers() -> None:
    """Have raylets that this process starts from now on fork their workers. Does nothing but on Linux."""
    from ray._private import ray_constants

    if sys.platform == "linux":
        ray_constants.SETUP_WORKER_FILENAME = os.path.abspath(__file__)


def start(arguments: list[str]) -> None:
    """Start a worker: a fork of the template where that is possible, else as Ray does it."""
    own = any(each.startswith(ENVIRONMENT) and each != f"{ENVIRONMENT}{{}}" for each in arguments)
    if own or not hand_over(arguments):
        import ray

        usual = os.path.join(
            os.path.dirname(ray.__file__), "_private", "workers", "setup_worker.py"
        )
        os.execv(sys.executable, [sys.executable, usual, *arguments])


def hand_over(arguments: list[str]) -> bool:
    """Have the template of this raylet start the worker; return whether it did."""
    name = f"\0steepest-tests-{os.environ['RAY_RAYLET_PID']}"
    with socket.socket(socket.AF_UNIX) as door, contextlib.suppress(OSError):  # the template exists
        door.bind(name)
        door.listen(256)
        if os.fork() == 0:
            serve(door)
    request = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
    try:
        with socket.socket(socket.AF_UNIX) as template:
            template.connect(name)
            socket.send_fds(template, [len(request).to_bytes(4, "big")], [0, 1, 2])
            template.sendall(request)
            return bool(template.recv(1))
    except ConnectionError:  # it could not be made
        return False


def serve(door: socket.socket) -> None:
    """Fork a worker for each connection, until the raylet ends."""
    os.environ["RAY_JOB_ID"] = (
        "ffffffff"  # none, instead of that of the first worker: Ray reads it when it is imported
    )
    for module in MODULES:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, (
        "a fork has no other thread than the one that forked"
    )
    gc.freeze()  # else the collector would write to each object, which copies its page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no worker remains as a zombie
    raylet = os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
    while raylet not in select.select([door, raylet], [], [])[0]:
        client, _ = door.accept()
        if os.fork() == 0:
            door.close()
            os.close(raylet)
            work(client)
        client.close()
    os._exit(0)


def work(client: socket.socket) -> None:
    """Be a worker; does not return."""
    import random
    import runpy

    import numpy as np

    length, descriptors, _, _ = socket.recv_fds(client, 4, 3)
    request = client.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
    arguments, environment, directory = json.loads(request)
    client.send(b"1")
    client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)  # as the raylet does it
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    random.seed()
    np.random.seed()
    script = next(
        number
        for number, argument in enumerate(arguments)
        if argument.endswith("default_worker.py")
    )
    sys.argv = [
        each for each in arguments[script:] if not each.startswith((ENVIRONMENT, "--language="))
    ]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    start(sys.argv[1:])
