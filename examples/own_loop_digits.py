"""Handwritten digits, by a script that keeps its loop: with one process, or many.

    python examples/own_loop_digits.py                          # one process, plain PyTorch
    python examples/own_loop_digits.py --workers 2              # the same function on two workers
    steepest run examples/own_loop_digits.py --workers 2        # the same script by the command

Five lines of it are steepest's. Evaluation in the loop is each worker's own, on all of the test digits. After 10 epochs
92% of these are read rightly, with one process or two workers. Needs `pip install 'steepest[demo]'`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit("needs scikit-learn: pip install 'steepest[demo]'") from error

import steepest


def train(epochs: int) -> float:
    """Train a perceptron; return its accuracy on digits that it has not seen."""
    x, y = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    x = x.float() / 16
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=32, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    model, optimizer, scheduler, loader = steepest.prepare(model, optimizer, scheduler, loader)
    accuracy = 0.0
    for epoch in steepest.epochs(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        scheduler.step()
        with torch.no_grad():
            accuracy = (model(x[1500:]).argmax(dim=1) == y[1500:]).float().mean().item()
        steepest.report(loss=loss, accuracy=accuracy)
        if steepest.rank() == 0:
            print(f"epoch {epoch}: test accuracy {accuracy:.1%}")
    return accuracy


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=0, help="0 for none: the script by itself")
    parser.add_argument("--strategy", default="ps")
    chosen = parser.parse_args(arguments)
    torch.manual_seed(0)
    function = functools.partial(train, chosen.epochs)
    if chosen.workers == 0:
        return function()
    result = steepest.run(function, num_workers=chosen.workers, strategy=chosen.strategy)
    return result.metrics["accuracy"]


if __name__ == "__main__":
    main()
