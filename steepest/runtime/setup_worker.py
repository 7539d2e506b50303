"""Starts a worker process of Ray as Ray's own ``setup_worker.py`` does, without importing Ray for it.

Ray runs that file first in each process of a worker, for environments that tasks may ask for, and then exchanges the
process' program for the worker's, which imports Ray once more. Raylets that steepest starts run this one, see
`steepest.runtime.ray_private.small_ray`. It imports the standard library alone.
"""

from __future__ import annotations

import os
import sys

_ENVIRONMENT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="


def command(arguments: list[str]) -> list[str]:
    """Return the arguments of Python that start the worker: without Ray's own file where no environment is asked for.

    Args:
        arguments: that a raylet has for ``setup_worker.py``.
    """
    worker = next(each for each in arguments if each.endswith("default_worker.py"))
    plain = {f"{_ENVIRONMENT}{{}}", f"{_LANGUAGE}PYTHON"}
    rest = [each for each in arguments if each not in plain]
    if any(each.startswith((_ENVIRONMENT, _LANGUAGE)) for each in rest):
        return [os.path.join(os.path.dirname(worker), "setup_worker.py"), *arguments]
    return rest


if __name__ == "__main__":
    os.execv(sys.executable, [sys.executable, *command(sys.argv[1:])])
