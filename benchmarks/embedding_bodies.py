"""The jobs of ``benchmarks.embedding_servers``: rows alone, and a click model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.clicks import FEATURES, NUMBERS, Clicks
from benchmarks.embedding_rivals import RATE
from steepest import EmbeddingCollection, Table, TorchModel
from steepest.tables import Adagrad, Uniform
from steepest.tables.rows.local import LocalRows

Batch = tuple[Tensor, Tensor]  # ids (features, batch), gradients of their embeddings with a dim


def tables(
    features: int, dim: int, lr: float = RATE, width: float = 0.1, **how: Any
) -> dict[str, Table]:
    how = {"optimizer": Adagrad(lr=lr), "initial": Uniform(-width, width)} | how
    return {f"f{number}": Table(f"f{number}", dim, **how) for number in range(features)}


class Rows(nn.Module):
    """Embeddings of all features."""

    def __init__(self, features: int, dim: int, **how: Any) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(tables(features, dim, **how))

    def forward(self, ids: Tensor) -> list[Tensor]:
        names = [f"f{number}" for number in range(len(ids))]
        return list(self.embeddings(dict(zip(names, ids, strict=True))).values())


class _Given(torch.autograd.Function):
    """A loss with given gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: Tensor, *embedded: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if gradient.item() != 1.0:
            raise RuntimeError(f"the loss is multiplied by {gradient.item()}: gradients are not")
        return None, *ctx.gradients


class RowModel(TorchModel):
    def loss(self, batch: Batch) -> tuple[Tensor, float]:
        ids, gradients = batch
        loss = _Given.apply(gradients, *self.module(ids))  # type: ignore[no-untyped-call]
        return loss, ids.shape[1]


class Prepared:
    """Batches as `data=`, in their order, epoch after epoch."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches
        self.blocks = batches[0][0].shape[1]
        self.size: int | None = len(batches) * self.blocks

    def open(self, shares: Iterable[Any], prefetch: bool = True) -> Iterator[Batch]:
        for share in shares:
            yield self._batches[int(share[0]) // self.blocks]


@dataclass(frozen=True)
class RowSteps:
    """Pull, push and update of rows, and nothing else.

    Attributes:
        features: of which each has a table.
        batch: samples, each with an id of each feature.
        rows: ids that a feature has.
        dim: of a row.
        count: batches, which come again and again in this order.
    """

    features: int = 26
    batch: int = 4096
    rows: int = 100_000
    dim: int = 16
    count: int = 8

    def batches(self) -> list[Batch]:
        """Ids by a power law of exponent 1.2, and random gradients; the same in every process."""
        random = np.random.default_rng(0)
        shape = self.features, self.batch
        found = []
        for _ in range(self.count):
            ids = torch.from_numpy((random.zipf(1.2, shape) - 1) % self.rows)
            gradients = random.normal(size=(*shape, self.dim)).astype(np.float32)
            found.append((ids, torch.from_numpy(gradients)))
        return found

    def first(self) -> Tensor:
        """The rows as they begin in a job of seed 0, (features, rows, dim)."""
        source = LocalRows(tables(self.features, self.dim).values())
        numbers = np.repeat(np.arange(self.features, dtype=np.int32), self.rows)
        ids = np.tile(np.arange(self.rows), self.features)
        values = torch.from_numpy(source.shards[0][0].pull(numbers, ids))
        return values.view(self.features, self.rows, self.dim)

    def model(self) -> TorchModel:
        return RowModel(
            Rows(self.features, self.dim),
            data=Prepared(self.batches()),
            batch_size=self.batch,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=RATE),
        )


class Fresh:
    """Ids that are new in each batch, and gradients of ones, as `data=`."""

    def __init__(self, size: int, dim: int) -> None:
        self.size: int | None = size
        self._dim = dim

    def open(self, shares: Iterable[Any], prefetch: bool = True) -> Iterator[Batch]:
        for share in shares:
            ids = torch.from_numpy((np.asarray(share) * 2_654_435_761) & ((1 << 62) - 1))
            yield ids[None], torch.ones(1, len(ids), self._dim)


@dataclass(frozen=True)
class FreshRows:
    """Steps that make rows, and nothing else.

    Attributes:
        batch: rows of a step.
        count: rows of an epoch.
        dim: of a row.
        how: settings of the table.
    """

    batch: int = 26 * 4096
    count: int = 10_000_000
    dim: int = 16
    how: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> TorchModel:
        return RowModel(
            Rows(1, self.dim, **self.how),
            data=Fresh(self.count, self.dim),
            batch_size=self.batch,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=RATE),
        )


class ClickNetwork(nn.Module):
    """The logit of a click, of embeddings and numbers: 29,633 parameters beside the tables."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(tables(FEATURES, dim, lr=0.05, width=0.01))
        self.dense = nn.Sequential(
            nn.Linear(FEATURES * dim + NUMBERS, 64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        names = [f"f{number}" for number in range(FEATURES)]
        embedded = self.embeddings(dict(zip(names, ids.T, strict=True)))
        return self.dense(torch.cat([*embedded.values(), numbers], dim=1)).squeeze(dim=1)


class ClickLoss(TorchModel):
    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ids, numbers, labels = batch
        return F.binary_cross_entropy_with_logits(self.module(ids, numbers), labels)


@dataclass(frozen=True)
class ClickModel:
    """A network for the clicks of `benchmarks.clicks`.

    Attributes:
        batch: samples of a worker's step.
        samples: of an epoch.
        dim: of an embedding.
    """

    batch: int = 4096
    samples: int = 1_000_000
    dim: int = 16

    def model(self) -> TorchModel:
        torch.manual_seed(0)
        return ClickLoss(
            ClickNetwork(self.dim),
            data=Clicks(self.samples),
            batch_size=self.batch,
            optimizer=lambda module: torch.optim.Adam(module.parameters(), lr=1e-3),
        )
