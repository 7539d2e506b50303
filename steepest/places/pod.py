"""What runs in the pods of a Ray cluster on Kubernetes, beside Ray: python -m steepest.places.pod WORD."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from steepest.core.config.run import environment_variable

_LOOK_SECONDS = 1.0
_DRAIN_SECONDS = 30.0  # that Ray's command may take beyond the time that the pod has


def check() -> int:
    """Print whether the image lacks packages that KubeRay's probes need; return the exit status, 0 if it lacks none.

    The probes ask Ray's dashboard, and its agent on each node, which start with the packages of
    ``ray[default]`` alone. Without them the pod never becomes ready, and nothing says why.
    """
    try:
        importlib.import_module("ray.dashboard.optional_deps")
    except ImportError as error:
        sys.stderr.write(
            f"this image has no ray[default] ({error}), without which no pod of KubeRay's becomes "
            "ready: install 'steepest[kubernetes]' in it\n"
        )
        return 1
    return 0


def drain_command(seconds: int) -> list[str]:
    """Return the command that tells Ray that this node will be removed in a number of seconds."""
    return [
        "ray", "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod goes",
        "--deadline-remaining-seconds", str(seconds),
    ]  # fmt: skip


def leave(seconds: int) -> int:
    """Tell Ray that this node will be removed, wait until Ray has left it, and return 0.

    Ray's node ends by itself when all has moved away, and with it the container that this runs in.
    If the cluster's head does not answer, the whole cluster is ending, and this returns at once.

    Args:
        seconds: that this node has.
    """
    until = time.monotonic() + seconds
    if not _head_answers():
        return 0
    try:
        subprocess.run(drain_command(seconds), timeout=seconds + _DRAIN_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return 0
    while time.monotonic() < until and _head_answers():
        time.sleep(_LOOK_SECONDS)
    return 0


def _head_answers() -> bool:
    """Return whether something listens at the address of RAY_ADDRESS, which KubeRay sets."""
    host, _, port = (environment_variable("RAY_ADDRESS") or "").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5.0):
            return True
    except (OSError, ValueError):
        return False


def main(words: Sequence[str]) -> int:
    """Run "check", or "leave" with seconds, and return the exit status."""
    return leave(int(words[1])) if words[0] == "leave" else check()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
