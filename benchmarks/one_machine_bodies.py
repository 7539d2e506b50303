"""The programs of `benchmarks.one_machine`, each on one runtime.

python -m benchmarks.one_machine_bodies PART RUNTIME ROUNDS
"""

from __future__ import annotations

import gc
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from benchmarks.models import WORKLOADS
from benchmarks.one_machine import WORKERS, _descendants
from steepest import Callback, DistributedSGD, FailureConfig, RunConfig, TorchModel
from steepest.testing import linear_model_creator

RUNS = 50
STEPS = 100


def _creator(name: str) -> Any:
    workload = WORKLOADS[name]

    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            workload.build(),
            loss=F.nll_loss,
            data=workload.data(),
            batch_size=workload.batch_size,
            optimizer=workload.optimizer,
        )

    return create


class _Kills(Callback):
    """Kills a worker at a step, and notes the longest time between two steps from then on."""

    def __init__(self, pid: int, step: int) -> None:
        self._pid, self._step = pid, step
        self._last = time.monotonic()
        self.gap = 0.0

    def on_step(self, sgd: Any, result: Any) -> None:
        now = time.monotonic()
        if result.step > self._step:
            self.gap = max(self.gap, now - self._last)
        if result.step == self._step:
            os.kill(self._pid, signal.SIGKILL)
        self._last = now


def death(runtime: str, rounds: int) -> str:
    """Return the time without a step of the job, until the worker's successor has had its part in steps."""
    gaps = []
    config = RunConfig(runtime=runtime, failure=FailureConfig(spares=0, patience=float("inf")))
    for _ in range(rounds):
        with DistributedSGD(_creator("convnet"), WORKERS, run_config=config) as sgd:
            sgd.fit(steps=20, progress=False)
            kills = _Kills(sgd.foreach_worker(lambda worker: worker.pid)[1], 30)
            sgd.fit(steps=60, callbacks=[kills], progress=False)
            assert sgd.stats().replaced == 1
            gaps.append(kills.gap)
    shown = ", ".join(f"{gap:.2f}" for gap in sorted(gaps))
    return f"{statistics.median(gaps):.2f} s without a step ({shown})"


def idle(runtime: str, rounds: int) -> str:
    """Return the memory of the driver and of what it has started, but for workers and servers."""
    with DistributedSGD(_creator("convnet"), WORKERS, run_config=RunConfig(runtime=runtime)) as sgd:
        sgd.fit(steps=20, progress=False)
        job = {process.pid for process in sgd.processes()}
        beside = [pid for pid in _descendants(os.getpid()) if pid not in job]
        own, others = _memory([os.getpid()]), _memory(beside)
        return (
            f"driver {own:.0f} MB, {len(beside)} processes beside the job's {others:.0f} MB; the job's {len(job)} "
            f"{_memory([*job]):.0f} MB"
        )


def _memory(pids: list[int]) -> float:
    """Return the proportional set sizes of processes together, in MB."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1000


def runs(runtime: str, rounds: int) -> str:
    """Return what the program has after each ten jobs."""
    shown = []
    for number in range(1, RUNS + 1):
        with DistributedSGD(
            linear_model_creator(), 1, run_config=RunConfig(runtime=runtime)
        ) as sgd:
            sgd.step()
        if number % 10 == 0:
            gc.collect()
            counts = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
            resident = int(Path("/proc/self/statm").read_text().split()[1])
            megabytes = resident * os.sysconf("SC_PAGE_SIZE") / 1e6
            shown.append("/".join([*map(str, counts), f"{megabytes:.0f}"]))
    return f"descriptors/threads/MB after 10, 20, ... runs: {' '.join(shown)}"


def steps(runtime: str, rounds: int) -> str:
    """Return the time of a step of two models."""
    shown = []
    for name in ("convnet", "mlp"):
        config = RunConfig(runtime=runtime)
        with DistributedSGD(_creator(name), WORKERS, run_config=config) as sgd:
            count = STEPS if name == "convnet" else STEPS // 10
            sgd.fit(steps=count, progress=False)
            times = []
            for _ in range(rounds):
                began = time.monotonic()
                sgd.fit(steps=count, progress=False)
                times.append(1000 * (time.monotonic() - began) / count)
            shown.append(
                f"{name} {statistics.median(times):.2f} ms ({min(times):.2f} to {max(times):.2f})"
            )
    return ", ".join(shown)


if __name__ == "__main__":
    part, runtime, rounds = sys.argv[1:]
    chosen = {"death": death, "idle": idle, "runs": runs, "steps": steps}[part]
    print(chosen(runtime, int(rounds)))
