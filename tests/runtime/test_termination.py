"""SIGTERM's handler: which one it replaces, what a second signal does, and the status amid Ray's calls."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from steepest.runtime import signals
from steepest.runtime.job_runtime import using
from steepest.runtime.machine.runtime import MachineRuntime
from steepest.runtime.ray_runtime import RayRuntime


@pytest.fixture(autouse=True)
def handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts the handler back, and forgets that this process began to end, which goes on."""
    monkeypatch.setattr(signals, "_end_without_runtime", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    signals._began = -float("inf")


def rays(number: int, frame: object) -> None:
    """Stands for what `ray.init` installs."""


rays.__module__, rays.__qualname__ = "ray._private.worker", "init.<locals>.sigterm_handler"


def own(number: int, frame: object) -> None:
    """A user's."""


def test_a_users_handler_stays() -> None:
    signal.signal(signal.SIGTERM, own)
    for each in (RayRuntime(), MachineRuntime()):
        with using(each):
            signals.end_on_sigterm()
        assert signal.getsignal(signal.SIGTERM) is own


@pytest.mark.parametrize("left", [rays, signal.SIG_DFL])
def test_on_processes_the_status_is_143_too_also_after_a_shutdown_of_ray(left: Any) -> None:
    signal.signal(signal.SIGTERM, left)
    with using(MachineRuntime()):
        signals.end_on_sigterm()
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143


def test_a_signal_ends_the_process_and_its_repetition_does_not_cut_that_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    signal.signal(signal.SIGTERM, rays)
    with using(RayRuntime()):
        signals.end_on_sigterm()
    for passed in (0.0, 31.0):  # a notebook goes on, and gets another one later
        now[0] += passed
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == 143
        now[0] += 2.0
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.ray
def test_a_signal_while_the_driver_waits_in_ray_keeps_the_exit_status(ray_cluster: None) -> None:
    """Ray runs the handler there, and raises another SystemExit than the handler did."""
    signal.signal(signal.SIGTERM, rays)
    with using(RayRuntime()):
        signals.end_on_sigterm()

    @ray.remote(num_cpus=0, max_retries=0)
    def end(driver: int) -> None:
        os.kill(driver, signal.SIGTERM)
        threading.Event().wait()

    call = end.remote(os.getpid())
    try:
        with pytest.raises(SystemExit) as ended:
            ray.wait([call])
    finally:
        ray.cancel(call, force=True)
    assert ended.value.code == 143
