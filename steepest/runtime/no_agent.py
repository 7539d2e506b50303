"""Replaces the agent of Ray's dashboard, which a raylet starts, if that agent has nothing to do.

Without the packages of ``ray[default]`` the agent serves nothing: it writes into files that its ports are -1,
for which the raylet waits before it starts workers, and lives as long as the raylet. This does the same without
importing Ray. If those packages are installed it becomes the agent.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import time
from pathlib import Path

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
_MINIMAL = "--minimal"  # what Ray says of an installation without these packages
_LOOK_SECONDS = 1.0


def write_ports(folder: str, node: str) -> None:
    """Write into a session's folder the files in which a raylet reads that there are no ports."""
    for name in PORTS:
        path = Path(folder, f"{name}_{node}")
        part = path.with_name(f"{path.name}.part")
        part.write_text("-1")
        part.replace(path)


def tell_template() -> None:
    """Tell the template of workers, if there is one, that there is a raylet, whose child this process is."""
    if name := os.environ.get("STEEPEST_WORKER_TEMPLATE"):
        with socket.socket(socket.AF_UNIX) as template, contextlib.suppress(OSError):
            template.connect(f"\0{name}")


def main(arguments: list[str]) -> None:
    """Do the agent's work; return when the process that started this one has ended."""
    tell_template()
    if _MINIMAL not in arguments:
        os.execv(sys.executable, [sys.executable, "-u", *arguments])
    parser = argparse.ArgumentParser()
    parser.add_argument("--session-dir", required=True)
    parser.add_argument("--node-id", required=True)
    parent = os.getppid()
    chosen, _ = parser.parse_known_args(arguments)
    write_ports(chosen.session_dir, chosen.node_id)
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
