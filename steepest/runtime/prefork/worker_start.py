"""Starts a worker process of Ray in the place of Ray's own ``setup_worker.py``: a fork of the template if there is one.

Raylets that steepest starts run this one, see `steepest.runtime.ray_private.small_ray`: it has another name than Ray's,
which raylets leave out of the command where no environment is asked for. A fork of the template, see
`steepest.runtime.prefork.template`, becomes the worker, and this process ends. Without a template this process' program
is exchanged for the worker's. It imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys

#: The environment variable that names the template's socket, in the abstract namespace.
TEMPLATE = "STEEPEST_WORKER_TEMPLATE"
#: What the template's fork says when it is there, and what it is answered: only then it becomes the worker.
READY, GO = b"r", b"g"
_ENVIRONMENT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="
#: For a template that still imports; Ray waits 60 s for a worker that it has started.
_ENOUGH_SECONDS = 30.0


def command(arguments: list[str]) -> list[str]:
    """Return Python's arguments that start the worker: without Ray's own file unless an environment is asked for.

    Args:
        arguments: that a raylet has for ``setup_worker.py``.
    """
    worker = next(each for each in arguments if each.endswith("default_worker.py"))
    plain = {f"{_ENVIRONMENT}{{}}", f"{_LANGUAGE}PYTHON"}
    rest = [each for each in arguments if each not in plain]
    if any(each.startswith((_ENVIRONMENT, _LANGUAGE)) for each in rest):
        return [os.path.join(os.path.dirname(worker), "setup_worker.py"), *arguments]
    return rest


def hand_over(name: str, arguments: list[str], seconds: float = _ENOUGH_SECONDS) -> bool:
    """Have the template fork this worker; return False if there is no template, or it ends or is too slow.

    Args:
        name: of the template's socket.
        arguments: of Python, as `command` returns them; the fork has them, and this process' environment,
            directory, output, priority, and score for the killer of processes when memory is short.
        seconds: that the template may take.
    """
    own = os.getpriority(os.PRIO_PROCESS, 0), _memory_score()
    request = json.dumps([arguments, dict(os.environ), os.getcwd(), own]).encode()
    with socket.socket(socket.AF_UNIX) as template, contextlib.suppress(OSError):
        template.settimeout(seconds)
        template.connect(f"\0{name}")
        if is_same_user(template):
            socket.send_fds(template, [len(request).to_bytes(4, "big")], [0, 1, 2])
            template.sendall(request)
            if template.recv(1) == READY:
                template.sendall(GO)
                return True
    return False


def is_same_user(other: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket belongs to this one's user."""
    return peer(other)[1] == os.geteuid()


def peer(other: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    pid, user, group = struct.unpack(
        "3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return pid, user, group


def _memory_score() -> str:
    with open("/proc/self/oom_score_adj") as file:
        return file.read()


def main(arguments: list[str]) -> None:
    """Start the worker, in place of this process or as a fork of the template."""
    program = command(arguments)
    name = os.environ.get(TEMPLATE)
    forks = name is not None and program[0].endswith("default_worker.py")
    if not (name and forks and hand_over(name, program)):
        os.execv(sys.executable, [sys.executable, *program])


if __name__ == "__main__":
    main(sys.argv[1:])
