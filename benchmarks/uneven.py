"""Local SGD of four workers of which one is five times slower: samples a second against the sum of the workers alone.

    python -m benchmarks.uneven
    python -m benchmarks.uneven --slow 2 --only local "local, quorum 1"

Each worker is a process of this machine, with a small ConvNet; a batch is a sleep of ``--batch`` milliseconds beside a
real one of a single sample, and of ``--slow`` times as many on the last worker. What workers do alone is measured in
jobs of one worker before and after. Contenders run one after the other; rounds are long enough that a round's end costs
little by itself.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import training_bodies
from benchmarks.models import WORKLOADS
from benchmarks.namespaces import HOST, Orders
from benchmarks.overhead import positive
from benchmarks.training_bodies import job_team, take_part
from steepest.strategies.local import LocalStrategy
from steepest.tables.modules.torch_model import TorchModel

WORKERS = 4
SAMPLES = 48_000  # no epoch ends in the middle
WANTED = 0.95


def strategies(every: int) -> dict[str, LocalStrategy]:
    """Return what is compared, by name."""
    served: Callable[..., LocalStrategy] = functools.partial(
        LocalStrategy, sync_every=every, num_servers=1
    )
    return {
        "local": served(),
        "local, quorum 3": served(quorum=3),
        "local, quorum 1": served(quorum=1),
        "local, pace": served(pace="speed"),
    }


class Pace:
    """How many times slower than others this process is."""

    factor = 1.0


@dataclass(frozen=True)
class Paced:
    """A workload whose batches take some seconds, and more in a slow process."""

    seconds: float

    def model(self) -> TorchModel:
        """Return the model of one worker."""
        model = replace(WORKLOADS["convnet"], batch_size=1, samples=SAMPLES).model()

        def rest(*_: Any) -> None:
            time.sleep(self.seconds * Pace.factor)

        model.module.register_forward_hook(rest)
        return model


def body(orders: Orders, slow: dict[int, float], **settings: Any) -> None:
    """Take part in a job, slowly if `slow` has this worker."""
    Pace.factor = slow.get(settings["worker"], 1.0)
    take_part(Counted(orders, Path(settings["meeting"]) / "samples"), **settings)


class Counted(Orders):
    """Orders whose answers leave behind how many samples the last turn's steps had."""

    def __init__(self, orders: Orders, place: Path) -> None:
        super().__init__(orders._pipe, orders._barrier)
        self._place = place

    def done(self, seconds: float) -> None:
        """Answer the last order."""
        if training_bodies.results:  # in the client's process
            self._place.write_text(
                json.dumps(sum(result.samples for result in training_bodies.results))
            )
        super().done(seconds)


def rate(
    strategy: LocalStrategy, seconds: float, rounds: int, slow: dict[int, float], workers: int
) -> float:
    """Return the samples a second of a job.

    Args:
        seconds: of a batch.
        rounds: that are measured, after one that is not.
        slow: by worker, how many times slower it is.
    """
    with (
        tempfile.TemporaryDirectory() as meeting,
        job_team(
            [HOST],
            Paced(seconds),
            strategy,
            meeting,
            workers=workers,
            body=functools.partial(body, slow=slow),
        ) as team,
    ):
        team.turn(1)
        begin = time.perf_counter()
        team.turn(rounds)
        took = time.perf_counter() - begin
        return float(json.loads((Path(meeting) / "samples").read_text()) / took)


def alone(options: argparse.Namespace) -> float:
    """Return the sum of what each worker does in a job of its own."""
    found = [
        rate(strategies(options.sync_every)["local"], options.batch / 1000, options.rounds, slow, 1)
        for slow in ({}, {0: options.slow})
    ]
    return (WORKERS - 1) * found[0] + found[1]


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print a line for each contender."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.uneven", description=__doc__.split("\n")[0]
    )
    names = list(strategies(10))
    parser.add_argument(
        "--slow", type=float, default=5.0, help="how many times slower one worker is"
    )
    parser.add_argument("--batch", type=float, default=100.0, help="milliseconds of a batch")
    parser.add_argument("--sync-every", type=positive, default=10)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    before = alone(options)
    print(
        f"{WORKERS} workers, one {options.slow:g} times slower, batches of {options.batch:g} ms, "
        f"sync_every={options.sync_every}, load {os.getloadavg()[0]:.1f}\n"
        f"alone, summed: {before:.1f} samples/s\n{'':22} samples/s  of the sum (wanted {WANTED:.0%})",
        flush=True,
    )
    slow = {WORKERS - 1: options.slow}
    for name in options.only:
        strategy = strategies(options.sync_every)[name]
        found = rate(strategy, options.batch / 1000, options.rounds, slow, WORKERS)
        print(f"{name:22} {found:9.1f}  {found / before:10.1%}", flush=True)
    print(f"alone, summed, afterwards: {alone(options):.1f} samples/s", flush=True)


if __name__ == "__main__":
    main()
