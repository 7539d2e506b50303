"""The `steepest` command, with its subcommands, each in a module of its name or here.

`python -m steepest` is the same command.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec

from steepest import __version__
from steepest.cli import compare, completion, explain, launch, plan, report, run, watch
from steepest.config.run import cluster_address
from steepest.errors import SteepestError

_ENOUGH = 0.95  # accuracy, of the demo
_SECONDS = 15.0  # that the doctor takes
_LAST_SECONDS = 12.0  # after which it tries no further strategy: processes take time to end
_TRIED = ("allreduce", "local", "simple", "ps", "async", "ssp")  # servers start once, for the last
_FIRST = """\
first steps:
  steepest doctor                       does it work here? what Ray and torch find, in 15 seconds
  steepest demo                         train handwritten digits under every strategy
  steepest run train.py --workers 2     run a script of yours that calls steepest.prepare()
  steepest launch slurm --help          the same on a cluster: kubernetes, sagemaker, slurm, spark
  steepest compare train.py             the same script under each strategy, and which one to take
  steepest plan train.py                what more workers would bring it, before there are any
  steepest watch RUN                    the page of a run, in a browser, while it goes on
  steepest report RUN -o page.html      the page of a run that has kept checkpoints, as one file
  steepest explain trace.json           where a step's time goes, of `steepest run --timeline trace.json`
  steepest completion bash              print a script for tab completion

`steepest COMMAND --help` has the options of a command. README.md has a script to begin with.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="steepest",
        description="Distributed SGD on Ray.",
        epilog=_FIRST,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"steepest {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train handwritten digits under every strategy")
    demo.add_argument("--epochs", type=int, default=8)
    demo.add_argument("--no-progress", action="store_true", help="no progress bar")
    commands.add_parser(
        "doctor", help="what Ray, torch and devices there are; one step in each strategy"
    )
    compare.add_parser(commands)
    completion.add_parser(commands)
    explain.add_parser(commands)
    launch.add_parser(commands)
    plan.add_parser(commands)
    report.add_parser(commands)
    run.add_parser(commands)
    watch.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand of the command line, and return the exit status: 0 if it succeeded."""
    parser = make_parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = (
        given.index("--")
        if given[:1] in (["run"], ["compare"], ["plan"]) and "--" in given
        else len(given)
    )
    chosen = parser.parse_args(given[:end])
    try:
        if chosen.command == "demo":
            from steepest.cli.demo import run as run_demo

            rows = run_demo(chosen.epochs, progress=not chosen.no_progress)
            return 0 if all(row.accuracy >= _ENOUGH for row in rows) else 1
        if chosen.command == "completion":
            print(completion.script(parser), end="")
            return 0
        if chosen.command == "explain":
            return explain.run(chosen)
        if chosen.command == "compare":
            return compare.run(chosen, given[end + 1 :])
        if chosen.command == "launch":
            return launch.run(chosen)
        if chosen.command == "plan":
            return plan.run(chosen, given[end + 1 :])
        if chosen.command == "report":
            return report.run(chosen)
        if chosen.command == "watch":
            return watch.run(chosen)
        if chosen.command == "run":
            return run.run(chosen, given[end + 1 :])
        return doctor()
    except SteepestError as error:
        print(f"steepest: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def doctor() -> int:
    """Print what Ray, torch and devices there are, and train one step in each strategy.

    Each line is printed before what it announces is done. What is not done within `_SECONDS` is
    left out; then this process ends at once, and with it what it has started.

    Returns:
        The exit status: 0 if a strategy was tried, and none has failed.
    """
    checkup = _Checkup()
    late = threading.Timer(_SECONDS, checkup.give_up)
    late.daemon = True
    late.start()
    try:
        return checkup.run()
    finally:
        late.cancel()


class _Checkup:
    """What the doctor does, and how far it has come."""

    def __init__(self) -> None:
        self._say = _Stopwatch()
        self._untried = list(_TRIED)
        self._failed = False

    def run(self) -> int:
        """Do all; return the exit status."""
        say = self._say
        say("importing torch and Ray")
        import torch

        from steepest.runtime.connection import describe_cluster, free_cpus, ray_session

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
            self._try_strategies(1 if busy else max(1, min(2, free_cpus())))
            say("ending")
        return self._conclude()

    def _try_strategies(self, workers: int) -> None:
        """Take a step in each strategy, with the same processes."""
        import torch

        from steepest.config.run import FailureConfig, RunConfig
        from steepest.driver.trainer import DistributedSGD
        from steepest.embedding.torch_model import TorchModel

        def model_creator(worker_index: int, device_index: int) -> TorchModel:
            return TorchModel(
                torch.nn.Linear(8, 2),
                loss=torch.nn.functional.cross_entropy,
                data=(torch.eye(8), torch.arange(8) % 2),
                batch_size=2,
                optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
            )

        config = RunConfig(failure=FailureConfig(max_failures=0, spares=0, snapshot_every=0))
        # each change of strategy is news to a user of a trainer, but not here
        logging.getLogger("steepest").setLevel(logging.ERROR)
        sgd, shown = None, f"{workers} {'worker' if workers == 1 else 'workers'}"
        self._say(f"starting {shown}")
        try:
            while self._untried and self._say.seconds < _LAST_SECONDS:
                strategy = self._untried[0]
                try:
                    if sgd is None:
                        sgd = DistributedSGD(
                            model_creator, workers, strategy=strategy, run_config=config
                        )
                    else:
                        sgd.set_strategy(strategy)
                    loss = sgd.step().loss
                    self._say(f"  {strategy:<9} {shown}: one step, loss {loss:.4f}: works")
                except SteepestError as error:
                    self._failed = True
                    self._say(f"  {strategy:<9} {shown}: {type(error).__name__}: {error}")
                    if sgd is not None:
                        sgd.shutdown()
                        sgd = None
                self._untried.pop(0)
        finally:
            if sgd is not None:
                sgd.shutdown()

    def give_up(self) -> None:
        """Say what there was no time for, and end this process."""
        status = self._conclude()
        sys.stdout.flush()
        os._exit(status)  # Ray's processes end with this one

    def _conclude(self) -> int:
        """Say what was tried, and what not; return the exit status."""
        tried = len(self._untried) < len(_TRIED)
        well = tried and not self._failed
        if self._untried:
            self._say(f"no time for {', '.join(self._untried)}: {_SECONDS:g} s are all it takes")
        if self._failed:
            self._say("something is wrong, see above")
        elif tried:
            self._say("what was tried works: all is well")
            self._say(_next_step())
        else:
            self._say(
                "nothing was tried, so nothing is known: run it again when this machine is less busy"
            )
        return 0 if well else 1


def _next_step() -> str:
    """Return what a newcomer does after the doctor."""
    missing = "" if find_spec("sklearn") else "pip install 'steepest[demo]' and "
    return (
        f"next: {missing}steepest demo; then a script of your own by "
        "steepest run train.py --workers 2 (steepest run --help)"
    )


class _Stopwatch:
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
