"""Embedding tables on servers, beside those of one process and a tutorial's server.

    python -m benchmarks.embedding_servers
    python -m benchmarks.embedding_servers --only step --rounds 20

Tables:

``step``     4,096 x 26 ids by a power law, 26 tables of 100,000 rows of dimension 16, Adagrad: pull, backward
             pass, push and update, given the gradients of the embeddings. ``trainer`` is `DistributedSGD` with
             one worker, which has its server in its own process; ``two processes`` is a job of one worker and
             one server that share a host. Rivals: torch's `EmbeddingBag(sparse=True)` and FBGEMM's kernel in one
             process, and a dict of rows in a Ray actor.
``workers``  the same steps with `strategy="async"`: processor seconds for each looked-up id, of all processes of
             the job and of the driver, with two workers and with one.
``hybrid``   clicks of `benchmarks.clicks` by a network with tables; two hosts (network namespaces of this machine
             on one bridge, with links of 1 Gbit/s; needs root), each with a worker and a server; dense layers
             in step and rows that may lack two updates, beside all in step.
``memory``   what a server's process, which is its worker's too, takes of so many million new rows of dimension 16, by
             their format and optimizer, and of ids that are counted and not admitted: bytes for each.
``areas``    the test AUC of both after an epoch of a million clicks, by trainers' two workers.

One thread each. The contenders take turns of so many steps, odd rounds in reverse order; a ratio is the median
over rounds of our time over a rival's in the same round, with its range. ``step`` checks that the trainer and the
rivals have trained the same rows to the same values.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process

import argparse
import contextlib
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.clicks import Clicks, auc
from benchmarks.embedding import RIVALS, report
from benchmarks.embedding_bodies import ClickModel, FreshRows, RowSteps
from benchmarks.embedding_rivals import Trained, make
from benchmarks.job_processes import all_processes
from benchmarks.models import Modelled
from benchmarks.namespaces import HOST, Team, star
from benchmarks.overhead import alternate, machine, positive
from benchmarks.parameter_server_rivals import ray_started
from benchmarks.training_bodies import HYBRID, job_team
from steepest import DistributedSGD, ParameterServerStrategy
from steepest.tables import CounterFilter, RowWiseAdagrad

Turn = Callable[[], float]


def trainer(
    workload: Modelled, workers: int, strategy: str | ParameterServerStrategy, seed: int = 0
) -> DistributedSGD:
    def create(worker_index: int, device_index: int) -> Any:
        torch.set_num_threads(1)
        return workload.model()

    return DistributedSGD(create, num_workers=workers, strategy=strategy, seed=seed)


# -- step ----------------------------------------------------------------------------------------


class Rival:
    """A rival that takes the same batches in the same order."""

    def __init__(self, rival: Trained, workload: RowSteps) -> None:
        self._rival = rival
        self._batches = [(ids, rival.prepare(given)) for ids, given in workload.batches()]
        self._next = 0

    def turn(self, steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            self._rival.step(*self._batches[self._next % len(self._batches)])
            self._next += 1
        return (time.perf_counter() - begin) / steps

    def values(self) -> Tensor:
        return self._rival.values()


def fit(sgd: DistributedSGD, steps: int) -> float:
    begin = time.perf_counter()
    sgd.fit(steps=steps, progress=False)
    return (time.perf_counter() - begin) / steps


def values_of(sgd: DistributedSGD, workload: RowSteps) -> Tensor:
    """All rows, (features x rows, dim)."""

    def look_up(model: Any) -> Tensor:
        with torch.no_grad():
            ids = torch.arange(workload.rows).expand(workload.features, -1)
            return torch.cat(model.module(ids))

    return sgd.for_model(look_up)


def run_step(rounds: int, steps: int, workload: RowSteps) -> list[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(ray_started(cpus=2))
        meeting = stack.enter_context(tempfile.TemporaryDirectory())
        sgd = stack.enter_context(trainer(workload, 1, "ps"))
        team: Team = stack.enter_context(job_team([HOST], workload, "ps", meeting))
        rivals = {
            name: Rival(rival, workload) for name, rival in make(workload.first(), RIVALS).items()
        }
        turns: dict[str, Turn] = {
            "trainer": lambda: fit(sgd, steps),
            "two processes": lambda: max(team.turn(steps)),
        }
        for name, rival in rivals.items():
            turns[name] = lambda rival=rival: rival.turn(steps)  # type: ignore[misc]
        for turn in turns.values():
            turn()  # makes rows, and warms up
        seconds = alternate(turns, rounds)
        expected = values_of(sgd, workload)
        for name, rival in rivals.items():
            if not torch.allclose(rival.values(), expected, rtol=1e-3, atol=1e-4):
                raise RuntimeError(f"{name} trained other rows, or otherwise")
    title = f"a step of {workload.batch:,} x {workload.features} ids, turns of {steps} steps"
    return [row for ours in ("trainer", "two processes") for row in report(title, seconds, ours)]


# -- workers -------------------------------------------------------------------------------------


def processor_seconds() -> float:
    """Of all processes of this process' jobs, and of itself."""
    tick = os.sysconf("SC_CLK_TCK")
    total = time.process_time()
    for pid in all_processes():
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        total += (int(user) + int(system)) / tick
    return total


