"""Loss against time and against samples, for every mode of the parameter server, with and without a slow worker.

    python -m benchmarks.staleness                       # writes docs/staleness.csv and docs/staleness.png
    python -m benchmarks.staleness --seconds 5 --out /tmp/picture

A perceptron on scikit-learn's handwritten digits, three workers with one torch thread each. Each gradient is made to
take at least 10 ms by waiting, 100 ms on the slow worker, so that the picture shows the modes and not the machine;
with two cores for three workers nothing else would. A run lasts a fixed time, and its losses are means over windows
of steps. The picture needs matplotlib (``pip install matplotlib``); the table is written without it.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import argparse
import contextlib
import csv
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from steepest import Callback, DistributedSGD, ParameterServerStrategy, StepResult, TorchModel

WORKERS = 3
GRADIENT_SECONDS = 0.01
SLOW_FACTOR = 10
MODES: dict[str, ParameterServerStrategy] = {
    "sync": ParameterServerStrategy(),
    "sync, 1 backup worker": ParameterServerStrategy(backup_workers=1),
    "ssp, staleness 3": ParameterServerStrategy(mode="ssp", staleness=3),
    "async": ParameterServerStrategy(mode="async"),
    "async, rate / staleness": ParameterServerStrategy(mode="async", correction="learning_rate"),
    "async, drop above 4": ParameterServerStrategy(mode="async", correction="drop", staleness=4),
}


class PacedModel(TorchModel):
    """A model whose gradient takes at least some time."""

    seconds = GRADIENT_SECONDS

    def compute_gradients(self, batch: Any, ready: Any, metrics: bool) -> Any:
        time.sleep(self.seconds)
        return super().compute_gradients(batch, ready, metrics)


def model_creator(slow: bool) -> Callable[[int, int], TorchModel]:
    x, y = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    data = (x.float() / 16, y)

    def create(worker: int, device: int) -> TorchModel:
        network = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )
        model = PacedModel(
            network,
            loss=F.cross_entropy,
            data=data,
            batch_size=32,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        )
        if slow and worker == WORKERS - 1:
            model.seconds = GRADIENT_SECONDS * SLOW_FACTOR
        return model

    return create


@dataclass(frozen=True)
class Point:
    mode: str
    slow: bool
    seconds: float
    samples: int
    loss: float


class OutOfTime(Exception):  # noqa: N818 - not an error
    """The run has lasted long enough."""


class Recorder(Callback):
    """Notes the loss of every step, and ends the run in time."""

    def __init__(self, mode: str, slow: bool, seconds: float) -> None:
        self.points: list[Point] = []
        self._mode, self._slow, self._seconds = mode, slow, seconds
        self._samples = 0
        self._began = 0.0

    def on_fit_begin(self, sgd: DistributedSGD, steps: int) -> None:
        self._began = time.perf_counter()

    def on_step(self, sgd: DistributedSGD, result: StepResult) -> None:
        self._samples += result.samples
        now = time.perf_counter() - self._began
        self.points.append(Point(self._mode, self._slow, now, self._samples, result.loss))
        if now > self._seconds:
            raise OutOfTime


def run(mode: str, slow: bool, seconds: float) -> tuple[list[Point], str]:
    with DistributedSGD(model_creator(slow), num_workers=WORKERS, strategy=MODES[mode]) as sgd:
        sgd.warmup()
        recorder = Recorder(mode, slow, seconds)
        with contextlib.suppress(OutOfTime):
            sgd.fit(steps=1_000_000, callbacks=[recorder], progress=False)
        stats = sgd.stats()
        late = stats.staleness
        line = (
            f"{mode:26} {'slow' if slow else 'even':5} {stats.samples / seconds:9,.0f} samples/s   "
            f"staleness p50 {late.p50:2} p95 {late.p95:2} max {late.max:3}   dropped "
            f"{stats.dropped:4}   loss {smooth(recorder.points)[-1].loss:.3f}"
        )
        return recorder.points, line


def smooth(points: list[Point], window: int = 25) -> list[Point]:
    """Means of the loss over the last steps."""
    found = []
    for end in range(window, len(points) + 1, max(window // 5, 1)):
        part = points[end - window : end]
        last = part[-1]
        found.append(
            Point(
                last.mode,
                last.slow,
                last.seconds,
                last.samples,
                sum(point.loss for point in part) / window,
            )
        )
    return found or points[-1:]


def draw(points: list[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), sharey=True)
    for row, slow in enumerate((False, True)):
        for mode in MODES:
            curve = smooth([point for point in points if point.mode == mode and point.slow == slow])
            losses = [point.loss for point in curve]
            axes[row][0].plot([point.seconds for point in curve], losses, label=mode)
            axes[row][1].plot([point.samples / 1000 for point in curve], losses, label=mode)
        axes[row][0].set_title(
            f"{WORKERS} workers, " + ("one 10 times slower" if slow else "equally fast")
        )
        axes[row][0].set_ylabel("training loss")
        for column, label in enumerate(("seconds", "thousand samples")):
            axes[row][column].set_xlabel(label)
            axes[row][column].set_yscale("log")
            axes[row][column].grid(alpha=0.3)
    axes[0][1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.staleness", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=12.0, help="how long each run lasts")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/staleness"), help="file name without ending"
    )
    options = parser.parse_args(arguments)
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    points: list[Point] = []
    for slow in (False, True):
        for mode in MODES:
            found, line = run(mode, slow, options.seconds)
            points += found
            print(line, flush=True)
    with options.out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["mode", "slow worker", "seconds", "samples", "loss"])
        for mode in MODES:
            for slow in (False, True):
                for point in smooth([p for p in points if p.mode == mode and p.slow == slow]):
                    row = [
                        mode,
                        int(slow),
                        f"{point.seconds:.3f}",
                        point.samples,
                        f"{point.loss:.5f}",
                    ]
                    writer.writerow(row)
    draw(points, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
