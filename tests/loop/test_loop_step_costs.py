"""What a step of a loop of one's own costs beside one of `fit`: calls of functions, on all threads."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import steepest
from steepest import TorchModel
from steepest.loop.model import LoopCreator, LoopModel
from steepest.testing import InProcessCluster
from tests.reference import perceptron, samples
from tests.socket_jobs import STRATEGIES

STEPS, WORKERS, BATCH = 20, 2, 2
#: The most calls of a worker in a step beyond those that `fit` makes, of which two threads' turns are ten,
#: and those of the loop's place in the data, which `fit` has in the engine.
MOST_MORE = 152


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples(4 * STEPS * WORKERS * BATCH)), batch_size=BATCH)


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01)


def script() -> None:
    module = perceptron()
    model, own, batches = steepest.prepare(module, optimizer(module), loader())
    for _ in steepest.epochs(9):
        for x, y in batches:
            own.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            own.step()


def model(worker: int, device: int) -> TorchModel:
    return TorchModel(perceptron(), loss=nn.functional.mse_loss, data=loader(), optimizer=optimizer)


def calls_of_a_step(creator: Any, strategy: Any) -> tuple[float, Counter[str]]:
    """The calls of functions of a worker's step, and which they are."""
    calls: Counter[str] = Counter()
    turns: list[Counter[str]] = []

    def see(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and "/testing/" not in frame.f_code.co_filename:
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1

    before, loops = sys.getprofile(), []

    def kept(worker: int, device: int) -> Any:
        loops.append(creator(worker, device))
        return loops[-1]

    threading.setprofile(see)  # for the threads of users' functions, which begin here
    try:
        cluster = InProcessCluster(kept, num_workers=WORKERS, strategy=strategy)
        cluster.step(8)  # gradients leave early by then
        # of a slow machine the coordinator's clock asks now and then whether somebody is late
        for _ in range(3):
            calls.clear()
            sys.setprofile(see)
            cluster.step(STEPS)
            sys.setprofile(before)
            turns.append(Counter(calls))
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]
        for each in loops:
            if isinstance(each, LoopModel):
                each.session.end()
    least = min(turns, key=lambda each: each.total())
    return least.total() / STEPS / WORKERS, least


@pytest.mark.few(1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_of_ones_own_loop_calls_few_functions_more_than_one_of_fit(name: str) -> None:
    of_fit, _ = calls_of_a_step(model, STRATEGIES[name])
    of_loop, calls = calls_of_a_step(LoopCreator(script), STRATEGIES[name])
    assert of_loop - of_fit <= MOST_MORE, calls.most_common(20)
