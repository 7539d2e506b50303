"""The contract of a model in any framework: tests of a fixture `bound`, which each module that imports them defines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from steepest.core.models.protocol import Computed, Model
from steepest.core.models.torch import accuracy
from steepest.core.tensors.layout import ChunkSpec
from steepest.tables.modules.torch_model import TorchModel

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(12, 3, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 2, (12,), generator=GENERATOR)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)
    ).double()


class Records(Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": X[index], "y": Y[index]}


class DictModel(TorchModel):
    def loss(self, batch: Any) -> torch.Tensor:
        self.scores = self.module(batch["x"])
        return F.cross_entropy(self.scores, batch["y"])

    def metrics(self, batch: Any) -> dict[str, float]:
        return {"accuracy": float(accuracy(self.scores, batch["y"]))}


class Bound:
    """A model in its buffers, and what it reported last."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layout = model.layout
        self.weights, self.gradients = model.layout.allocate(), model.layout.allocate()
        model.bind(self.weights, self.gradients)
        self.calls: list[tuple[int, float, bool]] = []

    def batch(self, *rows: int) -> Any:
        return next(self.model.data.open([np.array(rows or (0, 1, 2, 3))]))

    def compute(self, batch: Any = None, metrics: bool = False) -> Computed:
        self.calls, self.seen = [], {}

        written: dict[int, set[int]] = {}

        def ready(index: int, weight: float, present: bool, chunk: int | None = None) -> None:
            parts = written.setdefault(index, set())
            assert chunk not in parts, "told twice"
            parts |= set(self.layout.chunks_of[index]) if chunk is None else {chunk}
            if parts == set(self.layout.chunks_of[index]):
                self.calls.append((index, weight, present))
            self.seen[index] = self.layout.entry_view(self.gradients, index).clone()

        return self.model.compute_gradients(
            self.batch() if batch is None else batch, ready, metrics
        )

    def gradient(self, name: str) -> torch.Tensor:
        return self.layout.entry_view(self.gradients, self.layout.index[name]).clone()

    def weight(self, name: str) -> torch.Tensor:
        return self.layout.entry_view(self.weights, self.layout.index[name])

    def everything(self) -> list[torch.Tensor]:
        return [self.weights.clone(), self.gradients.clone(), *self.model.state().values()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_it_is_a_model(bound: Bound) -> None:
    assert isinstance(bound.model, Model)
    assert (bound.model.batch_size, bound.model.data.size) == (4, 12)
    assert bound.model.optimizer_spec.trainable() == {
        e.name for e in bound.layout.entries if e.trainable
    }
    assert not isinstance(network(), Model)


def test_gradients_equal_finite_differences(bound: Bound) -> None:
    for index, entry in enumerate(bound.layout.entries):
        values = bound.layout.entry_view(bound.weights, index)
        values += 0.1 * torch.randn(entry.shape, generator=GENERATOR, dtype=torch.float64)
    batch, step = bound.batch(), 1e-6
    bound.compute(batch)
    for index, entry in enumerate(bound.layout.entries):
        values = bound.layout.entry_view(bound.weights, index).flatten()
        for i, gradient in enumerate(
            bound.layout.entry_view(bound.gradients, index).flatten().tolist()
        ):
            losses = []
            for offset in (step, -2 * step, step):
                values[i] += offset
                losses.append(bound.model.evaluate(batch).loss)
            assert gradient == pytest.approx((losses[0] - losses[1]) / (2 * step), abs=1e-8), (
                entry.name,
                i,
            )


def test_ready_is_called_once_for_each_entry_when_its_gradient_is_written(bound: Bound) -> None:
    bound.compute(bound.batch(0, 1, 2))
    assert sorted(bound.calls) == [(i, 3.0, True) for i in range(len(bound.layout.entries))]
    for index, seen in bound.seen.items():
        assert torch.equal(seen, bound.layout.entry_view(bound.gradients, index))


def test_what_is_computed_is_reported(bound: Bound) -> None:
    computed = bound.compute(bound.batch(5, 6, 7), metrics=True)
    assert (computed.weight, computed.samples) == (3.0, 3)
    assert computed == bound.model.evaluate(bound.batch(5, 6, 7))
    assert computed.metrics.keys() == {"accuracy"}
    assert bound.compute(bound.batch(5, 6, 7)).metrics == {}


def test_a_second_call_overwrites_the_first(bound: Bound) -> None:
    bound.compute(bound.batch(4, 5))
    wanted = bound.gradients.clone()
    bound.compute(bound.batch(0, 1, 2))
    assert not torch.equal(bound.gradients, wanted)
    bound.compute(bound.batch(4, 5))
    assert torch.equal(bound.gradients, wanted), "computing twice gives the same bits"


def test_evaluate_changes_nothing(bound: Bound) -> None:
    bound.compute()
    before = bound.everything()
    first = bound.model.evaluate(bound.batch(7, 8, 9))
    assert bound.model.evaluate(bound.batch(7, 8, 9)) == first
    assert same(bound.everything(), before)


def test_evaluation_sources_give_batches_of_the_same_kind(bound: Bound) -> None:
    data = Records() if isinstance(bound.model, DictModel) else (X, Y)
    source = bound.model.source(data, 6)
    assert source.size == 12
    assert bound.model.evaluate(next(source.open([np.arange(6)]))) == bound.model.evaluate(
        bound.batch(*range(6))
    )


def test_state_can_be_set_again(bound: Bound) -> None:
    state = bound.model.state()
    bound.model.load_state(state)
    assert bound.model.state() == state == {}


def check_chunks_of_another_size_change_no_gradient(make: Callable[[], Any]) -> None:
    whole, model = Bound(make()), make()
    model.relayout(ChunkSpec(32))
    cut = Bound(model)
    assert len(cut.layout.chunks) > len(whole.layout.chunks) == 1
    assert whole.compute() == cut.compute()
    assert torch.equal(whole.gradients, cut.gradients)


def check_replicas_may_share_one_copy_of_the_weights(make: Callable[[], Any]) -> None:
    first, second = Bound(make()), Bound(make())
    other = make()
    gradients = other.layout.allocate()
    other.bind(first.weights, gradients)
    first.weights.copy_(second.weights)
    computed = other.compute_gradients(first.batch(), lambda *_: None, False)
    assert computed == second.compute()
    assert torch.equal(gradients, second.gradients)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def torch_model(module: nn.Module | None = None, **options: Any) -> TorchModel:
    settings = {
        "loss": F.cross_entropy,
        "data": (X, Y),
        "batch_size": 4,
        "optimizer": sgd,
    } | options
    return TorchModel(module or network(), **settings)
