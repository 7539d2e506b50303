"""The `steepest` command: `steepest demo`, `steepest doctor`."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence

from steepest.errors import SteepestError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand of the command line, and return the exit status: 0 if it succeeded."""
    parser = argparse.ArgumentParser(prog="steepest", description="Distributed SGD on Ray.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train handwritten digits under every strategy")
    demo.add_argument("--epochs", type=int, default=8)
    demo.add_argument("--no-progress", action="store_true", help="no progress bar")
    commands.add_parser(
        "doctor", help="what Ray, torch and devices there are; one step in each strategy"
    )
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "demo":
            from steepest.cli.demo import run

            rows = run(chosen.epochs, progress=not chosen.no_progress)
            # Runs that make other updates vary.
            wanted = [0.95 if row.difference is not None else 0.9 for row in rows]
            return (
                0
                if all(row.accuracy >= least for row, least in zip(rows, wanted, strict=True))
                else 1
            )
        return doctor()
    except SteepestError as error:
        print(f"steepest: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def doctor() -> int:
    """Print what Ray, torch and devices there are, and train one step in each strategy.

    Returns:
        The exit status: 0 if every strategy works.
    """
    import numpy as np
    import torch

    from steepest import __version__
    from steepest.cluster.placement import describe_cluster, free_cpus, ray_session
    from steepest.config.strategies import STRATEGY_NAMES
    from steepest.models.numpy import NumpyLogisticRegression
    from steepest.trainer import DistributedSGD

    def model_creator(worker_index: int, device_index: int) -> NumpyLogisticRegression:
        return NumpyLogisticRegression((np.eye(8), np.arange(8) % 2), classes=2, batch_size=2)

    print(
        f"steepest {__version__}, Python {platform.python_version()} on {platform.system()} "
        f"{platform.machine()}"
    )
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{torch.cuda.device_count()} GPUs"
    )
    well = True
    with ray_session():
        print(describe_cluster())
        workers = max(1, min(2, free_cpus()))
        for strategy in STRATEGY_NAMES:
            try:
                with DistributedSGD(model_creator, num_workers=workers, strategy=strategy) as sgd:
                    result = sgd.step()
                print(f"  {strategy:<8} {workers} workers: one step, loss {result.loss:.4f}: works")
            except SteepestError as error:
                well = False
                print(f"  {strategy:<8} {workers} workers: {type(error).__name__}: {error}")
    print("all is well" if well else "something is wrong, see above")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
