"""Images per second of ResNet-101 against the number of workers, strategies side by side.

    python -m benchmarks.resnet101                       # a small stand-in; writes resnet101-small.csv and .png
    python -m benchmarks.resnet101 --size full --workers 1 2 4 8 --out /tmp/figure

The classic figure of data-parallel training, on random images that are in memory, and with plain SGD. ``--size full``
is ResNet-101 on images of 224 x 224, 8 a worker and step; ``small`` is a network of the same kind that two cores
train in two minutes. All processes have one torch thread and are on one host unless Ray knows of more, so that no
more workers than it has cores can be of use.

The strategies of one number of workers are alive together, blocked while idle, and take turns; a rate is the median
over rounds, with its range. Ideal is the number of workers times the best rate of one worker, which is measured
always. The picture needs matplotlib (``pip install -e .[bench]``); the table is written without it.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import argparse
import csv
import functools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models import Workload
from benchmarks.overhead import measure, positive, ray_started
from benchmarks.resnet import ResNet
from benchmarks.rivals import Steepest, Trainer

STRATEGIES = ("simple", "ps", "allreduce")
SMALL = functools.partial(ResNet, (1, 1, 2, 1), width=16)
SIZES = {
    "small": Workload("small", SMALL, (3, 64, 64), batch_size=8, samples=64, steps=8),
    "full": Workload("full", ResNet, (3, 224, 224), batch_size=8, samples=64, steps=3),
}
ROUNDS = 3


@dataclass(frozen=True)
class Rate:
    """Images per second of all workers together, by round."""

    workers: int
    strategy: str
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


def rates(
    workload: Workload, workers: int, strategies: list[str], rounds: int = ROUNDS
) -> Iterator[Rate]:
    """What each strategy reaches with so many workers."""
    contenders: list[Trainer] = [Steepest(name, workload, name, workers) for name in strategies]
    images = workers * workload.batch_size
    with ray_started(contenders):
        for name, seconds in measure(contenders, rounds, workload.steps).items():
            yield Rate(workers, name, tuple(images / each for each in seconds))


def ideal(found: list[Rate], workers: int) -> float:
    """So many times the best rate of one worker."""
    return workers * max(rate.median for rate in found if rate.workers == 1)


def describe(workload: Workload) -> str:
    what = (
        "ResNet-101"
        if workload.network is ResNet
        else "a narrow, shallow ResNet in place of ResNet-101"
    )
    return (
        f"{workload.name}: {what}, {workload.parameters():,} parameters, random images of "
        f"{' x '.join(map(str, workload.shape[1:]))}, batch {workload.batch_size}, "
        f"{os.cpu_count()} cores"
    )


def table(found: list[Rate]) -> list[list[str]]:
    """A head and a line for each rate, in images per second."""
    lines = [["workers", "strategy", "images/s", "least", "greatest", "ideal", "of ideal"]]
    for rate in found:
        best = ideal(found, rate.workers)
        values = [rate.median, min(rate.rounds), max(rate.rounds), best]
        cells = [f"{value:.1f}" for value in values] + [f"{rate.median / best:.2f}"]
        lines.append([str(rate.workers), rate.strategy, *cells])
    return lines


def write(found: list[Rate], path: Path) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(table(found))


def draw(found: list[Rate], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = sorted({rate.workers for rate in found})
    figure, axes = pyplot.subplots(figsize=(7, 5))
    axes.plot(counts, [ideal(found, count) for count in counts], "k--", label="ideal")
    for strategy in dict.fromkeys(rate.strategy for rate in found):
        curve = [rate for rate in found if rate.strategy == strategy]
        axes.plot(
            [rate.workers for rate in curve], [rate.median for rate in curve], "o-", label=strategy
        )
    axes.set_title(title, fontsize=7, wrap=True)
    axes.set_xlabel("workers")
    axes.set_ylabel("images/s")
    axes.set_xticks(counts)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resnet101", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument(
        "--workers", nargs="+", type=positive, default=[1, 2, 4], help="numbers of them; 1 is added"
    )
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="where the table and the picture go"
    )
    options = parser.parse_args(arguments)
    workload = SIZES[options.size]
    title = describe(workload)
    print(title, flush=True)
    found: list[Rate] = []
    for workers in sorted({1, *options.workers}):
        found += rates(workload, workers, options.strategies)
    for line in table(found):
        print("".join(f"{cell:>11}" for cell in line))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"resnet101-{options.size}"
    write(found, path.with_suffix(".csv"))
    try:
        draw(found, title, path.with_suffix(".png"))
    except ImportError as error:
        print(f"no picture ({error}): pip install -e .[bench]")


if __name__ == "__main__":
    main()
