"""A strategy of one's own: workers vote on the sign of each change, and send one bit for a number.

    python examples/own_strategy.py

It is signSGD with majority vote (Bernstein et al. 2019, arXiv:1810.05291): each worker pushes the signs of its
gradient's running mean, and each weight moves by the learning rate in the direction that most workers
want, or not at all in a tie. `fit`, checkpoints, deaths, `resize` and replays work as under every other
strategy. The same network is then trained with strategy="allreduce", on the same digits (scikit-learn's:
`pip install 'steepest[demo]'`): 90.8% are read rightly with a bit for a number, 91.1% with 32.
`docs/howto/own_strategy.md` explains each method.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit("needs scikit-learn: pip install 'steepest[demo]'") from error

from steepest import AllreduceStrategy, Codec, DistributedSGD, Strategy, TorchModel, accuracy

x, y = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
x = x.float() / 16
train, test = (x[:1437], y[:1437]), (x[1437:], y[1437:])
_BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


class Votes(Codec):
    """Eight signs in a byte: whether the running mean of the worker's gradient is negative."""

    lossy = True  # what `pack` leaves in `values`, the running mean, is there at the next gradient
    everywhere = True  # votes are the method, not a way to save bytes between hosts

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum

    def size(self, layout: Any, chunk: Any) -> int:
        return -(-chunk.nbytes // 4 // 8)

    def pack(self, layout: Any, chunk: Any, values: Tensor, out: Tensor, factors: Any) -> bool:
        negative = torch.zeros(8 * out.numel(), dtype=torch.uint8)
        negative[: values.numel()] = torch.signbit(values)
        torch.sum(negative.view(-1, 8) * _BITS, dim=1, dtype=torch.uint8, out=out)
        values.mul_(self.momentum)
        return True

    def add(self, layout: Any, chunk: Any, packed: Any, out: Tensor) -> None:
        for payload, _ in packed:
            negative = (payload[:, None] & _BITS).ne(0).view(-1)[: out.numel()]
            out.add_(1.0 - 2.0 * negative)

    def finish(self, layout: Any, chunk: Any, out: Tensor) -> None:
        out.sign_()  # the majority; 0 in a tie


@dataclass(frozen=True, kw_only=True)
class MajorityVote(AllreduceStrategy):
    """signSGD with majority vote: weights move by the learning rate, whatever the gradient's size."""

    name = "majority vote"
    momentum: float = 0.9

    @property
    def codec(self) -> Codec:
        return Votes(self.momentum)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train_with(
    strategy: str | Strategy, workers: int, epochs: int, lr: float, momentum: float = 0.0
) -> float:
    """Return the accuracy on the test digits after some epochs."""

    def model_creator(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            network(),
            loss=F.cross_entropy,
            data=train,
            batch_size=32,
            optimizer=lambda net: torch.optim.SGD(net.parameters(), lr, momentum),
            metrics={"accuracy": accuracy},
        )

    with DistributedSGD(model_creator, workers, strategy=strategy) as sgd:
        sgd.fit(epochs=epochs, progress=False)
        return float(sgd.evaluate(test).metrics["accuracy"])


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    """Train both ways, and return their accuracies on the test digits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2, help="an odd number knows no ties")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.002, help="how far a vote moves a weight")
    options = parser.parse_args(argv)

    own = train_with(MajorityVote(), options.workers, options.epochs, options.lr)
    print(f"majority vote, 1 bit for a number: test accuracy {own:.1%}")
    known = train_with("allreduce", options.workers, options.epochs, 0.1, momentum=0.9)
    print(f"allreduce, 32 bits for a number: test accuracy {known:.1%}")
    return own, known


if __name__ == "__main__":
    main()
