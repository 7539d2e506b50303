"""A strategy of one's own: workers vote on the sign of each change, and send one byte for a number.

    python examples/own_strategy.py

It is signSGD with majority vote (Bernstein et al. 2019, arXiv:1810.05291): each worker sends the signs of its
gradient's running mean, and each weight moves by the learning rate in the direction that most workers
want, or not at all in a tie. The same network is then trained with strategy="allreduce", on the same
digits (scikit-learn's: `pip install 'steepest[demo]'`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from steepest import DistributedSGD, TorchModel, accuracy, collectives

BATCH = 32  # samples for each worker and step
x, y = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
x = x.float() / 16
train, test = (x[:1437], y[:1437]), (x[1437:], y[1437:])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def model_creator(worker_index: int, device_index: int) -> TorchModel:
    """The model of strategy="allreduce", and of the evaluation."""
    return TorchModel(
        network(),
        loss=F.cross_entropy,
        data=train,
        batch_size=BATCH,
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        metrics={"accuracy": accuracy},
    )


def majority_vote(epochs: int, lr: float) -> Callable[[Any], dict[str, torch.Tensor]]:
    """Return the function that each worker runs: a loop of one's own, from the trainer's weights."""

    def run(view: Any) -> dict[str, torch.Tensor]:
        rank, size = collectives.rank(), collectives.size()
        net = network()
        net.load_state_dict(view.models[0].module.state_dict())
        weights = parameters_to_vector(net.parameters()).detach()
        mean = torch.zeros_like(weights)
        steps = len(train[0]) // (BATCH * size)
        for epoch in range(epochs):
            order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(epoch))
            for batch in order[: steps * size * BATCH].view(steps, size, BATCH):
                own = batch[rank]  # all workers know the whole batch, and each takes its share
                loss = F.cross_entropy(net(train[0][own]), train[1][own])
                gradient = parameters_to_vector(torch.autograd.grad(loss, list(net.parameters())))
                mean.lerp_(gradient, 0.1)
                votes = collectives.all_reduce(mean.sign().to(torch.int8))
                weights -= lr * votes.sign()
                vector_to_parameters(weights, net.parameters())
        return {name: value.detach().clone() for name, value in net.named_parameters()}

    return run


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    """Train both ways, and return their accuracies on the test digits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.002, help="how far a vote moves a weight")
    options = parser.parse_args(argv)

    with DistributedSGD(model_creator, options.workers, strategy="allreduce") as sgd:
        initial = sgd.weights()
        print(f"before: test accuracy {sgd.evaluate(test).metrics['accuracy']:.1%}")

        results = sgd.foreach_worker(majority_vote(options.epochs, options.lr))
        sgd.set_weights(results[0])  # all workers have the same
        own = sgd.evaluate(test).metrics["accuracy"]
        print(f"majority vote, 1 byte for a number: test accuracy {own:.1%}")

        sgd.set_weights(initial)
        sgd.fit(epochs=options.epochs, progress=False)
        known = sgd.evaluate(test).metrics["accuracy"]
        print(f"allreduce, 4 bytes for a number: test accuracy {known:.1%}")
    return own, known


if __name__ == "__main__":
    main()
