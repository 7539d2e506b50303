"""Serial training with plain PyTorch: one process, the whole global batch of each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.job import ModelCreator
from steepest.tables.modules.torch_model import TorchModel

Weights = dict[str, torch.Tensor]
OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]


def samples(
    count: int, inputs: int = 3, outputs: int = 2, dtype: torch.dtype = torch.float64
) -> Any:
    """Fixed random data for a regression."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, inputs, generator=generator, dtype=torch.float64)
    y = torch.randn(count, outputs, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def perceptron(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A small network, initialised from the global random state."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def sgd(lr: float = 0.1, **settings: Any) -> OptimizerFactory:
    """A factory of torch.optim.SGD."""
    return lambda module: torch.optim.SGD(module.parameters(), lr=lr, **settings)


@dataclass(frozen=True)
class Task:
    """Something to train, by the library (`creator`) or serially (`train`)."""

    module: Callable[[], nn.Module] = perceptron
    optimizer: OptimizerFactory = field(default_factory=sgd)
    data: tuple[torch.Tensor, ...] = field(default_factory=lambda: samples(13))
    loss: Callable[..., Any] = nn.functional.mse_loss
    batch_size: int = 2
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    learning_rate: Callable[[int], float] | None = None
    metrics: Mapping[str, Callable[..., Any]] | None = None
    table_shards: int = 2

    def creator(self) -> ModelCreator:
        """A `model_creator`."""

        def create(worker_index: int, device_index: int) -> TorchModel:
            return TorchModel(
                self.module(),
                loss=self.loss,
                data=self.data,
                batch_size=self.batch_size,
                optimizer=self.optimizer,
                lr_scheduler=self.lr_scheduler,
                learning_rate=self.learning_rate,
                metrics=self.metrics,
                table_shards=self.table_shards,
            )

        return create

    def train(self, replicas: int, steps: int, seed: int = 0) -> Weights:
        """Trains serially with the samples that so many replicas take together in each step."""
        return self.trace(replicas, steps, seed)[-1]

    def trace(self, replicas: int, steps: int, seed: int = 0) -> list[Weights]:
        """The weights by name before the first step and after each."""
        torch.manual_seed(seed)
        module = self.module()
        optimizer = self.optimizer(module)
        scheduler = None if self.lr_scheduler is None else self.lr_scheduler(optimizer)
        plan = SamplePlan(len(self.data[0]), replicas * self.batch_size, seed)
        found = [snapshot(module)]
        for step in range(steps):
            if self.learning_rate is not None:
                for group in optimizer.param_groups:
                    group["lr"] = self.learning_rate(step)
            index = torch.from_numpy(plan.share(step, 0, 1))
            *inputs, target = (column[index] for column in self.data)
            result = self.loss(module(*inputs), target)
            optimizer.zero_grad()
            (result[0] if isinstance(result, tuple) else result).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            found.append(snapshot(module))
        return found


def snapshot(module: nn.Module) -> Weights:
    """Copies of a module's parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def difference(weights: Weights, expected: Weights) -> float:
    """The largest difference of two sets of weights, relative to the largest weight of the second."""
    assert weights.keys() == expected.keys()
    largest = max(float(w.abs().max()) for w in expected.values() if w.numel())
    return (
        max(
            float((weights[n].double() - w.double()).abs().max())
            for n, w in expected.items()
            if w.numel()
        )
        / largest
    )


def same_bits(weights: Weights, expected: Weights) -> bool:
    """Whether two sets of weights are equal in every bit (and dtype)."""
    return weights.keys() == expected.keys() and all(
        w.dtype == expected[n].dtype and torch.equal(w, expected[n]) for n, w in weights.items()
    )


def serially(task: Task, sizes: list[tuple[int, int]]) -> Weights:
    """Trains in this process, with the samples of so many workers for so many steps, one after the other."""
    torch.manual_seed(0)
    module = task.module()
    optimizer = task.optimizer(module)
    step = epoch = offset = 0
    for workers, count in sizes:
        plan = SamplePlan(len(task.data[0]), workers * task.batch_size, 0, step, epoch, offset)
        for _ in range(count):
            index = torch.from_numpy(plan.share(step, 0, 1))
            *inputs, target = (column[index] for column in task.data)
            loss: Any = task.loss(module(*inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        epoch, offset = plan.position(step).epoch, plan.position(step).begin
    return snapshot(module)
