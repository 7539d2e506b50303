"""The command `steepest explain TRACE`: a timeline in a few sentences."""

from __future__ import annotations

import argparse
import sys

from steepest.observe.timeline.explain import explain


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    description = (
        "say of a timeline where a step's time goes, who waits for whom, what a slow worker costs, "
        "and what would help"
    )
    parser = commands.add_parser(
        "explain", help="say where a step's time goes", description=description
    )
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="a file that `steepest run --timeline`, or sgd.timeline(), has written",
    )
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Print the sentences; return the exit status."""
    sys.stdout.write(f"{explain(options.trace)}\n")
    return 0
