"""The time of a step in a loop of the user's own, beside `fit` and DistributedDataParallel, with two workers.

    python -m benchmarks.own_loop                       # both workloads, about three minutes
    python -m benchmarks.own_loop --model convnet --rounds 5

The same script in each: a DataLoader whose data set reads a batch at once, zero_grad, forward, backward, step. ``fit``
has that loader in a `TorchModel`. ``loop`` is `steepest.prepare` and `steepest.epochs` around the script's own loop.
``ddp kept`` is DistributedDataParallel as in ``benchmarks.overhead``, without a loader, with the C library told to keep
freed memory, as steepest's workers do. Workloads, threads and turns are those of that benchmark: ratios are of the same
round. Beside the time there is the processor time of a contender's processes but the driver, which says more where
others use the machine.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import argparse
import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.models import WORKLOADS, Workload
from benchmarks.overhead import Times, alternate, progress, ratios, ray_started, turn
from benchmarks.rivals import KEPT, Local, Steepest, Trainer

STRATEGIES = ("ps", "allreduce")


class Rows(Dataset[Any]):
    """Arrays of which a batch is read at once."""

    def __init__(self, workload: Workload) -> None:
        self._x, self._y = workload.data()

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> Any:
        return self._x[index], self._y[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        rows = torch.as_tensor(indices)
        return self._x[rows], self._y[rows]


def _as_it_is(batch: Any) -> Any:
    return batch


def loader(workload: Workload) -> DataLoader[Any]:
    """The loader of every contender."""
    return DataLoader(
        Rows(workload), batch_size=workload.batch_size, shuffle=True, collate_fn=_as_it_is
    )


class Fit(Steepest):
    """`fit` with the loader."""

    def creator(self) -> Any:
        """What makes each worker's model."""
        from steepest import TorchModel

        workload = self.workload
        return lambda worker, device: TorchModel(
            workload.build(),
            loss=F.nll_loss,
            data=loader(workload),
            optimizer=functools.partial(workload.optimizer, fused=None),
        )

    def start(self) -> None:
        from steepest import DistributedSGD

        self._sgd = DistributedSGD(
            self.creator(), num_workers=self.workers, strategy=self._strategy
        )


class Loop(Fit):
    """The script's own loop."""

    def creator(self) -> Any:
        from steepest.loop.model import LoopCreator

        return LoopCreator(functools.partial(script, self.workload))


def script(workload: Workload) -> None:
    """A user's function, without an end."""
    import steepest

    model = workload.build()
    optimizer = workload.optimizer(model, fused=None)
    model, optimizer, batches = steepest.prepare(model, optimizer, loader(workload))
    for _ in steepest.epochs(1 << 30):
        for x, y in batches:
            optimizer.zero_grad()
            F.nll_loss(model(x), y).backward()
            optimizer.step()


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print a table for each workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", nargs="*", default=["convnet", "mlp"], choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="in a turn")
    chosen = parser.parse_args(arguments)
    for name in chosen.model:
        workload = WORKLOADS[name]
        contenders: list[Trainer] = [Local(f"ddp{KEPT}", workload)]
        for strategy in STRATEGIES:
            contenders += [
                Fit(f"fit {strategy}", workload, strategy),
                Loop(f"loop {strategy}", workload, strategy),
            ]
        with ray_started(contenders):
            found = measure(contenders, chosen.rounds, chosen.steps or workload.steps)
        for what, times in zip(("time", "processor time"), found, strict=True):
            progress(
                f"\n{name}: milliseconds of {what} for a step, and ratios of the same round (median, least, greatest)"
            )
            for contender, seconds in times.items():
                line = f"{contender:16s} {1000 * sorted(seconds)[len(seconds) // 2]:8.2f}"
                for other in (f"ddp{KEPT}", contender.replace("loop", "fit")):
                    if other in times and other != contender:
                        shares = ratios(seconds, times[other])
                        line += f"   {other}: " + " ".join(f"{v:.3f}" for v in shares.values())
                progress(line)


def measure(contenders: list[Trainer], rounds: int, steps: int) -> tuple[Times, Times]:
    """Let contenders take turns; return for each round the seconds of a step, and those of processors."""
    with contextlib.ExitStack() as stack:
        turns = {}
        for contender in contenders:
            stack.enter_context(contender)
            turn(contender, max(20, steps // 5))
            turns[contender.name] = functools.partial(_turn, contender, steps)
        found = alternate(turns, rounds)
    both = ({name: [each[i] for each in of] for name, of in found.items()} for i in (0, 1))
    return next(both), next(both)


def _turn(contender: Trainer, steps: int) -> tuple[float, float]:
    """Return the seconds of a step, and the seconds that processors spend on it."""
    pids = contender.pids()
    before = sum(map(processor_seconds, pids))
    return turn(contender, steps), (sum(map(processor_seconds, pids)) - before) / steps


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process of this machine has taken so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
