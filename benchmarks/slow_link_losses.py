"""What local SGD's settings for slow links cost in loss: a character transformer on Tiny Shakespeare.

    python -m benchmarks.slow_link_losses
    python -m benchmarks.slow_link_losses --iterations 500 --only synchronous int4

The model of ``examples/character_transformer.py`` on ``--workers`` workers with ``--batch`` blocks each. All contenders
take equally many samples, of which the first ``--warm-up`` share is under the synchronous strategy, as DiLoCo begins
with weights that were trained before (Douillard et al. 2023). From its weights local SGD goes on with fresh optimizers,
and with DiLoCo's outer one: a learning rate of 0.7 and Nesterov's momentum of 0.9. The loss is that over the last tenth
of the text. A whole job runs in one thread (`steepest.testing`): links do not matter for losses.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.overhead import machine, positive
from steepest import AllreduceStrategy, LocalStrategy, TorchModel
from steepest.core.messages.driver import Result
from steepest.core.strategies.strategy import Strategy
from steepest.testing import InProcessCluster

sys.path.append(str(Path(__file__).parents[1] / "examples"))

Weights = dict[str, torch.Tensor]
SYNCHRONOUS = AllreduceStrategy(clip_norm=1.0)


def contenders(every: int, delay: int) -> dict[str, Strategy | None]:
    """Return what goes on after the warm-up, by name; None goes on as before."""
    outer: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}
    local = functools.partial(LocalStrategy, sync_every=every, clip_norm=1.0, **outer)
    return {
        "synchronous": None,
        "local": local(),
        "fragments, delay": local(fragments=4, delay=delay),
        "int4": local(fragments=4, delay=delay, compression="int4"),
        "quorum": local(num_servers=1, quorum=1, delayed_nesterov=2, nesterov=False),
    }


class Task:
    """The text, and what a job does with it."""

    def __init__(self, text: Any, options: argparse.Namespace) -> None:
        from text import blocks

        context = options.context
        self._letters, self._options = len(text.alphabet), options
        self._train = blocks(text.train, context)
        self._held_out = blocks(text.validation, context, stride=context)

    def network(self, weights: Weights | None) -> nn.Module:
        """Return the model, with its first weights or these."""
        from character_transformer import Transformer

        torch.manual_seed(self._options.seed)
        network = Transformer(self._letters, self._options.layers, self._options.width)
        if weights is not None:
            network.load_state_dict(weights)
        return network

    def train(self, strategy: Strategy, begin: int, end: int, weights: Weights | None) -> Weights:
        """Train from one iteration to another, and return the servers' weights.

        Args:
            weights: to begin with; None for the model's own.
        """
        from character_transformer import learning_rate, optimizer

        def create(worker: int, device: int) -> TorchModel:
            return TorchModel(
                self.network(weights),
                loss=F.cross_entropy,
                data=self._train,
                batch_size=self._options.batch,
                optimizer=optimizer,
                learning_rate=lambda step: learning_rate(step + begin, self._options.iterations),
            )

        seed = self._options.seed + begin  # other samples than those of another part
        workers = self._options.workers
        cluster = InProcessCluster(create, num_workers=workers, strategy=strategy, seed=seed)
        steps = (end - begin) // strategy.updates
        if len(found := cluster.step(steps)) < steps or not isinstance(found[-1], Result):
            raise RuntimeError(f"a step failed: {found[-1]}")
        return cluster.weights()

    def loss(self, weights: Weights) -> float:
        """Return the mean loss on what nobody has trained with."""
        network, (x, y) = self.network(weights), self._held_out
        with torch.no_grad():
            parts = zip(x.split(64), y.split(64), strict=True)
            sums = [F.cross_entropy(network(x), y).item() * len(x) for x, y in parts]
        return sum(sums) / len(x)


def main(arguments: list[str] | None = None) -> None:
    """Measure contenders one after the other, and print a line for each."""
    from text import load_text

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slow_link_losses", description=__doc__.split("\n")[0]
    )
    names = list(contenders(100, 20))
    parser.add_argument("--iterations", type=positive, default=2000)
    parser.add_argument("--warm-up", type=float, default=0.25, help="share of the iterations")
    parser.add_argument("--workers", type=positive, default=2)
    parser.add_argument("--batch", type=positive, default=6, help="blocks of each worker")
    parser.add_argument("--sync-every", type=positive, default=100)
    parser.add_argument("--delay", type=positive, default=20)
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--width", type=positive, default=128)
    parser.add_argument("--context", type=positive, default=64, help="64 characters at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--data", type=Path, help="folder for Tiny Shakespeare's input.txt")
    options = parser.parse_args(arguments)
    text = load_text(options.data)
    print(f"{machine()}\n{text.source}; {options}", flush=True)
    print(f"{'':20}{'loss':>8}{'over synchronous':>18}{'seconds':>9}", flush=True)
    reference: float | None = None
    task, whole = Task(text, options), options.iterations
    warm = round(whole * options.warm_up) // options.sync_every * options.sync_every
    warmed = task.train(SYNCHRONOUS, 0, warm, None)
    for name, strategy in contenders(options.sync_every, options.delay).items():
        if name not in options.only:
            continue
        began = time.perf_counter()
        loss = task.loss(
            task.train(SYNCHRONOUS, 0, whole, None)
            if strategy is None
            else task.train(strategy, warm, whole, warmed)
        )
        reference = loss if name == "synchronous" else reference
        over = f"{loss / reference - 1:+18.2%}" if reference else " " * 18
        print(f"{name:20}{loss:8.4f}{over}{time.perf_counter() - began:9.0f}", flush=True)


if __name__ == "__main__":
    main()
