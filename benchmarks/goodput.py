"""What is left of the samples per second when a process dies every fifteen seconds.

    python -m benchmarks.goodput
    python -m benchmarks.goodput --rounds 4 --strategy allreduce

Three workers train a perceptron with ``replication=2`` and otherwise default settings, in steps of 50 ms. Spells
without a death and spells in which a random process (worker or server) gets SIGKILL every 15 seconds take turns in one
job. In each spell the samples of committed steps are counted, as the driver hears of them. Samples that are computed
again are counted once. Goodput is the samples per second of a spell with deaths over those of the spell before it.
Before the first spell the job trains for half a minute: by then there is the spare process that a job has by default.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import argparse
import logging
import random
import statistics
import sys
import time
from dataclasses import dataclass, field

import torch

from benchmarks.elasticity import constant
from benchmarks.job_processes import kill, processes
from benchmarks.overhead import machine, positive
from benchmarks.parameter_server_rivals import ray_started
from benchmarks.recovery_bodies import STEP_SECONDS, digits, paced_creator
from steepest import (
    AllreduceStrategy,
    Callback,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
    RunConfig,
    StepResult,
)

STRATEGIES = {
    "ps": ParameterServerStrategy(replication=2),
    "allreduce": AllreduceStrategy(replication=2),
}
WORKERS = 3
WANTED = 0.95
WARM_SECONDS = 30.0


@dataclass
class Spell:
    """Some seconds of training.

    Attributes:
        deadly: whether processes die in it.
        began: by the monotonic clock.
        samples: of steps committed in it.
        killed: names of the processes that died in it.
        gap: the longest time without a step, in seconds.
    """

    deadly: bool
    began: float
    samples: int = 0
    killed: list[str] = field(default_factory=list)
    gap: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds


class AllSpellsOverError(Exception):
    """Ends the `fit` that all spells are in."""


class Spells(Callback):
    """Counts samples spell by spell, and kills processes in every other one.

    Args:
        rounds: pairs of spells.
        every: seconds between deaths.
        deaths: in each spell that has some; it is `every * deaths` seconds long, as is the other.
        warm: seconds before the first spell.
    """

    def __init__(
        self, rounds: int, every: float, deaths: int, chance: random.Random, warm: float
    ) -> None:
        self._count, self._every, self._deaths, self._chance = 2 * rounds, every, deaths, chance
        self._warm = warm
        self._last: float | None = None
        self._begin = 0.0
        self.spells: list[Spell] = []

    def on_step(self, sgd: DistributedSGD, result: StepResult) -> None:
        now = time.monotonic()
        if self._last is None:
            self._begin = now + self._warm
        if self._last is None or now < self._begin:
            self._last = now
            return
        if not self.spells or now - self.spells[-1].began >= self._every * self._deaths:
            if self.spells:
                self.spells[-1].seconds = now - self.spells[-1].began
            if len(self.spells) == self._count:
                raise AllSpellsOverError
            self.spells.append(Spell(len(self.spells) % 2 == 1, now))
        spell = self.spells[-1]
        spell.samples += result.samples
        spell.gap, self._last = max(spell.gap, now - self._last), now
        if spell.deadly and now - spell.began >= self._every * len(spell.killed):
            names = [name for name in processes() if not name.startswith("spare")]
            spell.killed += kill(self._chance.choice(sorted(names)))


def measure(strategy: str, spells: Spells, seconds: float = STEP_SECONDS) -> list[Spell]:
    """The spells of one job.

    Args:
        strategy: one of `STRATEGIES`.
        seconds: that a gradient takes at least.
    """
    run_config = RunConfig(failure=FailureConfig(max_failures=1_000_000))
    with DistributedSGD(
        paced_creator(digits()[0], constant, seconds),
        num_workers=WORKERS,
        strategy=STRATEGIES[strategy],
        run_config=run_config,
    ) as trainer:
        try:
            trainer.fit(steps=10_000_000, callbacks=[spells], progress=False)
        except AllSpellsOverError:
            return spells.spells
    raise AssertionError("the steps were too few")


def goodputs(spells: list[Spell]) -> list[float]:
    """Of each spell with deaths, over the spell before it."""
    pairs = zip(spells[::2], spells[1::2], strict=True)
    return [deadly.rate / quiet.rate for quiet, deadly in pairs]


def text(strategy: str, spells: list[Spell]) -> str:
    lines = ["", f"{strategy}, replication=2, {WORKERS} workers"]
    lines.append(f"{'':10}{'seconds':>9}{'samples/s':>11}{'longest gap':>13}  killed")
    for spell in spells:
        lines.append(
            f"{'deaths' if spell.deadly else 'quiet':10}{spell.seconds:9.1f}{spell.rate:11.1f}"
            f"{spell.gap:13.2f}  {', '.join(spell.killed)}"
        )
    found = goodputs(spells)
    lines.append(
        f"goodput {statistics.median(found):.1%} ({min(found):.1%} to {max(found):.1%}); "
        f"wanted {WANTED:.0%}"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=description)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--every", type=float, default=15.0, help="seconds from death to death")
    parser.add_argument("--deaths", type=positive, default=4, help="in each spell that has some")
    parser.add_argument("--strategy", nargs="+", choices=list(STRATEGIES), default=["ps"])
    parser.add_argument("--seed", type=int, default=0, help="of who dies")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("steepest").setLevel(logging.ERROR)  # each death is a warning
    print(machine(), flush=True)
    good = True
    with ray_started(WORKERS + 1):
        for strategy in options.strategy:
            chance = random.Random(options.seed)
            each = Spells(options.rounds, options.every, options.deaths, chance, WARM_SECONDS)
            spells = measure(strategy, each)
            print(text(strategy, spells), flush=True)
            good &= statistics.median(goodputs(spells)) >= WANTED
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
