"""The command `steepest verify SCRIPT`: proof that distribution and deaths change nothing in a script."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from steepest.cli.scripts import script_of, script_parser
from steepest.core.config.run import is_dumb_terminal


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    description = (
        "run a script with a training loop of its own as one process, on several workers, with a worker killed, "
        "stopped and "
        "resumed; compare each step, and say what differs first, and why. All of it runs on processes of this "
        "machine, "
        "without Ray. The exit status is 0 if nothing differs that should not, and 1 otherwise"
    )
    in_short = "proof that distribution and deaths change nothing in a script"
    parser = script_parser(commands, "verify", in_short, description)
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="of each run; default: 20"
    )
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument(
        "--strategy",
        default="ps",
        choices=("ps", "allreduce", "simple"),
        help="how the workers train",
    )
    parser.add_argument(
        "--deaths",
        default="some",
        choices=("some", "all", "none"),
        help="some: one of each of two workers; all: of each worker in each step, which takes seconds for each",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, order of samples and random state"
    )
    parser.add_argument(
        "--tables", action="store_true", help="compare rows of embedding tables at the end, too"
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="draw random numbers by sample, those of dropout too: the same however batches are divided",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, and nothing else"
    )
    parser.add_argument("--no-progress", action="store_true", help="no line that says what runs")
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Verify the script, and print what was found; return the exit status."""
    script = script_of(options)
    from steepest.testing.verification.verifying import verify  # it imports torch

    shows = not options.no_progress and sys.stderr.isatty() and not is_dumb_terminal()

    def told(what: Any) -> None:
        if shows:
            text = f"verify: {what} ..." if isinstance(what, str) else ""
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    report = verify(
        script,
        steps=options.steps,
        num_workers=options.workers,
        strategy=options.strategy,
        deaths=options.deaths,
        seed=options.seed,
        tables=options.tables,
        deterministic=options.deterministic,
        told=told,
    )
    sys.stdout.write(f"{report.as_json() if options.json else report}\n")
    return 0 if report.is_equal else 1
