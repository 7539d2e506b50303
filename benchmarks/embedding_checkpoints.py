"""Steps of a job with a large embedding table while a checkpoint is written, beside those before and after.

    python -m benchmarks.embedding_checkpoints                        # 10 million rows, about 6 GB
    python -m benchmarks.embedding_checkpoints --millions 1 --rounds 5
    python -m benchmarks.embedding_checkpoints --snapshots            # with snapshots for recovery too

One table of dimension 16 with Adagrad; two workers and one server process on this machine, each with one thread.
A first epoch makes all rows; then each worker takes 4,096 x 26 ids by a power law (n^-1.2) in a step. Every ``--every``
steps a checkpoint is due. A step counts as one during a checkpoint while that is being read or written.

A ratio is that of the steps during a checkpoint over those from its end to the next one: of the mean and the median
time, the longest, and the seconds that all processes of the job use of the processor in a step, driver included.
``driver_bytes`` is how much the driver's memory has grown since the first step, at its highest until then. Give
``--every`` so that a checkpoint is written in half of the time. The first checkpoint is whole; the others, with
``--increments``, hold what has changed.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import argparse
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.overhead import machine, positive, progress, ratios
from steepest import (
    Callback,
    Checkpoints,
    DistributedSGD,
    FailureConfig,
    RunConfig,
    StepResult,
    TorchModel,
)
from steepest.runtime.places import processor_use
from steepest.tables.modules.embedding import Embedding
from steepest.tables.rows.initial import Uniform
from steepest.tables.rows.row_optimizers import Adagrad
from steepest.tables.rows.table import Table

FEATURES, BATCH, DIM = 26, 4096, 16
SPREAD = 2_654_435_761  # ids that are no small numbers
LOGGER = "steepest.runtime.driver.checkpoint_writer"


class Clicks(nn.Module):
    """Sums of rows: of all ids once in the first steps, and by a power law in later ones."""

    def __init__(self, rows: int, fill: int, seed: int) -> None:
        super().__init__()
        initial = Uniform(-0.1, 0.1)
        self.rows = Embedding(
            Table(name="rows", dim=DIM, optimizer=Adagrad(lr=0.01), initial=initial)
        )
        self.bias = nn.Parameter(torch.zeros(1))
        random = np.random.default_rng(seed)
        ids = (random.zipf(1.2, (16, BATCH, FEATURES)) * SPREAD) % rows
        self._ids, self._fill, self._calls = torch.from_numpy(ids), fill, 0

    def forward(self, numbers: Tensor) -> Tensor:
        self._calls += 1
        if self._calls <= self._fill:
            ids = numbers[:, None] * FEATURES + torch.arange(FEATURES)
        else:
            ids = self._ids[self._calls % len(self._ids), : len(numbers)]
        return self.rows(ids).sum((1, 2)) + self.bias


class Clock(Callback, logging.Handler):
    """Notes when steps and checkpoints end."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.steps: list[float] = []
        self.processor: list[float] = []  # seconds that the job's processes have used until then
        self.processes: set[int] = set()
        self.checkpoints: list[dict[str, Any]] = []
        self.before = 0  # bytes that the driver had before the first checkpoint

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        if not self.processes:
            places = trainer._training.cluster.places.values()
            self.processes = {os.getpid(), *(place.pid for place in places)}
        self.steps.append(time.monotonic())
        self.before = self.before or memory("VmRSS")
        used = [processor_use(pid) for pid in self.processes]
        self.processor.append(sum(each[0] for each in used if each is not None))

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and len(record.args) == 3:
            path, paused, written = record.args
            size = sum(file.stat().st_size for file in Path(str(path)).glob("*"))
            end = time.monotonic()
            about = {"end": end, "paused": paused, "seconds": written, "bytes": size}
            about["driver_bytes"] = memory("VmHWM") - self.before
            self.checkpoints.append(about)
            progress(f"{paused:.3f} s pause, {written:.1f} s, {size:,} bytes")


def memory(name: str) -> int:
    """Return a figure of this process in /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(found) * 1024


def run(rows: int, every: int, rounds: int, increments: int, snapshots: bool) -> dict[str, Any]:
    samples = -(-rows // FEATURES)
    fill = -(-samples // (2 * BATCH))

    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            Clicks(rows, fill, worker_index),
            loss=lambda output, target: output.mean(),
            data=(torch.arange(samples), torch.zeros(samples)),
            batch_size=BATCH,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        )

    clock = Clock()
    logging.getLogger(LOGGER).addHandler(clock)
    logging.getLogger(LOGGER).setLevel(logging.INFO)
    failure = FailureConfig(snapshot_every=None if snapshots else 0)
    every = max(every, fill)  # the first checkpoint has all rows
    with tempfile.TemporaryDirectory() as folder:
        kept = Checkpoints(folder, every, keep=1, increments=increments)
        with DistributedSGD(
            create, 2, run_config=RunConfig(failure=failure), checkpoints=kept
        ) as sgd:
            progress(f"{rows:,} rows are made in {fill} steps")
            sgd.fit(steps=every * (rounds + 1), callbacks=[clock], progress="lines")
    return windows(clock)


def windows(clock: Clock) -> dict[str, Any]:
    """Times of steps during each checkpoint, and after it until the next one."""
    found = []
    steps = list(zip(clock.steps, clock.steps[1:], strict=False))
    used = [b - a for a, b in zip(clock.processor, clock.processor[1:], strict=False)]
    begins = [each["end"] - each["paused"] - each["seconds"] for each in clock.checkpoints]
    for at, each in enumerate(clock.checkpoints[:-1]):  # the last one is that of the end
        parts = {"during": (begins[at], each["end"]), "after": (each["end"], begins[at + 1])}
        row = {name: each[name] for name in ("paused", "seconds", "bytes", "driver_bytes")}
        for name, (begin, end) in parts.items():
            which = [n for n, (a, b) in enumerate(steps) if a >= begin and b <= end]
            if which:
                taken = [steps[n][1] - steps[n][0] for n in which]
                row[name] = {
                    "steps": len(which),
                    "mean": statistics.mean(taken),
                    "median": statistics.median(taken),
                    "longest": max(taken),
                    "processor": statistics.mean(used[n] for n in which),
                }
        found.append(row)
    whole = [row for row in found if "during" in row and "after" in row]
    kinds = ("mean", "median", "longest", "processor") if whole else ()
    return {
        "checkpoints": found,
        "ratios": {
            kind: ratios(*[[row[name][kind] for row in whole] for name in ("during", "after")])
            for kind in kinds
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--millions", type=float, default=10, help="of rows")
    parser.add_argument("--every", type=positive, default=100, help="steps between checkpoints")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--increments", type=int, default=0)
    parser.add_argument("--snapshots", action="store_true", help="take snapshots for recovery too")
    given = parser.parse_args()
    rows = int(given.millions * 1_000_000)
    found = run(rows, given.every, given.rounds, given.increments, given.snapshots)
    report = {"machine": machine(), "rows": rows, "snapshots": given.snapshots, **found}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
