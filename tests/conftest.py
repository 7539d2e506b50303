"""One Ray cluster for all tests that ask for it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; Ray's processes inherit it

import pytest
import torch

from tests.forked_workers import fork_workers

ROOT = Path(__file__).resolve().parent.parent
TEST_SECONDS = 180
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    """No test may hang: after three minutes it fails where it is."""

    def give_up(signum: int, frame: object) -> None:
        raise TimeoutError(f"the test ran for {TEST_SECONDS} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TEST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster of eight CPUs, however many there are; its processes find steepest and the tests' modules."""
    ray = pytest.importorskip("ray")
    found = [str(ROOT), str(ROOT / "tests"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(dict.fromkeys(path for path in found if path)))
        patch.delenv("RAY_ADDRESS", raising=False)
        fork_workers()
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        try:
            yield
        finally:
            ray.shutdown()
