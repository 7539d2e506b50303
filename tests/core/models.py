"""Models for the tests of jobs, which worker processes import."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from steepest.core.engine.job import ModelCreator
from steepest.core.models.protocol import Computed, Model
from steepest.core.models.torch import TorchModel

SAMPLES = 44  # the last step of an epoch is a part of one
BATCH = 4
POISON = 7  # the sample for which `poisoned` raises


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (SAMPLES, 5) and classes (SAMPLES,)."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return x, (x.sum(1) > 0).long()


def network() -> torch.nn.Module:
    """Return a small network, in double precision."""
    layers = torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    return torch.nn.Sequential(*layers).double()


def optimizer(net: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with a state."""
    return torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.8)


def classifier(worker: int, device: int) -> TorchModel:
    """Return a classifier of `data`."""
    return TorchModel(
        network(), loss=F.cross_entropy, data=data(), batch_size=BATCH, optimizer=optimizer
    )


def counter(worker: int, device: int) -> TorchModel:
    """Return a model with a weight for each sample, which a visit lowers by 1 over the workers of its update."""
    net = torch.nn.Linear(SAMPLES, 1, bias=False).double()
    torch.nn.init.zeros_(net.weight)
    return TorchModel(
        net, loss=lambda output, target: (output.sum(), 1.0), batch_size=BATCH,
        data=(torch.eye(SAMPLES, dtype=torch.float64), torch.zeros(SAMPLES)),
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=1.0),
    )  # fmt: skip


def poisoned(worker: int, device: int) -> TorchModel:
    """Return a model whose loss raises."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("no loss for any sample")

    return TorchModel(network(), loss=loss, data=data(), batch_size=BATCH, optimizer=optimizer)


def struck(
    creator: ModelCreator, folder: Path, worker: int, gradients: Sequence[int], *place: int
) -> Model:
    """Return a creator's model; each life of one worker is killed in the midst of one of its gradients.

    Args:
        creator: of the model.
        folder: an empty one, where lives are noted.
        worker: of whose lives each is killed.
        gradients: by life, the number of the gradient, from 1; later lives live on.
        place: the indices of a worker and a device, as of any creator.
    """
    model = creator(*place)
    life, calls = len(list(folder.iterdir())), itertools.count(1)
    compute = model.compute_gradients

    def strike(*arguments: Any) -> Computed:
        if life < len(gradients) and next(calls) == gradients[life]:
            (folder / str(life)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return compute(*arguments)

    if place[0] == worker:
        model.compute_gradients = strike  # type: ignore[method-assign]
    return model


def backward_elsewhere(creator: ModelCreator, *place: int) -> Model:
    """Return a creator's model; in its process backward passes run on another thread, as those of GPUs do."""
    backward, other = torch.Tensor.backward, ThreadPoolExecutor(1)

    def elsewhere(tensor: torch.Tensor, *arguments: Any, **named: Any) -> None:
        other.submit(backward, tensor, *arguments, **named).result()

    torch.Tensor.backward = elsewhere  # type: ignore[method-assign]
    return creator(*place)


def unmade(worker: int, device: int) -> Any:
    """Raise, in one of the workers."""
    if worker == 1:
        raise LookupError("there is no model for worker 1")
    return classifier(worker, device)


def unsendable() -> Any:
    """Return a creator that cannot be pickled."""
    lock = threading.Lock()
    return lambda worker, device: lock
