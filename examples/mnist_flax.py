"""A Flax network learns handwritten digits to 98% on two workers, one of which is killed on the way.

    python examples/mnist_flax.py                          # by a synchronous parameter server
    python examples/mnist_flax.py --strategy allreduce     # or async, ssp, local, simple
    python examples/mnist_flax.py --kill 0                 # nobody is killed

Needs `pip install 'steepest[jax]'`. MNIST is read from `--data FOLDER`, and downloaded into it if need be (11 MB);
without a folder and without the environment variable STEEPEST_DATA, scikit-learn's small digits are used.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data import Arrays, load_mnist

from steepest import Callback, DistributedSGD, JaxModel, StepResult  # says what to install

# isort: split
import jax
import optax
from flax import linen

BATCH = 64  # samples for each worker and step


class Network(linen.Module):
    """Two hidden layers."""

    @linen.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = x.reshape(len(x), -1)
        x = linen.relu(linen.Dense(256)(x))
        x = linen.Dropout(0.1, deterministic=not train)(x)
        x = linen.relu(linen.Dense(128)(x))
        return linen.Dense(10)(x)


def model_creator(train: Arrays, rate: float, decay_steps: int) -> Callable[[int, int], JaxModel]:
    """Return the function that each worker calls once; the images travel with it."""

    def create(worker_index: int, device_index: int) -> JaxModel:
        module = Network()
        return JaxModel.from_flax(
            module,
            module.init(jax.random.key(0), jax.numpy.zeros((1, 784)), train=False),
            loss=lambda *pair: optax.softmax_cross_entropy_with_integer_labels(*pair).mean(),
            metrics={"accuracy": lambda logits, labels: (logits.argmax(axis=1) == labels).mean()},
            optimizer=optax.adam(optax.cosine_decay_schedule(rate, decay_steps, alpha=0.05)),
            data=train,
            batch_size=BATCH,
        )

    return create


class Kill(Callback):
    """Kills a process after some step, once: the step may be taken again."""

    def __init__(self, step: int, pid: int) -> None:
        self.step, self.victims = step, [pid]

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        if result.step == self.step and self.victims:
            os.kill(self.victims.pop(), signal.SIGKILL)


def main(argv: Sequence[str] | None = None) -> float:
    """Train, print the accuracy after each epoch, and return the last one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--strategy", default="ps")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--kill", type=int, default=300, help="step after which a worker is killed")
    parser.add_argument("--data", type=Path, help="folder for MNIST's four files")
    options = parser.parse_args(argv)
    digits = load_mnist(options.data)
    updates = options.epochs * (len(digits.train[0]) // (2 * BATCH) + 1)
    if options.strategy in ("async", "ssp"):
        updates *= 2  # each worker's gradient is one
    creator = model_creator(digits.train, 0.001, updates)
    with DistributedSGD(creator, num_workers=2, strategy=options.strategy) as sgd:
        killing = Kill(options.kill, sgd.foreach_worker(lambda worker: worker.pid)[1])
        seen = 0.0
        for epoch in range(1, options.epochs + 1):
            sgd.fit(epochs=1, callbacks=[killing], progress=False)
            seen = sgd.evaluate(digits.test).metrics["accuracy"]
            print(f"epoch {epoch}: test accuracy {seen:.1%}", flush=True)
        print(f"{options.strategy} on {digits.source}: {sgd.stats().replaced} workers replaced")
    return seen


if __name__ == "__main__":
    main()
