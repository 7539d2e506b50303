"""The README's picture: a worker is killed while a job trains, beside the same job without a death.

    python -m benchmarks.picture --out docs/worker_dies.png

Three worker processes of this machine (`steepest.core`) train handwritten digits under "ps". One is killed by SIGKILL
when step 60 is committed. Both jobs are run for the picture, and their weights are compared. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from examples.core_digits import model
from steepest.core import ProcessRuntime, Settings, Trainer

WORKERS, EPOCHS, KILLED_AT, RATE = 3, 10, 60, 0.1


@dataclass
class Run:
    """A job's losses by step, and when each step was committed, in seconds from the first."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    killed: float | None = None  # seconds from the first step
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def train(kill_at: int | None, start_method: str, strategy: str = "ps") -> Run:
    """Train once; kill worker 1 when a step is committed."""
    run, first = Run(), 0.0

    def committed(result) -> None:
        nonlocal first
        now = time.monotonic()
        first = first or now
        run.losses.append(result.loss)
        run.seconds.append(now - first)
        if result.step == kill_at and run.killed is None:
            run.killed = now - first
            os.kill(trainer.pids[1], signal.SIGKILL)

    trainer = Trainer(
        partial(model, RATE), num_workers=WORKERS, strategy=strategy,
        settings=Settings(on_death="replace"), runtime=ProcessRuntime(start_method),
    )  # fmt: skip
    with trainer:
        trainer.fit(epochs=EPOCHS, on_step=committed)
        run.weights = trainer.state_dict()
    return run


def difference(one: Run, other: Run) -> float:
    """The largest difference of any weight."""
    return max(float((one.weights[name] - other.weights[name]).abs().max()) for name in one.weights)


def draw(calm: Run, struck: Run, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, steps) = pyplot.subplots(1, 2, figsize=(9, 2.9))
    numbers = range(1, len(calm.losses) + 1)
    losses.plot(numbers, calm.losses, color="#9ecae1", linewidth=5, label="no death")
    losses.plot(numbers, struck.losses, color="#08306b", linewidth=1.2, label="a worker is killed")
    losses.axvline(KILLED_AT, color="#cb181d", linestyle="--", linewidth=1)
    losses.set_xlabel("step")
    losses.set_ylabel("training loss")
    losses.set_yscale("log")
    losses.legend()
    for run, color, width in ((calm, "#9ecae1", 5), (struck, "#08306b", 1.2)):
        steps.plot(run.seconds, range(1, len(run.seconds) + 1), color=color, linewidth=width)
    assert struck.killed is not None
    steps.axvline(struck.killed, color="#cb181d", linestyle="--", linewidth=1)
    steps.annotate(
        "SIGKILL", (struck.killed, 5), color="#cb181d", xytext=(5, 0), textcoords="offset points"
    )
    steps.set_xlabel("seconds")
    steps.set_ylabel("committed steps")
    for axes in (losses, steps):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.picture", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("docs/worker_dies.png"))
    parser.add_argument(
        "--start-method", choices=("spawn", "forkserver"), default="forkserver",
        help="how a successor starts (default: forkserver)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    calm = train(None, options.start_method)
    struck = train(KILLED_AT, options.start_method)
    pause = max(
        after - before for before, after in itertools.pairwise(struck.seconds)
    )  # while a successor starts
    print(
        f"{len(struck.losses)} steps, the longest pause between two {pause:.1f} s; "
        f"largest difference of any weight: {difference(calm, struck):g}"
    )
    draw(calm, struck, options.out)


if __name__ == "__main__":
    main()
