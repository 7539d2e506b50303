"""The command `steepest run SCRIPT ...`."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from steepest.cli.begin import add_runtime_option, begun
from steepest.cli.scripts import add_job_options, script_of, script_parser
from steepest.cli.settings_file import add_config_option
from steepest.core.config.run import FailureConfig, RunConfig
from steepest.errors import ConfigurationError
from steepest.observe.timeline.trace_file import check_target
from steepest.strategies.names import STRATEGY_NAMES

if TYPE_CHECKING:
    from steepest.core.strategies.strategy import Strategy
    from steepest.observe.progress import Callback


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    description = (
        "run a script with a training loop of its own on many workers, on this machine or on the Ray cluster that "
        "RAY_ADDRESS names"
    )
    parser = script_parser(commands, "run", "run a script on many workers", description)
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
        "--page", action="store_true", help="serve a page of the job, and print its address"
    )
    parser.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="TRACKER[=WHERE]",
        help="tensorboard=DIRECTORY, mlflow=URI, wandb=PROJECT, trackio=PROJECT or opentelemetry=RUN; may be given "
        "again",
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="record what each process does, for https://ui.perfetto.dev",
    )
    parser.add_argument(
        "--max-failures",
        type=int,
        metavar="N",
        help="deaths of each process that are answered by replacing it (default: 3)",
    )
    parser.add_argument(
        "--snapshot-every",
        type=int,
        metavar="N",
        help="steps from one copy of the job's state to the next; 0 for none",
    )
    parser.add_argument(
        "--replication",
        type=int,
        metavar="N",
        help="servers, or workers, that hold each part of the weights (default: 1)",
    )
    add_runtime_option(parser)
    add_config_option(parser)
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Run a script with its own arguments, and print its last report; return the exit status."""
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
        try:
            result = run_function(
                script,
                num_workers=workers,
                strategy=_strategy(options),
                run_config=RunConfig(
                    failure=_failure(options), runtime=options.runtime, page=options.page
                ),
                callbacks=[tracker(each) for each in options.log],
                gpu=options.gpu,
                global_batch_size=options.global_batch_size,
                seed=options.seed,
                checkpoints=checkpoints,
                progress=not options.no_progress,
                timeline=options.timeline,
            )
        except KeyboardInterrupt:
            rest = (
                "the same command begins anew, and with --checkpoints it would go on"
                if checkpoints is None
                else f"the same command goes on from {options.checkpoints}"
            )
            sys.stderr.write(f"steepest: stopped: {rest}\n")
            raise
    for name, value in result.metrics.items():
        sys.stdout.write(f"{name}: {value:.6g}\n")
    return 0


def _failure(options: argparse.Namespace) -> FailureConfig:
    """Return the handling of deaths: the others wait for a successor, so that all stay in their loops."""
    most = {} if options.max_failures is None else {"max_failures": options.max_failures}
    return FailureConfig(patience=math.inf, snapshot_every=options.snapshot_every, **most)


def _strategy(options: argparse.Namespace) -> Strategy:
    """Return the strategy that the options name."""
    from steepest.core.strategies.allreduce import AllreduceStrategy
    from steepest.core.strategies.strategy import ServerStrategy
    from steepest.strategies.named import as_strategy

    strategy = as_strategy(options.strategy)
    if options.replication is None:
        return strategy
    if not isinstance(strategy, ServerStrategy | AllreduceStrategy):
        raise ConfigurationError(
            f"--replication with --strategy {options.strategy}, under which nothing is held twice: give ps, allreduce "
            "or local, or leave it out"
        )
    return replace(strategy, replication=options.replication)


def tracker(text: str) -> Callback:
    """Return the callback that reports a run to a tracker, given its name and, after "=", where it stores runs.

    Raises:
        ConfigurationError: there is no such tracker, or it is not installed.
    """
    from steepest.observe import loggers
    from steepest.observe.open_telemetry import OpenTelemetry

    name, _, where = text.partition("=")
    match name:
        case "tensorboard":
            return loggers.TensorBoard(where or "runs")
        case "mlflow":
            return loggers.MLflow(uri=where or None)
        case "wandb":
            return loggers.WandB(where or None)
        case "trackio":
            return loggers.Trackio(where or "steepest")
        case "opentelemetry":
            return OpenTelemetry(where or "steepest")
    raise ConfigurationError(
        f"--log {text}: give tensorboard, mlflow, wandb, trackio or opentelemetry, with =WHERE behind it if it is to "
        "be elsewhere"
    )


def _workers(text: str) -> int | tuple[int, int]:
    """Return a number of workers, or the least and the greatest."""
    try:
        first, _, last = text.partition(":")
        return (int(first), int(last)) if last else int(first)
    except ValueError:
        raise ConfigurationError(
            f"--workers {text}: give a number, or two with a colon between them"
        ) from None
