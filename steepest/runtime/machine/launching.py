"""Starts the template of this machine's processes, see `steepest.runtime.machine.template`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

from steepest.core.config.run import environment_of_process

#: Numbers of threads that libraries read when they are loaded; with one they start none.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_PROGRAM = (
    "import json, sys; sys.path[:] = json.load(sys.stdin); "
    "from steepest.runtime.machine.template import serve; serve(*map(int, sys.argv[1:]))"
)
#: Descriptors of a request to fork: the process' end of its socket, its standard output, and its standard error.
FORK_DESCRIPTORS = 3


def start_template(notice: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a template; return its process, and this end of its socket, without waiting for its imports.

    Args:
        notice: descriptor of `Notice`.
    """
    own, theirs = socket.socketpair()
    driver = os.pidfd_open(os.getpid())
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(driver), str(notice)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), driver, notice),
            env={**environment_of_process(), **dict.fromkeys(_THREADS, "1")},
            start_new_session=True,  # Ctrl-C is the driver's
        )
    except BaseException:
        own.close()
        raise
    finally:
        theirs.close()
        os.close(driver)
    assert process.stdin is not None
    with process.stdin as file:
        file.write(json.dumps(searched()).encode())
    return process, own


def searched() -> list[str]:
    """Return where this process looks for modules."""
    return [each for each in sys.path if isinstance(each, str)]
