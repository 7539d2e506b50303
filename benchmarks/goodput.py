"""What is left of the samples per second when a process dies every fifteen seconds.

    python -m benchmarks.goodput
    python -m benchmarks.goodput --rounds 4 --strategy allreduce
    python -m benchmarks.goodput --rivals                           # about seven minutes a rival and round
    python -m benchmarks.goodput --rivals steepest torchft --rounds 1

Three workers train a perceptron with ``replication=2`` and otherwise default settings, in steps of 50 ms. Spells
without a death and spells in which a random process (worker or server) gets SIGKILL every 15 seconds take turns in one
job. In each spell the samples of committed steps are counted, as the driver hears of them. Samples that are computed
again are counted once. Goodput is the samples per second of a spell with deaths over those of the spell before it.
Before the first spell the job trains for half a minute: by then there is the spare process that a job has by default.

``--strategy local`` and ``local-quorum`` are local SGD in rounds of eight batches with one server and no copies; only
workers die. With a quorum the others go on while one is missing.

With ``--rivals`` one training loop of the user's own runs with ``--workers`` (two) under each of these, of which one
gets SIGKILL every 15 seconds, and no copies of anything; all are measured from what their workers write down
(`benchmarks.goodput_rivals`):

``steepest``            `steepest.run` and `steepest.prepare`: a step waits for the successor, as by default
``steepest-allreduce``  the same with ``strategy="allreduce"``: a death takes all back to the last copy in the driver
``steepest-goes-on``    the first with ``FailureConfig(patience=0)``: the others go on in smaller steps until then
``ray-train``           Ray Train's ``TorchTrainer`` on Gloo, ``max_failures=-1``, a checkpoint every 20 steps
``torchft``             torchft's ``Manager`` and ``DistributedDataParallel`` on Gloo, a replica each

Samples are counted once however often their steps are taken. Lost are those that lack in the updates if each is to be
in one of each pass, doubled those that are in more; "in vain" are those computed that are in no update.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import argparse
import contextlib
import itertools
import logging
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.elasticity import constant
from benchmarks.goodput_rivals import END, RIVALS, Found, alive, missing, read
from benchmarks.job_processes import kill, processes
from benchmarks.overhead import machine, positive
from benchmarks.parameter_server_rivals import ray_started
from benchmarks.recovery_bodies import STEP_SECONDS, Seen, digits, paced_creator
from steepest import (
    AllreduceStrategy,
    Callback,
    DistributedSGD,
    FailureConfig,
    LocalStrategy,
    ParameterServerStrategy,
    RunConfig,
    StepResult,
)

STRATEGIES = {
    "ps": ParameterServerStrategy(replication=2),
    "allreduce": AllreduceStrategy(replication=2),
    "local": LocalStrategy(sync_every=8, num_servers=1),
    "local-quorum": LocalStrategy(sync_every=8, num_servers=1, quorum=1),
}
WORKERS = 3
WANTED = 0.95
WARM_SECONDS = 30.0
LOOK_SECONDS = 0.05
END_STEPS = 40  # of a job after its last spell: all workers are to hear of its end before


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
        victims: how the names of the processes that die begin.
    """

    def __init__(
        self,
        rounds: int,
        every: float,
        deaths: int,
        chance: random.Random,
        warm: float,
        victims: str = "",
    ) -> None:
        self._count, self._every, self._deaths, self._chance = 2 * rounds, every, deaths, chance
        self._victims = victims
        self._warm = warm
        self._last: float | None = None
        self._begin = 0.0
        self.spells: list[Spell] = []
        self.epoch = 0  # of the last step

    def on_step(self, sgd: DistributedSGD, result: StepResult) -> None:
        now = time.monotonic()
        self.epoch = result.epoch or 0
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
            victims = sorted(name for name in names if name.startswith(self._victims))
            if victims:  # with a quorum steps are taken while all that may die are dead
                spell.killed += kill(self._chance.choice(victims))


def measure(strategy: str, spells: Spells, seconds: float = STEP_SECONDS) -> tuple[int, int]:
    """Fill the spells of one job; return how many samples of its epochs were lost, and doubled.

    Args:
        strategy: one of `STRATEGIES`.
        seconds: that a gradient takes at least.
    """
    run_config = RunConfig(failure=FailureConfig(max_failures=1_000_000), keep_log=True)
    data = digits()[0]
    with DistributedSGD(
        paced_creator(data, constant, seconds),
        num_workers=WORKERS,
        strategy=STRATEGIES[strategy],
        run_config=run_config,
    ) as trainer:
        try:
            trainer.fit(steps=10_000_000, callbacks=[spells], progress=False)
        except AllSpellsOverError:
            seen = Seen(len(data[0]))
            seen.add(trainer.log())
            seen.close(spells.epoch)
            return seen.lost, seen.twice
    raise AssertionError("the steps were too few")


