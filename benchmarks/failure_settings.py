"""What each setting against failures costs while nothing fails: time, memory, bytes.

    python -m benchmarks.failure_settings
    python -m benchmarks.failure_settings --rounds 5 --workers 3

Two workers train 25 million parameters (100 MB) with momentum under ``"ps"``. Each setting is a job of its own; all
take turns in each round, odd rounds in reverse order, and a ratio is that to the job with no setting in the same round.
"step" is the mean over the steps of some seconds, because what is done now and then is in few of them; "driver",
"servers" and "spare" are resident memory after them (of the driver what it has more than before), "moved" is what
workers pushed and pulled for a step, "written" the size of a checkpoint. What a setting buys is in the tables of
`benchmarks.compound_deaths` and `benchmarks.recovery`.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import argparse
import contextlib
import functools
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.elasticity import large_model
from benchmarks.job_processes import processes
from benchmarks.overhead import alternate, machine, positive, ratios
from benchmarks.parameter_server_rivals import ray_started
from benchmarks.soak_samples import MIB, holding
from steepest import (
    Checkpoints,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
    RunConfig,
)

SECONDS = 20.0
WARM_STEPS = 5
OFF = FailureConfig(spares=0, snapshot_every=0)
NOTHING = "no setting"


@dataclass(frozen=True)
class Setting:
    failure: FailureConfig = OFF
    strategy: Any = field(default_factory=lambda: ParameterServerStrategy(num_servers=2))
    checkpoint_every: int = 0


SETTINGS = {
    NOTHING: Setting(),
    "snapshot_every=None": Setting(FailureConfig(spares=0)),
    "snapshot_every=20": Setting(FailureConfig(spares=0, snapshot_every=20)),
    "replication=2": Setting(strategy=ParameterServerStrategy(num_servers=2, replication=2)),
    "spares=1": Setting(FailureConfig(spares=1, snapshot_every=0)),
    "Checkpoints(every=50)": Setting(checkpoint_every=50),
    "heartbeat=0.5": Setting(FailureConfig(spares=0, snapshot_every=0, heartbeat=0.5)),
}


@dataclass(frozen=True)
class Cost:
    """What one job showed: seconds of a step, and MB."""

    step: float
    driver: float
    servers: float
    spare: float
    moved: float
    written: float


def cost(setting: Setting, workers: int, creator: Any = None, seconds: float = SECONDS) -> Cost:
    """Trains for some seconds."""
    creator = creator or functools.partial(large_model, momentum=0.9)
    gc.collect()  # what an earlier job's trainer held
    before = resident(os.getpid())
    with (
        checkpoints(setting) as kept,
        DistributedSGD(
            creator,
            num_workers=workers,
            strategy=setting.strategy,
            run_config=RunConfig(failure=setting.failure),
            checkpoints=kept,
        ) as trainer,
    ):
        trainer.fit(steps=WARM_STEPS, progress=False)
        began, first = time.monotonic(), trainer.stats()
        while time.monotonic() - began < seconds:
            trainer.fit(steps=max(1, setting.checkpoint_every or 20), progress=False)
        took, last = time.monotonic() - began, trainer.stats()
        steps, names = last.step - first.step, processes()
        moved = last.bytes_pushed + last.bytes_pulled - first.bytes_pushed - first.bytes_pulled
        return Cost(
            took / steps,
            resident(os.getpid()) - before,
            sum(resident(pid) for name, pid in names.items() if name.startswith("server")),
            sum(resident(pid) for name, pid in names.items() if name.startswith("spare")),
            moved / steps / 1e6,
            largest(Path(kept.path)) if kept is not None else 0.0,
        )


@contextlib.contextmanager
def checkpoints(setting: Setting) -> Iterator[Checkpoints | None]:
    if not setting.checkpoint_every:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Checkpoints(folder, every=setting.checkpoint_every, keep=1)


def resident(pid: int) -> float:
    held = holding(pid)
    return 0.0 if held is None else held.memory * MIB / 1e6


def largest(folder: Path) -> float:
    """MB of the largest checkpoint in a folder."""
    sizes = [
        sum(file.stat().st_size for file in each.iterdir())
        for each in folder.iterdir()
        if each.is_dir()
    ]
    return max(sizes, default=0) / 1e6


def table(found: Mapping[str, Sequence[Cost]]) -> str:
    lines = [
        "",
        f"{'':24}{'ms/step':>9}{'over ' + NOTHING:>18}{'min..max':>14}{'driver MB':>11}"
        f"{'servers MB':>12}{'spare MB':>10}{'MB moved a step':>17}{'MB written':>12}",
    ]
    for name, each in found.items():
        steps = [one.step for one in each]
        line = f"{name:24}{statistics.median(steps) * 1e3:9.1f}"
        over = ratios(steps, [one.step for one in found[NOTHING]])
        span = f"{over['min']:.2f}..{over['max']:.2f}"
        line += f"{over['median']:18.2f}{span:>14}"
        for what, width in (("driver", 11), ("servers", 12), ("spare", 10), ("moved", 17)):
            line += f"{statistics.median(getattr(one, what) for one in each):{width}.0f}"
        lines.append(f"{line}{max(one.written for one in each):12.0f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.failure_settings", description=description
    )
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--workers", type=positive, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(machine(), flush=True)
    with ray_started(options.workers + 1):
        turns = {
            name: functools.partial(cost, setting, options.workers)
            for name, setting in SETTINGS.items()
        }
        print(table(alternate(turns, options.rounds)))


if __name__ == "__main__":
    main()
