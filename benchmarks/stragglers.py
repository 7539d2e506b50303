"""The time to some accuracy on MNIST when one of four workers is five times slower: `"async"` beside synchronous.

Part of ``python -m benchmarks.recovery --only straggler``. Four workers that compute would share
this machine's cores, and none would be slow by itself: each gradient here waits for 20 ms, that of
the slow worker for 100 ms, and computes little (1 to 2 ms), so that four workers are as fast on two
cores as on four. Accuracy is that of weights which the driver fetches during training, four times a
second, over the 10,000 test images; the time is when they were fetched. Batches are alike; each
mode has the learning rate of those tried that is fastest for it: of 0.2, 0.4 and 0.8 for
synchronous training, of 0.1, 0.2, 0.4 and 0.8 for `"async"`, whose smaller steps are more.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.recovery_bodies import Arrays, PacedModel
from steepest import Callback, DistributedSGD, ParameterServerStrategy, StepResult, TorchModel
from steepest.core.strategies.strategy import Strategy

WORKERS = 4
STEP_SECONDS = 0.02
SLOW_FACTOR = 5
BATCH = 64
GOAL = 0.97
LIMIT_SECONDS = 300.0
LOOK_SECONDS = 0.25
WANTED = 0.5  # of the synchronous time


Load = Callable[[], tuple[Arrays, Arrays]]  # to train with, and to test


@dataclass(frozen=True)
class Mode:
    strategy: Strategy
    learning_rate: float


SYNC, ASYNC = "sync", "async"
MODES = {
    SYNC: Mode(ParameterServerStrategy(), 0.4),
    "sync, 1 backup": Mode(ParameterServerStrategy(backup_workers=1), 0.4),
    ASYNC: Mode(ParameterServerStrategy(mode="async"), 0.1),
}


def mnist() -> tuple[Arrays, Arrays]:
    """MNIST, flat; scikit-learn's digits, enlarged, where STEEPEST_DATA has none."""
    from examples.data import load_mnist

    found = load_mnist()
    (x, y), (test_x, test_y) = (
        (torch.as_tensor(x).flatten(1), torch.as_tensor(y)) for x, y in found[1:]
    )
    return (x, y), (test_x, test_y)


def network() -> torch.nn.Module:
    """A perceptron of 101,770 parameters."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def model_creator(
    learning_rate: float, seconds: float, load: Load
) -> Callable[[int, int], TorchModel]:
    """Makes models of which the last worker's is slow; each worker loads the data itself."""

    def create(worker: int, device: int) -> TorchModel:
        model = PacedModel(
            network(),
            loss=F.cross_entropy,
            data=load()[0],
            batch_size=BATCH,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=learning_rate),
        )
        model.seconds = seconds * (SLOW_FACTOR if worker == WORKERS - 1 else 1)
        return model

    return create


class Reached(Exception):  # noqa: N818 - not an error
    """The goal, or the limit."""


class Watch(Callback):
    """Ends the run when the weights are good enough; notes after how many seconds."""

    def __init__(self, test: Arrays, goal: float, limit: float) -> None:
        self.seconds = float("inf")
        self._network, self._test, self._goal, self._limit = network(), test, goal, limit
        self._began = self._looked = 0.0

    def on_fit_begin(self, sgd: DistributedSGD, steps: int) -> None:
        self._began = self._looked = time.monotonic()

    def on_step(self, sgd: DistributedSGD, result: StepResult) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        if self._accuracy(sgd.weights()) >= self._goal:
            self.seconds = now - self._began
            raise Reached
        if now - self._began > self._limit:
            raise Reached

    def _accuracy(self, weights: dict[str, torch.Tensor]) -> float:
        self._network.load_state_dict(weights)
        x, y = self._test
        with torch.no_grad():
            return float((self._network(x).argmax(dim=1) == y).float().mean())


def time_to(
    mode: Mode,
    *,
    goal: float = GOAL,
    seconds: float = STEP_SECONDS,
    limit: float = LIMIT_SECONDS,
    load: Load = mnist,
) -> float:
    """Seconds of training until the goal; infinite when that takes longer than the limit."""
    creator = model_creator(mode.learning_rate, seconds, load)
    with DistributedSGD(creator, num_workers=WORKERS, strategy=mode.strategy) as sgd:
        sgd.warmup()
        watch = Watch(load()[1], goal, limit)
        with contextlib.suppress(Reached):
            sgd.fit(steps=1_000_000, callbacks=[watch], progress=False)
        return watch.seconds


def turns() -> dict[str, Callable[[], float]]:
    """A run of each mode."""
    return {name: functools.partial(time_to, mode) for name, mode in MODES.items()}