def strike(
    folder: str, spells: list[Spell], options: argparse.Namespace, over: threading.Event
) -> None:
    """Go through the spells of a rival's job, then tell its workers after which step to end; return early if `over`."""
    chance = random.Random(options.seed)
    while not read(folder).done and not over.wait(LOOK_SECONDS):
        pass
    over.wait(options.warm)
    for number in range(2 * options.rounds):
        spell = Spell(number % 2 == 1, time.monotonic())
        for death in range(1, options.deaths + 1):
            while spell.deadly and len(spell.killed) < death and not over.wait(LOOK_SECONDS):
                if pids := alive(folder):
                    pid = chance.choice(pids)
                    spell.killed.append(str(pid))
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            over.wait(max(spell.began + death * options.every - time.monotonic(), 0))
        if over.is_set():
            return
        spell.seconds = time.monotonic() - spell.began
        spells.append(spell)
    Path(folder, END).write_text(str(max(read(folder).done) + END_STEPS))


def measure_rival(rival: str, options: argparse.Namespace) -> tuple[list[Spell], Found]:
    """The spells of a rival's job, and what its workers have written."""
    spells: list[Spell] = []
    over = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        thread = threading.Thread(target=strike, args=(folder, spells, options, over))
        thread.start()
        try:
            with ray_started(options.workers + 2):
                RIVALS[rival](folder, options.workers)
        finally:
            over.set()
            thread.join()
        found = read(folder)
    for spell in spells:
        end = spell.began + spell.seconds
        new = found.steps(spell.began, end)
        spell.samples = sum(found.samples(step) for step in new)
        moments = sorted([spell.began, end, *(found.done[step] for step in new)])
        spell.gap = max(after - before for before, after in itertools.pairwise(moments))
    return spells, found


def row(rival: str, spells: list[Spell], found: Found) -> str:
    """A line of the rivals' table."""
    ratios = goodputs(spells)
    quiet, deadly = (statistics.median(each.rate for each in spells[i::2]) for i in (0, 1))
    gap = max(each.gap for each in spells[1::2])
    deaths = sum(len(each.killed) for each in spells)
    lost, doubled = found.uneven()
    return (
        f"{rival:18}{quiet:9.0f}{deadly:10.0f}{statistics.median(ratios):9.1%}{gap:9.2f}{deaths:8}"
        f"{lost:7}{doubled:9}{found.in_vain:9}{found.counts.total():10}"
    )


HEADING = (
    f"{'':18}{'quiet/s':>9}{'deaths/s':>10}{'goodput':>9}{'gap, s':>9}{'deaths':>8}{'lost':>7}{'doubled':>9}"
    f"{'in vain':>9}{'samples':>10}"
)


def compare(options: argparse.Namespace) -> int:
    """Measure rivals one after the other; return 1 if none can be."""
    rivals = []
    for rival in options.rivals or RIVALS:
        if text := missing(rival):
            print(text, flush=True)
        else:
            rivals.append(rival)
    rows = []
    for rival in rivals:
        spells, found = measure_rival(rival, options)
        rows.append(row(rival, spells, found))
        print(HEADING, rows[-1], sep="\n", flush=True)
    print("", HEADING, *rows, sep="\n", flush=True)
    return 0 if rows else 1


def goodputs(spells: list[Spell]) -> list[float]:
    """Of each spell with deaths, over the spell before it."""
    pairs = zip(spells[::2], spells[1::2], strict=True)
    return [deadly.rate / quiet.rate for quiet, deadly in pairs]


def text(strategy: str, spells: list[Spell], lost: int, doubled: int) -> str:
    lines = ["", f"{strategy}, replication={STRATEGIES[strategy].copies}, {WORKERS} workers"]
    lines.append(f"{'':10}{'seconds':>9}{'samples/s':>11}{'longest gap':>13}  killed")
    for spell in spells:
        lines.append(
            f"{'deaths' if spell.deadly else 'quiet':10}{spell.seconds:9.1f}{spell.rate:11.1f}"
            f"{spell.gap:13.2f}  {', '.join(spell.killed)}"
        )
    found = goodputs(spells)
    lines.append(
        f"goodput {statistics.median(found):.1%} ({min(found):.1%} to {max(found):.1%}); "
        f"wanted {WANTED:.0%}; of the epochs' samples {lost} lost, {doubled} doubled"
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
    parser.add_argument(
        "--warm", type=float, default=WARM_SECONDS, help="seconds before all spells"
    )
    parser.add_argument("--rivals", nargs="*", choices=list(RIVALS), help="by default all")
    parser.add_argument("--workers", type=positive, default=2, help="of each rival")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("steepest").setLevel(logging.ERROR)  # each death is a warning
    print(machine(), flush=True)
    if options.rivals is not None:
        return compare(options)
    good = True
    with ray_started(WORKERS + 1):
        for strategy in options.strategy:
            chance = random.Random(options.seed)
            victims = "worker" if strategy.startswith("local") else ""
            settings = (options.rounds, options.every, options.deaths, chance, options.warm)
            each = Spells(*settings, victims)
            lost, doubled = measure(strategy, each)
            print(text(strategy, each.spells, lost, doubled), flush=True)
            good &= statistics.median(goodputs(each.spells)) >= WANTED and not lost + doubled
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
