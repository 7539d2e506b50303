"""The command `steepest doctor`: what Ray, torch and devices there are, and whether a step works in each strategy."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from steepest import __version__
from steepest.errors import SteepestError

_SECONDS = 15.0  # that the doctor takes
_LAST_SECONDS = 12.0  # after which it tries no further strategy: processes take time to end
_TRIED = ("allreduce", "local", "simple", "ps", "async", "ssp")  # servers start once, for the last


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "doctor", help="what Ray, torch and devices there are; one step in each strategy"
    )
    parser.set_defaults(call=lambda _: doctor())


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
    """The checks of the doctor, and their progress."""

    def __init__(self) -> None:
        self._say = _Stopwatch()
        self._doing = ""  # what was announced last and is not done yet
        self._untried = list(_TRIED)
        self._failed = False

    def run(self) -> int:
        """Run all checks; return the exit status."""
        say = self._say
        # what can be said without imports, which may take all the time on a busy machine
        machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"
        say(f"steepest {__version__}, Python {platform.python_version()} on {machine}")
        self._begin(f"importing torch {_installed('torch')} and Ray {_installed('ray')}")
        import torch

        from steepest.cli.begin import begun
        from steepest.runtime.job_runtime import chosen

        say(
            f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
            f"{torch.cuda.device_count()} GPUs"
        )
        on_ray = chosen("auto") == "ray"
        self._begin("connecting to Ray" if on_ray else "starting processes of this machine")
        with begun("auto"):
            workers = self._look_at_ray() if on_ray else 2
            load, busy = _load()
            if busy:
                say(f"this machine is busy (load {load:.1f}): one worker instead of two")
            self._try_strategies(1 if busy else workers)
            say("ending")
        return self._conclude()

    def _look_at_ray(self) -> int:
        """Describe the Ray cluster that RAY_ADDRESS names; return how many workers are tried there."""
        from steepest.runtime.connection import describe_cluster, free_cpus

        self._say(describe_cluster())
        return max(1, min(2, free_cpus()))

    def _try_strategies(self, workers: int) -> None:
        """Take a step in each strategy, with the same processes."""
        import torch

        from steepest.core.config.run import FailureConfig, RunConfig
        from steepest.runtime.driver.trainer import DistributedSGD
        from steepest.tables.modules.torch_model import TorchModel

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
        self._begin(f"starting {shown}")
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

    def _begin(self, what: str) -> None:
        """Announce the next check."""
        self._doing = what
        self._say(what)

    def give_up(self) -> None:
        """Print what there was no time for, and end this process."""
        status = self._conclude()
        sys.stdout.flush()
        os._exit(status)  # its processes end with this one

    def _conclude(self) -> int:
        """Print what was tried, and what was not; return the exit status."""
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
            load, busy = _load()
            self._say(
                f"no strategy was tried; {self._doing} took too long"
                + (
                    f" on a busy machine (load {load:.1f}): run it again when that is less"
                    if busy
                    else ""
                )
            )
        return 0 if well else 1


def _installed(name: str) -> str:
    """Return the version of an installed package, without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def _load() -> tuple[float, bool]:
    """Return how many processes want to run on this machine, and whether they exceed its processors."""
    load = os.getloadavg()[0]
    return load, load > (os.cpu_count() or 1)


def _next_step() -> str:
    """Return a newcomer's next command after the doctor."""
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
