"""The command `steepest compare SCRIPT`: the same script under several strategies, and which one to take."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from steepest import __version__
from steepest.cli.files import write_whole
from steepest.errors import ConfigurationError
from steepest.observe.comparison import Outcome, csv_of, picture_of, recommend, table_of, told
from steepest.observe.page.document import chart_script, document
from steepest.strategies.named import STRATEGY_NAMES, as_strategy

_DEFAULT = "ps,allreduce,local,async,ssp"
_KINDS = (".html", ".csv", ".png")
_NO_PICTURES = "is drawn with matplotlib, which is not installed: pip install 'steepest[bench]'"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    about = (
        "run a script with a training loop of its own under each of several strategies in turn, for a bounded time, "
        "with the same seed; write what each has come to on one page, and say which one to take. "
        "The page needs pip install 'steepest[page]'"
    )
    parser = commands.add_parser(
        "compare",
        help="run a script under several strategies, and say which one to take",
        description=about,
        usage="steepest compare SCRIPT [options] [-- arguments of the script]",
    )
    parser.add_argument("script", help="a program that calls steepest.prepare()")
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
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument(
        "--global-batch-size",
        type=int,
        metavar="N",
        help="samples of a step of all workers together; async and ssp have none",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        metavar="FILE",
        help="compare.html for a page, .csv for all steps, .png for a picture; may be given several times; "
        "default: compare.html",
    )


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the script under each strategy; return the exit status: 0 if one has trained."""
    names = strategy_names(options.strategies)
    if not 0 < options.minutes < math.inf:
        raise ConfigurationError(f"--minutes {options.minutes}: give a number above 0")
    if options.workers < 1:
        raise ConfigurationError(f"--workers {options.workers}: give a number from 1 on")
    outputs = [Path(each) for each in options.output or ["compare.html"]]
    charts = check_outputs(outputs)
    from steepest.loop.script import UserScript

    script = UserScript.read(options.script, arguments)
    from steepest.runtime.connection import ray_session

    trials = []
    with ray_session():
        from steepest.loop.comparison import try_strategy

        for name in names:
            sys.stdout.write(f"{name}: up to {options.minutes:g} minutes\n")
            sys.stdout.flush()
            trial = try_strategy(
                script,
                name,
                60 * options.minutes,
                num_workers=options.workers,
                gpu=options.gpu,
                global_batch_size=options.global_batch_size,
                seed=options.seed,
            )
            trials.append(trial)
            if trial.failed:
                sys.stdout.write(f"  {trial.ended}\n")
    outcomes = [Outcome(trial) for trial in trials]
    sys.stdout.write(_as_text(table_of(outcomes)))
    best, advice = recommend(outcomes)
    sys.stdout.write(f"{advice}\n")
    title = Path(options.script).name
    about = f"{options.workers} workers, seed {options.seed}, up to {options.minutes:g} minutes of training for each"
    makers: dict[str, Callable[[], bytes]] = {
        ".html": lambda: document(
            told(title, about, trials, __version__), charts, "comparison"
        ).encode(),
        ".csv": lambda: csv_of(trials).encode(),
        ".png": lambda: picture_of(title, trials),
    }
    for output in outputs:
        write_whole(output, makers[output.suffix.lower()]())
        sys.stdout.write(f"{output}\n")
    return 0 if best is not None else 1


def strategy_names(text: str) -> list[str]:
    """Return the names of the strategies, each once."""
    names = [each.strip() for each in text.split(",") if each.strip()]
    for name in names:
        as_strategy(name)
    if not names:
        raise ConfigurationError("--strategies: give at least one, such as ps,local")
    return list(dict.fromkeys(names))


def check_outputs(outputs: Sequence[Path]) -> str:
    """Check that each file can be made; return the script of a page's charts, "" if there is no page."""
    for output in outputs:
        if output.suffix.lower() not in _KINDS:
            raise ConfigurationError(
                f"--output {output}: give a name that ends with one of {', '.join(_KINDS)}"
            )
        if not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
            raise ConfigurationError(
                f"{output}: {output.parent} is no directory that can be written to"
            )
        if output.suffix.lower() == ".png" and find_spec("matplotlib") is None:
            raise ConfigurationError(f"{output} {_NO_PICTURES}")
    has_page = any(output.suffix.lower() == ".html" for output in outputs)
    return chart_script() if has_page else ""


def _as_text(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in columns; its last one, which has sentences, is cut."""
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