def run_workers(rounds: int, steps: int, workload: RowSteps) -> list[dict[str, Any]]:
    """Each round starts each job anew: processes of another job would be counted too."""

    def turn(workers: int) -> float:
        with trainer(workload, workers, "async") as sgd:
            sgd.fit(steps=steps, progress=False)
            before, version = processor_seconds(), sgd.stats().version
            sgd.fit(steps=steps, progress=False)
            spent, updates = processor_seconds() - before, sgd.stats().version - version
        return spent / (updates * workload.batch * workload.features)

    with ray_started(cpus=4):
        turns = {"two workers": lambda: turn(2), "one worker": lambda: turn(1)}
        seconds = alternate(turns, rounds)
    return report("async, processor time for each id", seconds, "two workers", "us")


# -- hybrid --------------------------------------------------------------------------------------


def run_hybrid(rounds: int, steps: int, mbit: int, workload: ClickModel) -> list[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        spaces = stack.enter_context(star(2, mbit))
        turns: dict[str, Turn] = {}
        for strategy in ("hybrid", "ps"):
            meeting = stack.enter_context(tempfile.TemporaryDirectory())
            team = stack.enter_context(job_team(spaces, workload, strategy, meeting))
            turns[strategy] = lambda team=team: max(team.turn(steps))  # type: ignore[misc]
        for turn in turns.values():
            turn()
        seconds = alternate(turns, rounds)
    title = (
        f"a step of 2 x {workload.batch:,} clicks, dim {workload.dim}, two hosts at {mbit} Mbit/s"
    )
    return report(title, seconds, "hybrid")


def run_areas(workload: ClickModel, seeds: int) -> list[dict[str, Any]]:
    """Test AUC after one epoch of two workers on this host, where bytes take no time."""
    test = Clicks(0).samples(workload.samples, workload.samples + 200_000)
    ids, numbers = torch.from_numpy(test.ids), torch.from_numpy(test.numbers)

    def scores(model: Any) -> Tensor:
        with torch.no_grad():
            parts = zip(ids.split(10_000), numbers.split(10_000), strict=True)
            return torch.cat([model.module(*part) for part in parts])

    found = []
    print(
        f"\ntest AUC after {workload.samples:,} clicks, at most {auc(test.logits, test.labels):.4f}"
    )
    with ray_started(cpus=4):
        for seed in range(seeds):
            row: dict[str, Any] = {"title": "AUC", "seed": seed}
            for name, staleness in (("hybrid", HYBRID), ("ps", None)):
                strategy = ParameterServerStrategy(table_staleness=staleness)
                with trainer(workload, 2, strategy, seed) as sgd:
                    sgd.fit(epochs=1, progress=False)
                    row[name] = auc(sgd.for_model(scores).numpy(), test.labels)
            found.append(row)
            print(f"  seed {seed}: hybrid {row['hybrid']:.4f}, ps {row['ps']:.4f}")
    return found


# -- memory --------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "Adagrad": {},
    "row-wise Adagrad": {"optimizer": RowWiseAdagrad()},
    "row-wise Adagrad, bfloat16": {"optimizer": RowWiseAdagrad(), "dtype": "bfloat16"},
    "row-wise Adagrad, int8": {"optimizer": RowWiseAdagrad(), "dtype": "int8"},
    "not admitted": {"admission": CounterFilter(filter_freq=2)},
}


def run_memory(millions: int) -> list[dict[str, Any]]:
    found = []
    print(f"\n{millions} million new rows of dimension 16: bytes of the process for each")
    with ray_started(cpus=2):
        for name, how in KINDS.items():
            workload = FreshRows(count=(millions + 1) * 1_000_000, how=how)
            with trainer(workload, 1, "ps") as sgd:
                warm, steps = 5, millions * 1_000_000 // workload.batch
                sgd.fit(steps=warm, progress=False)
                before = sum(sgd.stats().memory.values())
                sgd.fit(steps=steps, progress=False)
                taken = sum(sgd.stats().memory.values()) - before
            each = taken / (steps * workload.batch)
            found.append({"title": "memory", "name": name, "bytes a row": each})
            print(f"  {name}: {each:.1f}")
    return found


# -- all -----------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    kinds = ("step", "workers", "hybrid", "areas", "memory")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--millions", type=positive, default=5, help="of rows, in memory")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--steps", type=positive, default=20, help="of a turn")
    parser.add_argument("--batch", type=positive, default=4096, help="clicks of a worker's step")
    parser.add_argument("--dim", type=positive, default=16, help="of the click model's rows")
    parser.add_argument("--mbit", type=positive, default=1000, help="of each host's link")
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    found: list[dict[str, Any]] = []
    if "step" in arguments.only:
        found += run_step(arguments.rounds, arguments.steps, RowSteps())
    if "workers" in arguments.only:
        found += run_workers(arguments.rounds, 5 * arguments.steps, RowSteps())
    clicks = ClickModel(arguments.batch, dim=arguments.dim)
    if "hybrid" in arguments.only:
        found += run_hybrid(arguments.rounds, arguments.steps, arguments.mbit, clicks)
    if "areas" in arguments.only:
        found += run_areas(clicks, arguments.seeds)
    if "memory" in arguments.only:
        found += run_memory(arguments.millions)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": found}, indent=1))


if __name__ == "__main__":
    main()
