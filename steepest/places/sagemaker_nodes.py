"""A process that waits until Ray has a node of each host, and says on the way which are missing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

LOOK_SECONDS = 0.5


def missing_among(nodes: Iterable[Mapping[str, Any]], hosts: Iterable[str]) -> list[str]:
    """Return the hosts (names that nodes were started with) without a living node in what `ray.nodes()` returned."""
    there = {node["NodeName"] for node in nodes if node["Alive"]}
    return [host for host in hosts if host not in there]


def main() -> None:
    """Wait for the hosts that the command line names, in the cluster that RAY_ADDRESS names."""
    import ray

    ray.init(log_to_driver=False)
    before: list[str] | None = None
    while missing := missing_among(ray.nodes(), sys.argv[1:]):
        if missing != before:
            sys.stdout.write(f"missing: {' '.join(missing)}\n")
            sys.stdout.flush()
            before = missing
        time.sleep(LOOK_SECONDS)
    ray.shutdown()
