"""The time of one synchronous training step over its computation alone, with two workers.

    python -m benchmarks.overhead                        # everything, about six minutes
    python -m benchmarks.overhead --model convnet --rounds 3 --only ddp tutorial
    python -m benchmarks.overhead --strategies ps allreduce --json overhead.json

Workloads on random data held in memory: ``convnet``, 1,960 parameters at batch 128 and plain SGD, where the
cost of a message counts; ``mlp``, 25 million parameters at batch 8 and plain SGD, where the cost of moving
gradients counts; and ``mlp-adam``, the same with Adam, where the update counts too. All use torch's fused Adam.

Two baselines: two processes that compute next to each other and never communicate.

``free``            the computation alone: load a batch, zero_grad, forward, backward; no optimizer step
``free+sgd``        the same and the local optimizer step (``free+adam`` where that is Adam)

Contenders: the same computation as one synchronous step of two workers.

``ddp``             torch's DistributedDataParallel on Gloo over loopback, gradients as bucket views
``ddp kept``        the same with the C library told to keep freed memory, as steepest's workers do
``tutorial``        the design of Ray's parameter-server tutorial: one server actor, two worker actors,
                    and a driver that waits for the new weights once every step
``tutorial+numpy``  the same with its weights sent as numpy arrays, which Ray moves faster than tensors
``steepest NAME``   ``DistributedSGD(..., strategy=NAME)``; not measured when it cannot be imported

Every process has one torch thread. All contenders stay alive, blocked while idle, and take turns: a round
is one turn of ``--steps`` steps for each of them, and odd rounds run in reverse order. A ratio compares a
contender with a baseline, or with ``ddp``, in the same round, so that a slow spell of the machine strikes
both. Local processes are timed inside (the slower of the two counts); Ray contenders by the driver.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import argparse
import contextlib
import functools
import json
import platform
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch

from benchmarks.models import WORKLOADS, Workload
from benchmarks.rivals import DEADLINE, KEPT, WORKERS, Local, Steepest, Trainer, Tutorial

T = TypeVar("T")
DDP = "ddp"
Times = dict[str, list[float]]  # contender -> seconds per step, one entry a round


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)
    workloads = list(WORKLOADS.values()) if options.model == "all" else [WORKLOADS[options.model]]
    reports = []
    for workload in workloads:
        steps = options.steps or workload.steps
        contenders = choose(workload, options.strategies, options.only)
        with ray_started(contenders):
            times = measure(contenders, options.rounds, steps)
        reports.append(summarize(workload, steps, options.rounds, times))
        print(table(reports[-1]), flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine(), "reports": reports}, indent=2) + "\n"
        )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--rounds", type=positive, default=7)
    defaults = ", ".join(f"{w.steps} for {w.name}" for w in WORKLOADS.values())
    parser.add_argument("--steps", type=positive, help=f"steps of one turn (default: {defaults})")
    parser.add_argument("--strategies", nargs="+", default=["ps", "simple"], metavar="NAME")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PREFIX",
        help="contenders by the beginning of their name, next to the baselines: ddp, tutorial, steepest, ...",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every measurement to this file"
    )
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def baselines(workload: Workload) -> tuple[str, str]:
    return "free", f"free+{workload.optimizer.__name__}"


def choose(workload: Workload, strategies: list[str], only: list[str] | None) -> list[Trainer]:
    """The baselines, and the contenders whose name begins with one of ``only`` (all without it)."""
    contenders: list[Trainer] = [
        Local(name, workload) for name in (*baselines(workload), DDP, DDP + KEPT)
    ]
    contenders += [
        Tutorial("tutorial", workload),
        Tutorial("tutorial+numpy", workload, arrays=True),
    ]
    contenders += [Steepest(f"steepest {strategy}", workload, strategy) for strategy in strategies]
    prefixes = tuple(only) if only else ("",)
    return [c for c in contenders if c.name in baselines(workload) or c.name.startswith(prefixes)]


@contextlib.contextmanager
def ray_started(contenders: list[Trainer]) -> Iterator[None]:
    """Ray for the contenders that need it, unless it runs already; stopped again at the end.

    The contenders are alive together, though only one works at a time: Ray counts a CPU for each of
    their workers.
    """
    cpus = sum(c.workers for c in contenders if isinstance(c, Tutorial | Steepest))
    if not cpus or ray.is_initialized():
        yield
        return
    with deadline("ray.init"):
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def measure(contenders: list[Trainer], rounds: int, steps: int) -> Times:
    with contextlib.ExitStack() as stack:
        alive = [c for c in contenders if started(c, stack)]
        for contender in alive:
            turn(contender, max(2, steps // 5))
        return alternate({c.name: functools.partial(turn, c, steps) for c in alive}, rounds)


def alternate(turns: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """A turn of each contender in each round, odd rounds in reverse order; what each turn gave."""
    times: dict[str, list[T]] = {name: [] for name in turns}
    for number in range(rounds):
        for name in turns if number % 2 == 0 else reversed(turns):
            times[name].append(turns[name]())
        progress(f"round {number + 1} of {rounds}: {', '.join(turns)}")
    return times


def started(contender: Trainer, stack: contextlib.ExitStack) -> bool:
    """Start a contender; False, with a note, when it is a steepest that cannot be imported."""
    try:
        with deadline(contender.name):
            stack.enter_context(contender)
    except ImportError as error:
        if not isinstance(contender, Steepest):
            raise
        progress(f"{contender.name}: not measured ({error})")
        return False
    return True


def turn(contender: Trainer, steps: int) -> float:
    with deadline(contender.name):
        return contender.run(steps)


@contextlib.contextmanager
def deadline(what: str) -> Iterator[None]:
    """Raise TimeoutError in the main thread when the block takes longer than the contenders may wait."""

    def expire(number: int, frame: object) -> None:
        raise TimeoutError(f"{what}: more than {2 * DEADLINE:g} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(
        signal.ITIMER_REAL, 2 * DEADLINE
    )  # a contender's own deadline says more: it goes first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def summarize(workload: Workload, steps: int, rounds: int, times: Times) -> dict[str, Any]:
    """The measurements of one workload, ready for JSON."""
    others = [name for name in (*baselines(workload), DDP) if name in times]
    return {
        "model": workload.name,
        "parameters": workload.parameters(),
        "batch_size": workload.batch_size,
        "workers": WORKERS,
        "rounds": rounds,
        "steps": steps,
        "contenders": compare(times, others),
    }


def compare(times: Times, others: list[str]) -> list[dict[str, Any]]:
    """Each contender's time, and its ratios to some of them."""
    return [
        {
            "name": name,
            "ms_per_step": 1000 * statistics.median(seconds),
            "over": {other: ratios(seconds, times[other]) for other in others},
            "seconds_per_step": seconds,
        }
        for name, seconds in times.items()
    ]


