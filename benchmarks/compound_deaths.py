"""How long a job takes no step when several processes are killed at once, or one is with default settings.

    python -m benchmarks.compound_deaths --rounds 3

Every turn is a job of its own on the linear model of `steepest.testing`, whose steps take about a millisecond; after a
hundred steps processes are killed (SIGKILL) or stopped (SIGSTOP). The figure is the longest time between two results
from then on: the death is noticed, decided on, and the job put together again. "then" is the first event's kind.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import argparse
import itertools
import signal
import statistics
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.overhead import machine, positive
from benchmarks.parameter_server_rivals import ray_started
from steepest import (
    Callback,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
    RunConfig,
    StepResult,
)
from steepest.messages.message import Peer, server_peer, worker_peer
from steepest.testing import linear_model_creator

COPIES = ParameterServerStrategy(num_servers=2, replication=2)


@dataclass(frozen=True)
class Case:
    """Processes of a job that die, or stop, at the same moment."""

    strategy: Any
    workers: int
    victims: tuple[Peer, ...]
    spares: int | None = None
    signal: signal.Signals = signal.SIGKILL


CASES = {
    "worker and server, replication=2": Case(COPIES, 4, (worker_peer(1), server_peer(1)), 0),
    "two of three workers, ps": Case("ps", 3, (worker_peer(0), worker_peer(1)), 0),
    "a worker, allreduce": Case("allreduce", 3, (worker_peer(1),)),
    "a worker, local": Case("local", 3, (worker_peer(1),)),
    "the server, ps": Case("ps", 3, (server_peer(0),)),
    "a worker stopped, ps": Case("ps", 3, (worker_peer(1),), None, signal.SIGSTOP),
}


class Strike(Callback):
    """Sends the signal after a hundred steps, and keeps the time of each result."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.times: list[float] = []

    def on_step(self, sgd: DistributedSGD, result: StepResult) -> None:
        self.times.append(time.monotonic())
        if len(self.times) == 100:
            places = sgd._live().places
            for pid in [places[victim].pid for victim in self.case.victims]:
                os.kill(pid, self.case.signal)


def turn(case: Case, steps: int = 400) -> tuple[float, str]:
    run_config = RunConfig(failure=FailureConfig(spares=case.spares))
    with DistributedSGD(
        linear_model_creator(),
        num_workers=case.workers,
        strategy=case.strategy,
        run_config=run_config,
    ) as sgd:
        recovery = sgd._live().recovery
        while (
            recovery is None or recovery.snapshots.taken is None
        ):  # before the first snapshot nobody may die
            sgd.fit(steps=50, progress=False)
        strike = Strike(case)
        sgd.fit(steps=steps, callbacks=[strike], progress=False)
        struck = strike.times[99:]
        gap = max(later - sooner for sooner, later in itertools.pairwise(struck))
        return gap, sgd.stats().events[0].kind


def main(arguments: list[str] | None = None) -> None:
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compound_deaths", description=description
    )
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=positive, default=3)
    options = parser.parse_args(arguments)
    print(machine())
    print(f"\n{'':36}{'s without a step':>18}{'min..max':>14}  then")
    with ray_started(4):
        for name in options.only:
            found = [turn(CASES[name]) for _ in range(options.rounds)]
            gaps = [gap for gap, _ in found]
            span = f"{min(gaps):.2f}..{max(gaps):.2f}"
            print(f"{name:36}{statistics.median(gaps):18.2f}{span:>14}  {found[0][1]}")


if __name__ == "__main__":
    main()
