"""The command `steepest compare SCRIPT`: the same script under several strategies, and which one to take."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from steepest import __version__
from steepest.cli.begin import add_runtime_option, begun
from steepest.cli.files import check_outputs, write_whole
from steepest.cli.scripts import add_job_options, script_of, script_parser, strategy_names
from steepest.core.config.run import FailureConfig, RunConfig
from steepest.errors import ConfigurationError
from steepest.observe.comparison import (
    LOSS,
    Criterion,
    csv_of,
    outcomes_of,
    page_data,
    picture_of,
    recommend,
    table_of,
)
from steepest.observe.page.document import chart_script, document
from steepest.strategies.names import STRATEGY_NAMES

_DEFAULT = "ps,allreduce,local,async,ssp"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    description = (
        "run a script with a training loop of its own under each of several strategies in turn, for a bounded time, "
        "with the same seed; write what each has come to on one page, and say which one to take. "
        "The page needs pip install 'steepest[page]'"
    )
    in_short = "run a script under several strategies, and say which one to take"
    parser = script_parser(commands, "compare", in_short, description)
    parser.add_argument(
        "--strategies",
        default=_DEFAULT,
        metavar="NAMES",
        help=f"of {', '.join(STRATEGY_NAMES)}, with commas between them; default: {_DEFAULT}",
    )
    parser.add_argument(
        "--minutes", type=float, default=2.0, metavar="N", help="of training for each; default: 2"
    )
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument(
        "--validation",
        default="",
        metavar="NAME[:max]",
        help="compare by what the script reports by this name, such as val_loss, or accuracy:max if more of it is "
        "better; default: by the loss of the batches that are trained on",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="run each strategy so often, from --seed on, and compare means; default: 1",
    )
    add_job_options(parser, "; async and ssp have none")
    add_runtime_option(parser)
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        metavar="FILE",
        help="compare.html for a page, .csv for all steps, .png for a picture; may be given several times; "
        "default: compare.html",
    )
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Run the script under each strategy; return the exit status: 0 if one has trained."""
    names = strategy_names(options.strategies)
    if not 0 < options.minutes < math.inf:
        raise ConfigurationError(f"--minutes {options.minutes}: give a number above 0")
    for name in ("workers", "seeds"):
        if (value := getattr(options, name)) < 1:
            raise ConfigurationError(f"--{name} {value}: give a number from 1 on")
    by = Criterion.read(options.validation) if options.validation else LOSS
    outputs = [Path(each) for each in options.output or ["compare.html"]]
    check_outputs(outputs)
    has_page = any(output.suffix.lower() == ".html" for output in outputs)
    charts = chart_script() if has_page else ""
    script = script_of(options)
    trials = []
    with begun(options.runtime):
        from steepest.loop.comparison import try_strategy

        seeds = range(options.seed, options.seed + options.seeds)
        for seed, name in itertools.product(
            seeds, names
        ):  # what slows the machine meets all strategies
            of_seed = f", seed {seed}" if len(seeds) > 1 else ""
            sys.stdout.write(f"{name}{of_seed}: up to {options.minutes:g} minutes\n")
            sys.stdout.flush()
            trial = try_strategy(
                script,
                name,
                60 * options.minutes,
                num_workers=options.workers,
                gpu=options.gpu,
                global_batch_size=options.global_batch_size,
                seed=seed,
                run_config=RunConfig(
                    failure=FailureConfig(patience=math.inf), runtime=options.runtime
                ),
            )
            trials.append(trial)
            if trial.failed:
                sys.stdout.write(f"  {trial.ended}\n")
    outcomes = outcomes_of(trials, by)
    sys.stdout.write(_as_text(table_of(outcomes)))
    best, advice = recommend(outcomes)
    sys.stdout.write(f"{advice}\n")
    title = script.name
    of_seeds = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    subtitle = f"{options.workers} workers, {of_seeds}, up to {options.minutes:g} minutes of training for each"
    makers: dict[str, Callable[[], bytes]] = {
        ".html": lambda: document(
            page_data(title, subtitle, trials, __version__, by), charts, "comparison"
        ).encode(),
        ".csv": lambda: csv_of(trials).encode(),
        ".png": lambda: picture_of(title, trials, by),
    }
    for output in outputs:
        write_whole(output, makers[output.suffix.lower()]())
        sys.stdout.write(f"{output}\n")
    return 0 if best is not None else 1


def _as_text(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in columns; the last one, of sentences, is cut to 60 characters."""
    rows = [[*row[:-1], row[-1][:60]] for row in rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.ljust(width) if at in (0, len(widths) - 1) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "".join(f"{line.rstrip()}\n" for line in lines)
