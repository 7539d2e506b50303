"""Minutes of training in which a worker is killed every few seconds: is anything lost, does anything grow?

    make soak                                            # ten minutes: python -m benchmarks.soak --minutes 10
    python -m benchmarks.soak --minutes 3 --strategy async --workers 3

A perceptron learns scikit-learn's digits. Training goes in bouts of some hundred steps; in each, a random worker gets
SIGKILL at a random step, and is replaced before the bout ends. Worker 0 is spared after the first quarter of a job, so
that one worker lives long enough to be compared with itself. Each strategy has an equal part of the time and a job of
its own, in one driver and on one Ray cluster. The paragraphs about dead workers are Ray's.

After each bout the log is read, each share of the samples must be in exactly one commit, and the log begins anew
(`set_weights` with the weights that are there), so that it does not count as growth. Then the driver, the servers and
the workers are looked at: memory, threads, open files, sockets; and files in /dev/shm and Ray's processes. At the end
the median of the first third of a process' samples is compared with that of its last third. The exit status is 1 when
something grows beyond the bound in the table (`soak_samples.BOUNDS`), a share was lost or repeated, or the network has
not learned.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import argparse
import logging
import random
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import ray
import torch

from benchmarks.overhead import positive
from benchmarks.recovery_bodies import LEARNING_RATE, Kill, Seen, digits, paced_creator
from benchmarks.soak_samples import (
    LEAST_SAMPLES,
    Holding,
    Place,
    Trend,
    holding,
    place,
    trends,
    trends_text,
)
from steepest import DistributedSGD, FailureConfig, RunConfig
from steepest.models.torch import accuracy

STRATEGIES = ("ps", "async")
BOUT_STEPS = 300
STEP_SECONDS = 0.002
ACCURACY = 0.9


@dataclass
class Found:
    """What one job showed."""

    strategy: str
    seconds: float = 0.0
    bouts: int = 0
    replaced: int = 0
    commits: int = 0
    lost: int = 0
    twice: int = 0
    accuracy: float = 0.0
    samples: dict[str, list[Holding | Place]] = field(default_factory=lambda: defaultdict(list))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--strategy", nargs="+", default=list(STRATEGIES), metavar="NAME")
    parser.add_argument("--workers", type=positive, default=2)
    parser.add_argument(
        "--steps", type=positive, default=BOUT_STEPS, help="of one bout, in which one worker dies"
    )
    parser.add_argument("--seed", type=int, default=0, help="of who dies when")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("steepest").setLevel(logging.ERROR)  # each death is a warning
    settings: dict[str, Any] = {
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    ray.init(address="local", num_cpus=options.workers + 1, **settings)
    try:
        return soak(options)
    finally:
        ray.shutdown()


def soak(options: argparse.Namespace) -> int:
    """A job for each strategy; prints what they showed; the exit status."""
    chance = random.Random(options.seed)
    seconds = 60 * options.minutes / len(options.strategy)
    everywhere: dict[str, list[Holding | Place]] = defaultdict(list)
    good = True
    for strategy in options.strategy:
        good &= report(job(strategy, options.workers, options.steps, seconds, chance, everywhere))
    print("\nthe whole run")
    whole = [trend for who, each in everywhere.items() for trend in trends(who, each)]
    print(trends_text(whole), flush=True)
    return 0 if good and not grown(whole) else 1


def job(
    strategy: str,
    workers: int,
    steps: int,
    seconds: float,
    chance: random.Random,
    everywhere: dict[str, list[Holding | Place]],
) -> Found:
    """One job, with a death in each bout, for about so many seconds and as many bouts as growth can be told from.

    Args:
        everywhere: takes the samples of what outlives the job.
    """
    train, test = digits()
    found, seen = Found(strategy), Seen(len(train[0]))
    creator = paced_creator(train, _constant, STEP_SECONDS, {"accuracy": accuracy})
    run_config = RunConfig(failure=FailureConfig(max_failures=1_000_000), keep_log=True)
    with DistributedSGD(
        creator, num_workers=workers, strategy=strategy, run_config=run_config
    ) as trainer:
        began = time.monotonic()
        while time.monotonic() - began < seconds or found.bouts < LEAST_SAMPLES:
            spared = int(time.monotonic() - began > seconds / 4)
            _bout(trainer, steps, chance, spared, found, seen)
            _look(trainer, found.samples, everywhere)
        found.seconds = time.monotonic() - began
        found.lost, found.twice = seen.lost, seen.twice
        found.replaced = trainer.stats().replaced
        found.accuracy = trainer.evaluate(test).metrics["accuracy"]
    return found


def _constant(step: int) -> float:
    return LEARNING_RATE


def _bout(
    trainer: DistributedSGD,
    steps: int,
    chance: random.Random,
    spared: int,
    found: Found,
    seen: Seen,
) -> None:
    """Some steps with one death among the workers from `spared` on, and the log of them."""
    pids = trainer.foreach_worker(lambda view: view.pid)
    when = trainer.stats().step + chance.randint(1, max(1, steps - 20))
    kill = Kill(when, chance.choice(pids[spared:]))
    last = trainer.fit(steps=steps, callbacks=[kill], progress=False)
    log = trainer.log()
    found.bouts, found.commits = (
        found.bouts + 1,
        found.commits + sum(len(part.commits) for part in log.parts),
    )
    seen.add(log)
    seen.close((last.epoch or 0) - 1)  # asynchronous workers may be at the one before
    trainer.set_weights(trainer.weights())  # the log begins anew


def _look(
    trainer: DistributedSGD,
    samples: dict[str, list[Holding | Place]],
    everywhere: dict[str, list[Holding | Place]],
) -> None:
    """One sample of everything that is alive; a worker that was replaced is another process."""
    trainer.foreach_worker(
        lambda view: None
    )  # who died at the very end of the bout is replaced by now
    pids = {f"{peer} (pid {each.pid})": each.pid for peer, each in trainer._live().places.items()}
    for who, pid in pids.items():
        if (held := holding(pid)) is not None:
            samples[who].append(held)
    driver = holding(os.getpid())
    assert driver is not None
    everywhere["driver"].append(driver)
    everywhere["machine"].append(place(os.getpid()))


def report(found: Found) -> bool:
    """Prints what a job showed; whether all is well."""
    print(
        f"\n{found.strategy}: {found.seconds:.0f} s, {found.bouts} bouts, {found.replaced} workers "
        f"replaced, {found.commits:,} updates, accuracy {found.accuracy:.1%}; shares lost "
        f"{found.lost}, committed twice {found.twice}"
    )
    each = [
        trend for who, samples in sorted(found.samples.items()) for trend in trends(who, samples)
    ]
    print(trends_text(each), flush=True)
    well = not found.lost and not found.twice and found.accuracy >= ACCURACY
    return well and not grown(each)


def grown(found: list[Trend]) -> bool:
    return any(trend.grows for trend in found)


if __name__ == "__main__":
    sys.exit(main())
