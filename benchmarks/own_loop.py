"""The time of a step in a loop of the user's own, beside `fit` and other libraries' loops, with two workers.

    python -m benchmarks.own_loop                       # convnet and mlp, about four minutes
    python -m benchmarks.own_loop --model convnet --rounds 5 --shipped
    python -m benchmarks.own_loop --start 5             # the time up to the first step, alone
    python -m benchmarks.own_loop --model mlp --strategies allreduce --rivals accelerate fabric    # in 12 GB

The same script in each: a DataLoader whose data set reads a batch at once, zero_grad, forward, backward, step. ``fit``
has that loader in a `TorchModel`. ``loop`` is `steepest.prepare` and `steepest.epochs` around the script's own loop.
``ddp kept`` is DistributedDataParallel as in ``benchmarks.overhead``, without a loader, with the C library told to
keep freed memory, as steepest's workers do. ``ddp loop``, ``accelerate`` and ``fabric`` are the same script, loader
included, in DistributedDataParallel, Hugging Face's Accelerate and Lightning Fabric, with ``kept`` told the same;
with ``--shipped`` as they come, too. ``apart`` is two processes with that script that exchange nothing, which nothing
can beat. Those that are not installed are left out. Workloads, threads and turns are those of that benchmark: ratios
are of the same round. Beside the time there is the processor time of a contender's processes but the driver, which
says more where others use the machine.

``--start N`` runs ``steepest run benchmarks/own_loop_start.py --workers 2`` so many times, each in a fresh interpreter
which starts Ray, and prints the seconds from before that process exists until its first step has returned.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import argparse
import contextlib
import functools
import importlib
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.models import WORKLOADS, Workload
from benchmarks.overhead import Times, alternate, progress, ratios, ray_started, turn
from benchmarks.own_loop_data import Rows, as_it_is, loader
from benchmarks.rivals import DEADLINE, KEPT, WORKERS, Local, Steepest, Step, StepMaker, Trainer

INSTALL = {"accelerate": "pip install accelerate", "fabric": "pip install lightning"}
MODULES = {"accelerate": "accelerate", "fabric": "lightning.fabric"}
STRATEGIES = ("ps", "allreduce")
FIRST_STEP = 7.0  # seconds from a script's start to its first step that are wanted, on two cores


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


# --- the same script with other libraries ---


def missing(rival: str) -> str:
    """What to do for a rival that is not installed; "" if it is."""
    try:
        importlib.import_module(MODULES.get(rival, "torch"))
    except ImportError as error:
        return f"{rival} is left out: {error}; {INSTALL[rival]}"
    return ""


def _meet(rank: int, store: Path) -> None:
    """Make one of the processes' group of this one, as their launchers do."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORKERS, "NODE_RANK": 0}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    dist.init_process_group(
        *("gloo", store.as_uri(), timedelta(seconds=DEADLINE), WORKERS), rank=rank
    )


def _endless(batches: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(batches))


def ddp_loop(workload: Workload, rank: int, store: Path) -> Step:
    """The script with DistributedDataParallel and a DistributedSampler."""
    _meet(rank, store)
    return _plain(workload, DistributedDataParallel(workload.build()))


def apart(workload: Workload, rank: int, store: Path) -> Step:
    """The script in two processes that exchange nothing: no library of two workers can take less."""
    _meet(rank, store)
    return _plain(workload, workload.build())


def _plain(workload: Workload, model: nn.Module) -> Step:
    """The script, with a model as it is to be called."""
    optimizer = workload.optimizer(model, fused=None)
    rows = Rows(workload)
    batches = _endless(
        DataLoader(
            rows,
            batch_size=workload.batch_size,
            sampler=DistributedSampler(rows),
            collate_fn=as_it_is,
        )
    )

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        F.nll_loss(model(x), y).backward()
        optimizer.step()

    return step


def accelerate_loop(workload: Workload, rank: int, store: Path) -> Step:
    """The script with Hugging Face's Accelerate."""
    _meet(rank, store)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == WORKERS
    built = workload.build()
    model, optimizer, prepared = accelerator.prepare(
        built, workload.optimizer(built, fused=None), loader(workload)
    )
    batches = _endless(prepared)

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        accelerator.backward(F.nll_loss(model(x), y))
        optimizer.step()

    return step


def fabric_loop(workload: Workload, rank: int, store: Path) -> Step:
    """The script with Lightning Fabric."""
    _meet(rank, store)
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=WORKERS, strategy="ddp")
    fabric.launch()
    assert fabric.world_size == WORKERS
    built = workload.build()
    model, optimizer = fabric.setup(built, workload.optimizer(built, fused=None))
    batches = _endless(fabric.setup_dataloaders(loader(workload)))

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        fabric.backward(F.nll_loss(model(x), y))
        optimizer.step()

    return step


LOOPS: dict[str, StepMaker] = {
    "ddp loop": ddp_loop,
    "apart": apart,
    "accelerate": accelerate_loop,
    "fabric": fabric_loop,
}


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print a table for each workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", nargs="*", default=["convnet", "mlp"], choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="in a turn")
    # all contenders' processes are there at the same time
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("--rivals", nargs="*", default=list(LOOPS), choices=LOOPS)
    parser.add_argument(
        "--shipped", action="store_true", help="others with the C library as it is, too"
    )
    parser.add_argument(
        "--start", type=int, metavar="N", help="times to start a script, and nothing else"
    )
    chosen = parser.parse_args(arguments)
    if chosen.start:
        found = sorted(first_step() for _ in range(chosen.start))
        progress(
            f"{found[len(found) // 2]:.1f} s from start to the first step, of {len(found)} starts "
            f"({found[0]:.1f} to {found[-1]:.1f}; wanted {FIRST_STEP:.0f})"
        )
        return
    for name in chosen.model:
        workload = WORKLOADS[name]
        contenders: list[Trainer] = [Local(f"ddp{KEPT}", workload)]
        for rival in chosen.rivals:
            if reason := missing(rival):
                progress(reason)
                continue
            ways = (KEPT, "") if chosen.shipped else (KEPT,)
            contenders += [Local(rival + way, workload, LOOPS[rival]) for way in ways]
        for strategy in chosen.strategies:
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
                for other in compared(contender, times):
                    shares = ratios(seconds, times[other])
                    line += f"   {other}: " + " ".join(f"{v:.3f}" for v in shares.values())
                progress(line)


def first_step() -> float:
    """Return the seconds from a script's start to the return of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "stepped")
        script = Path(__file__).with_name("own_loop_start.py")
        command = [sys.executable, "-m", "steepest", "run", str(script), "--workers", str(WORKERS)]
        began = time.time()
        subprocess.run(
            [*command, "--no-progress", "--", str(found)],
            check=True,
            timeout=DEADLINE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return float(found.read_text()) - began


def compared(contender: str, times: Times) -> list[str]:
    """The others to whose times a contender's are compared."""
    if not contender.startswith("loop"):
        return [f"ddp{KEPT}"] if contender != f"ddp{KEPT}" else []
    fit = contender.replace("loop", "fit")
    return [name for name in times if name == fit or not name.startswith(("fit", "loop"))]


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
