"""Logistic regression on a9a comes to its optimum, by synchronous steps of two workers.

    python examples/a9a_logistic_regression.py --steps 600

Each step covers all the data, half of them on each worker. After 600 steps the loss is 1.5e-7 above
the optimum.

a9a (who of 32,561 people earns over 50,000 dollars, by 123 attributes of 0 or 1) is read from
`--data FOLDER`, downloaded into it if need be (2 MB), or read from the folder that STEEPEST_DATA
names. Without either, scikit-learn's 569 tumours take its place (`pip install 'steepest[demo]'`), whose loss
is harder to minimize: 600 steps leave 1.4e-4.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from download import read
from torch.nn import functional as F

from steepest import DistributedSGD, TorchModel

DECAY = 1e-4  # the loss is the mean of log(1 + exp(-y w.x)), plus DECAY / 2 * |w|^2
COMMIT = "0abd2e16afeea63f53ff249f4e0ad15a8e5d663c"
URL = f"https://raw.githubusercontent.com/dtera/fl_xgboost/{COMMIT}/data/a9a"
SHA256 = "7ba53cccb27e2e525f0fb173e1f446d49856e3fb007eb43be4ec6d0f5b3335ca"


class Data(NamedTuple):
    """Features (n, d) and labels (n,) of -1 and 1, in float64, and the least possible loss."""

    source: str
    x: torch.Tensor
    y: torch.Tensor
    optimum: float


def load(folder: Path | None = None) -> Data:
    """Return a9a, or scikit-learn's tumours, each feature with mean 0 and deviation 1."""
    content = read("a9a/a9a", URL, SHA256, folder)
    if content is None:
        try:
            from sklearn.datasets import load_breast_cancer
        except ImportError as error:
            raise SystemExit("needs scikit-learn: pip install 'steepest[demo]'") from error

        x, y = (torch.as_tensor(a).double() for a in load_breast_cancer(return_X_y=True))
        x = (x - x.mean(dim=0)) / x.std(dim=0)
        return Data("tumours", x, 2 * y - 1, optimum=0.043455608787)
    lines = [line.split() for line in content.splitlines()]  # a label, then number:1 of each 1
    x = torch.zeros(len(lines), 123, dtype=torch.float64)
    for row, (_, *ones) in zip(x, lines, strict=True):
        row[[int(one.split(b":")[0]) - 1 for one in ones]] = 1
    y = torch.tensor([float(label) for label, *_ in lines], dtype=torch.float64)
    return Data("a9a", x, y, optimum=0.324506924714)


class LogisticRegression(TorchModel):
    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        x, y = batch
        return {
            "logistic": F.softplus(-y * self.module(x).squeeze(dim=1)).mean(),
            "penalty": DECAY / 2 * self.module.weight.square().sum(),
        }


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and return by how much the loss exceeds the optimum."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", type=Path, help="folder for the file a9a")
    options = parser.parse_args(argv)
    source, x, y, optimum = load(options.data)
    curvature = torch.linalg.eigvalsh(x.T @ x / len(x))[-1] / 4 + DECAY  # at most

    def create(worker_index: int, device_index: int) -> TorchModel:
        return LogisticRegression(
            torch.nn.Linear(x.shape[1], 1, bias=False, dtype=torch.float64),
            data=(x, y),
            batch_size=len(x),
            optimizer=lambda module: torch.optim.SGD(
                module.parameters(), lr=1 / float(curvature), momentum=0.98, nesterov=True
            ),
        )

    with DistributedSGD(create, options.workers, global_batch_size=len(x)) as sgd:
        sgd.fit(steps=options.steps)
        reached = sgd.evaluate((x, y)).loss
    print(f"{source}: loss {reached:.9f}, which is {reached - optimum:.1e} above the optimum")
    return reached - optimum


if __name__ == "__main__":
    main()
