"""The command `steepest run SCRIPT ...`."""

from __future__ import annotations

import argparse
import math
import sys

from steepest.cli.begin import add_runtime_option, begun
from steepest.cli.scripts import add_job_options, script_of, script_parser
from steepest.config.run import FailureConfig, RunConfig
from steepest.errors import ConfigurationError
from steepest.observe.timeline.trace_file import check_target
from steepest.strategies.names import STRATEGY_NAMES


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    about = (
        "run a script with a training loop of its own on many workers, on this machine or on the Ray cluster that "
        "RAY_ADDRESS names"
    )
    parser = script_parser(commands, "run", "run a script on many workers", about)
    parser.add_argument(
        "--workers",
        default="1",
        metavar="N",
        help="workers, or MIN:MAX for as many as there is room for",
    )
    parser.add_argument(
        "--strategy", default="ps", choices=STRATEGY_NAMES, help="how the workers train"
    )
    add_job_options(parser)
    parser.add_argument(
        "--checkpoints",
        metavar="PATH",
        help="where to keep checkpoints; the same command continues",
    )
    parser.add_argument(
        "--every", type=int, metavar="N", help="steps from one checkpoint to the next"
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="record what each process does, for https://ui.perfetto.dev",
    )
    add_runtime_option(parser)
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Run a script with its own arguments, and print what it has reported last; return the exit status."""
    if options.checkpoints is None and options.every is not None:
        raise ConfigurationError("--every without --checkpoints: give both")
    if options.timeline is not None:
        check_target(options.timeline)
    script, workers = script_of(options), _workers(options.workers)
    with begun(options.runtime):
        from steepest.checkpoint.files import Checkpoints
        from steepest.loop.run import run as run_function

        checkpoints = None
        if options.checkpoints is not None:
            every = {} if options.every is None else {"every": options.every}
            checkpoints = Checkpoints(options.checkpoints, **every)
        result = run_function(
            script,
            num_workers=workers,
            strategy=options.strategy,
            run_config=RunConfig(failure=FailureConfig(patience=math.inf), runtime=options.runtime),
            gpu=options.gpu,
            global_batch_size=options.global_batch_size,
            seed=options.seed,
            checkpoints=checkpoints,
            progress=not options.no_progress,
            timeline=options.timeline,
        )
    for name, value in result.metrics.items():
        sys.stdout.write(f"{name}: {value:.6g}\n")
    return 0


def _workers(text: str) -> int | tuple[int, int]:
    """Return a number of workers, or the least and the greatest."""
    try:
        first, _, last = text.partition(":")
        return (int(first), int(last)) if last else int(first)
    except ValueError:
        raise ConfigurationError(
            f"--workers {text}: give a number, or two with a colon between them"
        ) from None
