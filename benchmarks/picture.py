"""The README's picture: a worker is killed while a job trains, beside the same job without a death.

    python -m benchmarks.picture --out docs/worker_dies.png

Three worker processes of this machine train handwritten digits under "ps". One is killed by SIGKILL
when step 60 is committed. Both jobs are run for the picture, and their weights are compared. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from steepest import Callback, DistributedSGD, FailureConfig, RunConfig, TorchModel

WORKERS, EPOCHS, KILLED_AT = 3, 10, 60
#: All wait for the successor, so that both jobs have the same weights.
CONFIG = RunConfig(runtime="processes", failure=FailureConfig(patience=math.inf, spares=0))


@dataclass
class Run:
    """A job's losses by step, and when each step was committed, in seconds from the first."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    killed: float | None = None  # seconds from the first step
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def model(worker_index: int, device_index: int) -> TorchModel:
    """A worker's model: a perceptron with its loss, digits and optimizer."""
    x, y = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    return TorchModel(
        net, loss=F.cross_entropy, data=(x[:1500].float() / 16, y[:1500]), batch_size=32,
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    )  # fmt: skip


class Noting(Callback):
    """Notes each step of a run, and kills a process when one is committed."""

    def __init__(self, run: Run, kill_at: int | None, victim: int) -> None:
        self.run, self.kill_at, self.victim = run, kill_at, victim
        self.first = 0.0

    def on_step(self, sgd, result) -> None:
        now = time.monotonic()
        self.first = self.first or now
        self.run.losses.append(result.loss)
        self.run.seconds.append(now - self.first)
        if result.step == self.kill_at:
            self.run.killed = now - self.first
            os.kill(self.victim, signal.SIGKILL)


def train(kill_at: int | None, strategy: str = "ps") -> Run:
    """Train once; kill worker 1 when a step is committed."""
    run = Run()
    with DistributedSGD(model, WORKERS, strategy=strategy, run_config=CONFIG) as trainer:
        victim = trainer.foreach_worker(lambda worker: worker.pid)[1]
        trainer.fit(epochs=EPOCHS, callbacks=[Noting(run, kill_at, victim)], progress=False)
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
    options = parser.parse_args(arguments)
    calm, struck = train(None), train(KILLED_AT)
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