def ratios(seconds: list[float], others: list[float]) -> dict[str, float]:
    """Median, least and greatest ratio to the other's seconds in the same round."""
    values = [mine / other for mine, other in zip(seconds, others, strict=True)]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(report: dict[str, Any]) -> str:
    title = (
        f"{report['model']}: {report['parameters']:,} parameters, batch {report['batch_size']}, "
        f"{report['workers']} workers, median of {report['rounds']} rounds of {report['steps']} "
        "steps"
    )
    return comparison(title, report["contenders"])


def comparison(
    title: str, rows: list[dict[str, Any]], goals: Mapping[str, str] | None = None
) -> str:
    """The table of what `compare` returns; `goals` say for some contenders what is wanted."""
    width = 2 + max(len(row["name"]) for row in rows)
    heads = "".join(
        f"{'over ' + other:>{ratio_width(other)}}{'min..max':>14}" for other in rows[0]["over"]
    )
    lines = ["", title, f"{'':{width}}{'ms/step':>9}{heads}" + ("  wanted" if goals else "")]
    for row in rows:
        cells = "".join(
            f"{ratio['median']:{ratio_width(other)}.2f}{ratio['min']:8.2f}..{ratio['max']:.2f}"
            for other, ratio in row["over"].items()
        )
        wanted = f"  {goals.get(row['name'], '')}" if goals else ""
        lines.append(f"{row['name']:{width}}{row['ms_per_step']:9.2f}{cells}{wanted}".rstrip())
    return "\n".join(lines)


def ratio_width(other: str) -> int:
    return max(12, len(other) + 7)


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": ray.__version__,
    }


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
