"""The rivals of ``benchmarks.embedding``: the same rows, trained in the same way, by other means.

All begin with the same rows, (features, rows, dim), and train them with Adagrad. A step takes the
ids of a batch, one of each feature for each sample, and the gradients of their embeddings.
"""

from __future__ import annotations

import importlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor, nn

from benchmarks.overhead import progress
from benchmarks.rivals import DEADLINE

RATE, EPS = 0.01, 1e-10  # of Adagrad, as torch's default


class Trained(ABC):
    """One way to train rows."""

    def prepare(self, gradients: Tensor) -> Any:
        """Return gradients, (features, batch, dim), as `step` takes them; not timed."""
        return gradients

    @abstractmethod
    def step(self, ids: Tensor, gradients: Any) -> None:
        """Look ids up, (features, batch), go back with prepared gradients, and update the rows."""

    @abstractmethod
    def values(self) -> Tensor:
        """Return all rows, (features x rows, dim)."""


class Bags(Trained):
    """One of torch's `EmbeddingBag` for each feature."""

    def __init__(self, first: Tensor) -> None:
        self._bags = [
            nn.EmbeddingBag.from_pretrained(part.clone(), freeze=False, mode="sum", sparse=True)
            for part in first
        ]
        weights = [bag.weight for bag in self._bags]
        self._optimizer = torch.optim.Adagrad(weights, lr=RATE, eps=EPS)

    def step(self, ids: Tensor, gradients: Tensor) -> None:
        offsets = torch.arange(ids.shape[1])
        self._optimizer.zero_grad()
        out = [bag(part, offsets) for bag, part in zip(self._bags, ids, strict=True)]
        torch.autograd.backward(out, list(gradients))
        self._optimizer.step()

    def values(self) -> Tensor:
        return torch.cat([bag.weight.detach() for bag in self._bags])


class OneBag(Trained):
    """One of torch's `EmbeddingBag` for all features."""

    def __init__(self, first: Tensor) -> None:
        features, rows, dim = first.shape
        self._bag = nn.EmbeddingBag.from_pretrained(
            first.reshape(-1, dim).clone(), freeze=False, mode="sum", sparse=True
        )
        self._optimizer = torch.optim.Adagrad([self._bag.weight], lr=RATE, eps=EPS)
        self._begins = torch.arange(features)[:, None] * rows

    def step(self, ids: Tensor, gradients: Tensor) -> None:
        self._optimizer.zero_grad()
        out = self._bag((ids + self._begins).view(-1), torch.arange(ids.numel()))
        out.backward(gradients.view(-1, gradients.shape[-1]))
        self._optimizer.step()

    def values(self) -> Tensor:
        return self._bag.weight.detach()


class Fbgemm(Trained):
    """FBGEMM's kernel for CPUs, which updates rows in its backward pass; exact Adagrad.

    It has to be a version made for this torch: 1.8.0 for torch 2.13.

    Raises:
        ImportError: it is not installed, or made for another torch.
    """

    def __init__(self, first: Tensor) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of parts that this version lacks
            try:
                kernels = importlib.import_module(
                    "fbgemm_gpu.split_table_batched_embeddings_ops_training"
                )
            except OSError as error:  # its library does not fit torch's
                raise ImportError(str(error)) from error
        config = importlib.import_module("fbgemm_gpu.split_embedding_configs")
        features, rows, dim = first.shape
        place = kernels.EmbeddingLocation.HOST, kernels.ComputeDevice.CPU
        self._bags = kernels.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, *place)] * features,
            optimizer=config.EmbOptimType.EXACT_ADAGRAD,
            learning_rate=RATE,
            eps=EPS,
        )
        for mine, part in zip(self._bags.split_embedding_weights(), first, strict=True):
            mine.copy_(part)

    def prepare(self, gradients: Tensor) -> Tensor:
        """Return gradients as its output is: (batch, features x dim)."""
        features, batch, dim = gradients.shape
        return gradients.transpose(0, 1).reshape(batch, features * dim)

    def step(self, ids: Tensor, gradients: Tensor) -> None:
        self._bags(ids.view(-1), torch.arange(ids.numel() + 1)).backward(gradients)

    def values(self) -> Tensor:
        return torch.cat([part.detach() for part in self._bags.split_embedding_weights()])


@ray.remote(num_cpus=0)
class RowServer:
    """A server as tutorials have it: a dict of rows, and one of their squared gradients' sums."""

    def __init__(self, first: np.ndarray) -> None:
        features, rows, _ = first.shape
        self._rows = {
            (feature, number): first[feature, number].copy()
            for feature in range(features)
            for number in range(rows)
        }
        self._sums = {key: np.zeros_like(row) for key, row in self._rows.items()}

    def pull(self, keys: np.ndarray) -> np.ndarray:
        return np.stack([self._rows[feature, number] for feature, number in keys.tolist()])

    def push(self, keys: np.ndarray, gradients: np.ndarray) -> None:
        for (feature, number), gradient in zip(keys.tolist(), gradients, strict=True):
            key = feature, number
            total = self._sums[key]
            total += gradient * gradient
            self._rows[key] -= RATE * gradient / (np.sqrt(total) + EPS)


class Tutorial(Trained):
    """A worker in this process, and `RowServer` in another one; two Ray calls a step.

    It asks for each distinct row once, as ours does, and pushes the sum of its gradients.
    """

    def __init__(self, first: Tensor) -> None:
        self._shape = first.shape
        self.server = RowServer.remote(first.numpy())

    def step(self, ids: Tensor, gradients: Tensor) -> None:
        features, rows, _ = self._shape
        keys, inverse = (ids + torch.arange(features)[:, None] * rows).unique(return_inverse=True)
        pairs = torch.stack([keys // rows, keys % rows], 1).numpy()
        pulled = ray.get(self.server.pull.remote(pairs), timeout=DEADLINE)
        leaf = torch.tensor(pulled, requires_grad=True)
        out = nn.functional.embedding(inverse, leaf)
        out.backward(gradients)
        assert leaf.grad is not None
        ray.get(self.server.push.remote(pairs, leaf.grad.numpy()), timeout=DEADLINE)

    def values(self) -> Tensor:
        features, rows, _ = self._shape
        pairs = torch.cartesian_prod(torch.arange(features), torch.arange(rows)).numpy()
        return torch.tensor(ray.get(self.server.pull.remote(pairs), timeout=DEADLINE))


def make(first: Tensor, kinds: dict[str, Callable[[Tensor], Trained]]) -> dict[str, Trained]:
    """Return rivals by name; one that cannot be imported is left out, with a note."""
    made: dict[str, Trained] = {}
    for name, kind in kinds.items():
        try:
            made[name] = kind(first)
        except ImportError as error:
            progress(f"{name} is not measured: {error}")
    return made
