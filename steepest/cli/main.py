"""The `steepest` command: `steepest demo`, `steepest doctor`."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import time
from collections.abc import Sequence

from steepest.config.run import cluster_address
from steepest.errors import SteepestError

_ENOUGH = 0.95  # accuracy, of the demo
_SECONDS = 12.0  # after which the doctor tries no further strategy
_LEAST_SECONDS = 8.0  # that workers have to start, however late it is
_TRIED = ("allreduce", "local", "simple", "ps", "async", "ssp")  # servers start once, for the last


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
            return 0 if all(row.accuracy >= _ENOUGH for row in rows) else 1
        return doctor()
    except SteepestError as error:
        print(f"steepest: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def doctor() -> int:
    """Print what Ray, torch and devices there are, and train one step in each strategy.

    Each line is printed before what it announces is done. The first strategy is always tried;
    others that are not reached within `_SECONDS` are left out.

    Returns:
        The exit status: 0 if every strategy that was tried works.
    """
    say = _Clock()
    say("importing torch and Ray")
    import torch

    from steepest import __version__
    from steepest.cluster.placement import describe_cluster, free_cpus, ray_session

    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    say(f"steepest {__version__}, Python {platform.python_version()} on {machine}")
    say(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{torch.cuda.device_count()} GPUs"
    )
    say("connecting to Ray" if cluster_address() else "starting Ray")
    with ray_session():
        say(describe_cluster())
        load, processors = os.getloadavg()[0], os.cpu_count() or 1
        busy = load > processors
        if busy:
            say(f"this machine is busy (load {load:.1f}): one worker instead of two")
        well = _try_strategies(say, 1 if busy else max(1, min(2, free_cpus())))
        say("ending")
    say("what was tried works: all is well" if well else "something is wrong, see above")
    return 0 if well else 1


def _try_strategies(say: _Clock, workers: int) -> bool:
    """Take a step in each strategy, with the same processes; return whether all work."""
    import numpy as np

    from steepest.config.run import DeadlineConfig, FailureConfig, RunConfig
    from steepest.models.numpy import NumpyLogisticRegression
    from steepest.trainer import DistributedSGD

    def model_creator(worker_index: int, device_index: int) -> NumpyLogisticRegression:
        return NumpyLogisticRegression((np.eye(8), np.arange(8) % 2), classes=2, batch_size=2)

    limit = max(_SECONDS - say.seconds, _LEAST_SECONDS)
    run_config = RunConfig(
        failure=FailureConfig(max_failures=0, spares=0, snapshot_every=0),
        deadlines=DeadlineConfig(start=limit / 5, step=limit, call=limit),  # all starts within 5
    )
    # each change of strategy is news to a user of a trainer, but not here
    logging.getLogger("steepest").setLevel(logging.ERROR)
    well, sgd = True, None
    say(f"starting {workers} {_noun(workers)}, within {limit:.0f} s")
    try:
        for number, strategy in enumerate(_TRIED):
            if number > 0 and say.seconds > _SECONDS:
                say(f"  {', '.join(_TRIED[number:])}: not tried, {_SECONDS:g} s are over")
                break
            try:
                if sgd is None:
                    sgd = DistributedSGD(
                        model_creator, workers, strategy=strategy, run_config=run_config
                    )
                else:
                    sgd.set_strategy(strategy)
                result = sgd.step()
                say(
                    f"  {strategy:<9} {workers} {_noun(workers)}: one step, loss {result.loss:.4f}: works"
                )
            except SteepestError as error:
                well = False
                say(f"  {strategy:<9} {workers} {_noun(workers)}: {type(error).__name__}: {error}")
                if sgd is not None:
                    sgd.shutdown()
                    sgd = None
    finally:
        if sgd is not None:
            sgd.shutdown()
    return well


def _noun(workers: int) -> str:
    return "worker" if workers == 1 else "workers"


class _Clock:
    """Prints lines, each with the seconds that have passed."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def __call__(self, line: str) -> None:
        print(f"{self.seconds:5.1f} s  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
