"""Handwritten digits with plain processes, without Ray: each strategy on two workers.

    python examples/core_digits.py              # all four; or the names of some

Kill a worker while it trains (`kill -9` one of the numbers that it prints): another takes its place.
"""

import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from steepest.core import TorchModel, Trainer

RATES = {"ps": 0.1, "allreduce": 0.1, "async": 0.03, "ssp": 0.03}


def digits() -> tuple[Any, Any]:
    """Return images (1797, 64) and their classes (1797,)."""
    x, y = load_digits(return_X_y=True)
    return torch.as_tensor(x).float() / 16, torch.as_tensor(y)


def module() -> torch.nn.Module:
    """Return an untrained network."""
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def model(rate: float, worker_index: int, device_index: int) -> TorchModel:
    """Return a worker's model: the network with its loss, data and optimizer."""
    x, y = digits()
    return TorchModel(
        module(), loss=F.cross_entropy, data=(x[:1500], y[:1500]), batch_size=32,
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9),
    )  # fmt: skip


def main(strategies: list[str]) -> None:
    """Train under each strategy, and print the accuracy on images that were not trained on."""
    x, y = digits()
    for strategy in strategies or list(RATES):
        creator = partial(model, RATES[strategy])
        with Trainer(creator, num_workers=2, strategy=strategy) as trainer:
            print(f"{strategy}: workers {trainer.pids}", flush=True)
            trainer.fit(epochs=10)
            net = module()
            net.load_state_dict(trainer.state_dict())
        accuracy = (net(x[1500:]).argmax(1) == y[1500:]).float().mean()
        print(f"{strategy}: {accuracy:.1%} after {trainer.step} steps", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
