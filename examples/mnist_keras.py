"""A Keras model learns handwritten digits on two workers; one of them is killed on the way.

    python examples/mnist_keras.py                          # a parameter server; over 97% after three epochs
    python examples/mnist_keras.py --strategy allreduce     # or async, ssp, local, simple
    python examples/mnist_keras.py --no-kill

MNIST is read as by `examples/mnist_parameter_server.py`, and has the same substitute. Needs
`pip install 'steepest[tensorflow]'`.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data import Arrays, load_mnist

from steepest import Callback, DistributedSGD, StepResult, TensorFlowModel

if find_spec("keras") is None or find_spec("tensorflow") is None:
    raise SystemExit("needs Keras and TensorFlow: pip install 'steepest[tensorflow]'")

BATCH = 64  # samples for each worker and step
STRATEGIES = ("ps", "allreduce", "async", "ssp", "local", "simple")


def model_creator(train: Arrays, learning_rate: float) -> Callable[[int, int], TensorFlowModel]:
    """Return the function that each worker calls once; the images travel with it."""

    def create(worker_index: int, device_index: int) -> TensorFlowModel:
        import keras  # in workers alone

        model = keras.Sequential(
            [
                keras.Input((1, 28, 28)),
                keras.layers.Flatten(),
                keras.layers.Dense(256, "relu"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.Adam(learning_rate),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return TensorFlowModel(model, data=train, batch_size=BATCH)

    return create


class Kill(Callback):
    """Kills a process after some steps."""

    def __init__(self, pid: int, step: int) -> None:
        self.pid, self.step = pid, step

    def on_step(self, sgd: Any, result: StepResult) -> None:
        if result.step == self.step and self.pid:  # a step may be taken again
            print(f"step {self.step}: kill process {self.pid}", flush=True)
            os.kill(self.pid, signal.SIGKILL)
            self.pid = 0


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and return the accuracy on the test images."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", choices=STRATEGIES, default="ps")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate")
    parser.add_argument("--no-kill", action="store_true", help="let all workers live")
    parser.add_argument("--data", type=Path, help="folder for MNIST's four files")
    options = parser.parse_args(argv)

    digits = load_mnist(options.data)
    steps = len(digits.train[0]) // (BATCH * options.workers)
    print(f"{digits.source}: {len(digits.train[0]):,} images to train with")
    with DistributedSGD(
        model_creator(digits.train, options.lr),
        num_workers=options.workers,
        strategy=options.strategy,
    ) as sgd:
        pid = sgd.foreach_worker(lambda view: view.pid)[-1]
        killers = [] if options.no_kill else [Kill(pid, steps // 2)]
        sgd.fit(epochs=options.epochs, callbacks=killers, progress=False)
        found = sgd.evaluate(digits.test)
        events = ", ".join(event.kind for event in sgd.stats().events)
    accuracy = found.metrics["accuracy"]
    print(f"test accuracy {accuracy:.2%}, loss {found.loss:.4f}; events: {events or 'none'}")
    return accuracy


if __name__ == "__main__":
    main()
