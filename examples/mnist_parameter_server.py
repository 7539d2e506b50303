"""A small network learns handwritten digits on two workers, by a parameter server.

    python examples/mnist_parameter_server.py                  # every step waits for all workers
    python examples/mnist_parameter_server.py --mode async     # each worker at its own pace
    python examples/mnist_parameter_server.py --mode ssp       # likewise, but never more than 3 steps ahead

After 200 iterations 83% of the test images are read rightly; asynchronously, with twice as many updates, about 86%.

MNIST is read from `--data FOLDER`, and downloaded into it if need be (11 MB); without a folder and without
the environment variable STEEPEST_DATA, scikit-learn's small digits are used.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from data import Arrays, load_mnist
from torch import nn
from torch.nn import functional as F

from steepest import DistributedSGD, ParameterServerStrategy, TorchModel, accuracy

BATCH = 128  # samples for each worker and step
EVERY = 10  # iterations between two looks at the accuracy


class ConvNet(nn.Module):
    """One convolution and one fully connected layer: 1,960 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 3, kernel_size=3)
        self.connected = nn.Linear(192, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.convolution(x), 3))
        return F.log_softmax(self.connected(x.flatten(1)), dim=1)


def model_creator(train: Arrays, learning_rate: float) -> Callable[[int, int], TorchModel]:
    """Returns the function that each worker calls once; the images travel with it."""

    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            ConvNet(),
            loss=F.nll_loss,
            data=train,
            batch_size=BATCH,
            optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=learning_rate),
            metrics={"accuracy": accuracy},
        )

    return create


def main(argv: Sequence[str] | None = None) -> float:
    """Trains, prints the accuracy on the way, and returns the last one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=("sync", "async", "ssp"), default="sync")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=200, help="steps of every worker")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate")
    parser.add_argument("--data", type=Path, help="folder for MNIST's four files")
    options = parser.parse_args(argv)

    digits = load_mnist(options.data)
    print(
        f"{digits.source}: {len(digits.train[0]):,} images to train with, {len(digits.test[0]):,} "
        "to test"
    )
    some = slice(None, None, max(len(digits.test[0]) // 1000, 1))  # about a thousand test images do
    test = (digits.test[0][some], digits.test[1][some])
    seen = 0.0

    with DistributedSGD(
        model_creator(digits.train, options.lr),
        num_workers=options.workers,
        strategy=ParameterServerStrategy(mode=options.mode),
    ) as sgd:
        for done in range(0, options.iterations, EVERY):
            result = sgd.fit(steps=min(EVERY, options.iterations - done), progress=False)
            seen = sgd.evaluate(test).metrics["accuracy"]
            print(f"iteration {result.step:4}: test accuracy {seen:.1%}", flush=True)
        stats = sgd.stats()

    stale = stats.staleness
    print(f"staleness, in updates: p50 {stale.p50}, p95 {stale.p95}, max {stale.max}")
    print(f"{stats.version} updates, {stats.samples_per_second:,.0f} samples/s while training")
    return seen


if __name__ == "__main__":
    main()
