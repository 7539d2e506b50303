"""What local SGD's settings for slow links cost in loss: a character transformer on Tiny Shakespeare.

    python -m benchmarks.slow_link_losses
    python -m benchmarks.slow_link_losses --iterations 500 --only synchronous int4

The model of ``examples/character_transformer.py`` on ``--workers`` workers with ``--batch`` blocks each. All contenders
take the same samples, of which the first ``--warm-up`` share under the synchronous strategy, as DiLoCo begins with
weights that were trained before (Douillard et al. 2023). Then they go on by themselves, with DiLoCo's outer optimizer:
a learning rate of 0.7 and Nesterov's momentum of 0.9. What is printed is the loss over the last tenth of the text.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import Any

from torch.nn import functional as F

from benchmarks.overhead import machine, positive
from benchmarks.parameter_server_rivals import ray_started
from steepest import AllreduceStrategy, DistributedSGD, LocalStrategy, TorchModel
from steepest.core.strategies.strategy import Strategy

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.append(str(EXAMPLES))
os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(EXAMPLES)])

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
    }


def create(text: Any, options: argparse.Namespace, worker: int, device: int) -> TorchModel:
    """Return the model of a worker."""
    import torch
    from character_transformer import CONTEXT, Transformer, learning_rate, optimizer
    from text import blocks

    torch.set_num_threads(1)
    return TorchModel(
        Transformer(len(text.alphabet)),
        loss=F.cross_entropy,
        data=blocks(text.train, CONTEXT),
        batch_size=options.batch,
        optimizer=optimizer,
        learning_rate=functools.partial(learning_rate, steps=options.iterations),
    )


def measure(strategy: Strategy | None, text: Any, options: argparse.Namespace) -> float:
    """Train a contender, and return its loss on what it has not seen."""
    from character_transformer import CONTEXT
    from text import blocks

    held_out = blocks(text.validation, CONTEXT, stride=CONTEXT)
    creator = functools.partial(create, text, options)
    warm = round(options.iterations * options.warm_up) // options.sync_every * options.sync_every
    with DistributedSGD(creator, options.workers, strategy=SYNCHRONOUS) as sgd:
        sgd.fit(steps=warm, progress=False)
        left = options.iterations - warm
        if strategy is not None:
            sgd.set_strategy(strategy)
            left //= strategy.updates
        sgd.fit(steps=left, progress=False)
        return sgd.evaluate(held_out).loss


def main(arguments: list[str] | None = None) -> None:
    """Measure contenders one after the other, and print a line for each."""
    from text import load_text

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
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--data", type=Path, help="folder for Tiny Shakespeare's input.txt")
    options = parser.parse_args(arguments)
    text = load_text(options.data)
    print(f"{machine()}\n{text.source}; {options}", flush=True)
    print(f"{'':20}{'loss':>8}{'over synchronous':>18}{'seconds':>9}", flush=True)
    reference: float | None = None
    with ray_started(options.workers):
        for name, strategy in contenders(options.sync_every, options.delay).items():
            if name not in options.only:
                continue
            begin = time.perf_counter()
            loss = measure(strategy, text, options)
            reference = loss if name == "synchronous" else reference
            over = f"{loss / reference - 1:+18.2%}" if reference else " " * 18
            print(f"{name:20}{loss:8.4f}{over}{time.perf_counter() - begin:9.0f}", flush=True)


if __name__ == "__main__":
    main()
