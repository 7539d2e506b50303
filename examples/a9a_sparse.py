"""Logistic regression on a9a with weights in an embedding table: workers push sparse gradients.

    python examples/a9a_sparse.py                      # synchronous: 4.1e-5 above the optimum
    python examples/a9a_sparse.py --strategy async     # about 5e-4 above it; or allreduce, ssp

A weight is a row of dimension 1, and a sample a bag of its 14 features or fewer: a forward pass
pulls the weights of its batch's features, a backward pass pushes their gradients. Synchronous steps
cover all the data; asynchronously each worker's 1,024 samples are an update.

a9a is read as by `examples/a9a_logistic_regression.py`, and has the same substitute, of which the
synchronous steps leave 3.9e-3. Needs `pip install 'steepest[demo,embedding]'`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from a9a_logistic_regression import DECAY, load
from torch import nn
from torch.nn import functional as F

from steepest import DistributedSGD, EmbeddingBag, Table, TorchModel
from steepest.tables import SGD, Adagrad, Zeros


def bags(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers and the values of each sample's features, padded by x.shape[1] and 0."""
    size = int((x != 0).sum(dim=1).max())
    values, ids = x.abs().topk(size, dim=1)
    return ids.where(values != 0, x.shape[1]), x.gather(1, ids)


class Linear(nn.Module):
    def __init__(self, features: int, optimizer: SGD | Adagrad) -> None:
        super().__init__()
        table = Table("weights", 1, optimizer=optimizer, initial=Zeros(), dtype="float64")
        self.weights = EmbeddingBag(table, mode="sum", padding_idx=features)

    def forward(self, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self.weights(ids, per_sample_weights=values).squeeze(dim=1)


class LogisticRegression(TorchModel):
    def loss(self, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ids, values, y = batch
        return F.softplus(-y * self.module(ids, values)).mean()  # the penalty is weight decay


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and return by how much the loss, with the penalty, exceeds the optimum."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="ps", choices=["ps", "allreduce", "async", "ssp"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, help="by default 300, asynchronously 100")
    parser.add_argument("--data", type=Path, help="folder for the file a9a")
    options = parser.parse_args(argv)
    source, x, y, optimum = load(options.data)
    data, (count, features) = (*bags(x), y), x.shape
    asynchronous = options.strategy in ("async", "ssp")
    curvature = float(torch.linalg.eigvalsh(x.T @ x / count)[-1]) / 4 + DECAY  # at most
    steady = SGD(lr=1 / curvature, momentum=0.98, nesterov=True, weight_decay=DECAY)
    optimizer = Adagrad(lr=0.2, weight_decay=DECAY) if asynchronous else steady

    def create(worker_index: int, device_index: int) -> TorchModel:
        return LogisticRegression(
            Linear(features, optimizer),
            data=data,
            batch_size=1024 if asynchronous else count,
            optimizer=lambda module: torch.optim.SGD(module.parameters()),
        )

    def weights(model: LogisticRegression) -> torch.Tensor:
        ids = torch.arange(features)[:, None]
        with torch.no_grad():
            return model.module(ids, torch.ones(features, 1, dtype=torch.float64))

    whole = None if asynchronous else count
    with DistributedSGD(
        create, options.workers, strategy=options.strategy, global_batch_size=whole
    ) as sgd:
        sgd.fit(epochs=options.epochs or (100 if asynchronous else 300))
        w = sgd.for_model(weights)
    reached = F.softplus(-y * (x @ w)).mean().item() + DECAY / 2 * w.square().sum().item()
    print(f"{source}: loss {reached:.9f}, which is {reached - optimum:.1e} above the optimum")
    return reached - optimum


if __name__ == "__main__":
    main()
