"""Network namespaces joined by veth pairs, as the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.forked_workers import RAY
from tests.ray_hosts import SECONDS, Place

NEEDS_NAMESPACES = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and iproute2",
    ),
]
PORT = 6390


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


def until(output: object, line: str) -> str:
    """Reads a program's output up to a line that holds some text."""
    seen, deadline = "", time.monotonic() + SECONDS
    while line not in seen:
        ready, _, _ = select.select([output], [], [], max(deadline - time.monotonic(), 0))
        part = os.read(output.fileno(), 4096).decode() if ready else ""  # type: ignore[attr-defined]
        assert part, f"no {line!r} in:\n{seen}"
        seen += part
    return seen


@contextlib.contextmanager
def namespaces(mark: str, addresses: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Two network namespaces, joined by a veth pair whose ends have these addresses."""
    spaces = (f"sp{mark[:6]}a", f"sp{mark[:6]}b")
    try:
        for space in spaces:
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        peer = ("peer", "name", "spb", "netns", spaces[1])
        ip("link", "add", "spa", "netns", spaces[0], "type", "veth", *peer)
        for space, device, address in zip(spaces, ("spa", "spb"), addresses, strict=True):
            # an IPv6 address can be used at once if nobody asks whether others have it
            given = (f"{address}/64", "nodad") if ":" in address else (f"{address}/24",)
            ip("-n", space, "addr", "add", *given, "dev", device)
            ip("-n", space, "link", "set", device, "up")
        yield spaces
    finally:
        for space in spaces:
            inside = subprocess.run(
                ["ip", "netns", "pids", space], check=False, capture_output=True, timeout=20
            )
            for (
                pid
            ) in inside.stdout.split():  # Ray's agents hide their mark, and outlive a killed raylet
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(
                ["ip", "netns", "delete", space], check=False, capture_output=True, timeout=20
            )


@contextlib.contextmanager
def ray_nodes(addresses: tuple[str, str]) -> Iterator[tuple[Place, tuple[str, str]]]:
    """A Ray cluster of two nodes with two CPUs each, at these addresses, in namespaces of their own."""
    place = Place()
    try:
        with namespaces(place.mark, addresses) as spaces:
            place.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": place.mark * 2}
            first = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
            common = ["--num-cpus=2", "--block", "--disable-usage-stats"]
            head = [
                f"--node-ip-address={addresses[0]}",
                "--head",
                f"--port={PORT}",
                "--include-dashboard=false",
                "--no-monitor",
            ]
            other = [f"--node-ip-address={addresses[1]}", f"--address={first}:{PORT}"]
            started = []
            for space, arguments in zip(spaces, (head, other), strict=True):
                process = place.start(
                    "ip", "netns", "exec", space, sys.executable, *RAY, "start", *arguments, *common
                )
                started.append(process)
                until(process.stdout, "runtime started")
            place.environment["RAY_ADDRESS"] = f"{first}:{PORT}"
            yield place, spaces
            place.kill()
            for process in started:
                process.communicate(timeout=20)
    finally:
        place.kill()
        shutil.rmtree(place.directory, ignore_errors=True)
