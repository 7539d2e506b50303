"""FedAvg's table of client fractions: rounds until a perceptron knows 97 % of MNIST's test digits.

    python -m benchmarks.federated                     # 10 of 100 clients in each round
    python -m benchmarks.federated --clients 10 20 50

McMahan et al. 2017 (arXiv:1602.05629), MNIST 2NN: two hidden layers of 200, 100 clients with 600 digits each, of which
some train for one pass (E=1) in batches of ten (B=10) from the servers' weights, whose mean the next round begins with.
That is `LocalStrategy` with ``sync_every=60`` and so many workers. Unlike the paper's clients, workers get other digits
in each round, each digit once in a pass over all; so this is the paper's column of clients that are alike (IID). The
learning rate is fixed; the paper chose the best for each entry of its table. The whole job runs in this process
(`steepest.testing`).
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.overhead import machine, positive
from steepest import LocalStrategy, TorchModel
from steepest.testing import InProcessCluster

sys.path.append(str(Path(__file__).parents[1] / "examples"))

PAPER = {1: 316, 10: 87, 20: 77, 50: 75, 100: 70}  # rounds, by clients in each
BATCH, BATCHES = 10, 60  # of a client in a round
WANTED = 0.97
MOST_ROUNDS = 500


def two_nn() -> nn.Sequential:
    """Return the paper's perceptron, of 199,210 parameters."""
    torch.manual_seed(0)
    layers = [nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def rounds_to(
    wanted: float,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    clients: int,
    rate: float,
) -> int | None:
    """Return after how many rounds that share of the test's digits is known; None for never."""

    def create(worker: int, device: int) -> TorchModel:
        return TorchModel(
            two_nn(),
            loss=F.cross_entropy,
            data=train,
            batch_size=BATCH,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=rate),
        )

    strategy = LocalStrategy(sync_every=BATCHES, num_servers=1)
    cluster = InProcessCluster(create, num_workers=clients, strategy=strategy)
    judge = two_nn()
    for number in range(1, MOST_ROUNDS + 1):
        cluster.step()
        judge.load_state_dict(cluster.weights())
        with torch.no_grad():
            right = (judge(test[0]).argmax(1) == test[1]).float().mean().item()
        if right >= wanted:
            return number
    return None


def main(arguments: list[str] | None = None) -> None:
    """Count rounds, and print them beside the paper's."""
    from data import DEVIATION, MEAN, load_mnist

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.federated", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--clients", type=positive, nargs="+", default=[10], help="in a round")
    parser.add_argument("--rate", type=float, nargs="+", default=[0.1], help="learning rates")
    parser.add_argument(
        "--normalised", action="store_true", help="pixels of mean 0 and deviation 1, not 0 to 1"
    )
    parser.add_argument("--data", type=Path, help="folder for MNIST's files")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    digits = load_mnist(options.data)
    train, test = (
        (torch.from_numpy(pixels), torch.from_numpy(classes))
        for pixels, classes in (digits.train, digits.test)
    )
    if not options.normalised:
        train, test = ((x * DEVIATION + MEAN, y) for x, y in (train, test))
    print(
        f"{machine()}\n{digits.source}, normalised: {options.normalised}\nclients  rate  rounds  paper",
        flush=True,
    )
    for clients in options.clients:
        for rate in options.rate:
            found = rounds_to(WANTED, train, test, clients, rate)
            paper = PAPER.get(clients, "")
            print(f"{clients:7} {rate:5g} {found or 'never':>7} {paper:>6}", flush=True)


if __name__ == "__main__":
    main()
