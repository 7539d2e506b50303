"""The common parts of commands that take a user's script."""

from __future__ import annotations

import argparse

from steepest.errors import ConfigurationError
from steepest.loop.script import UserScript

#: The commands that are given a script; what follows ``--`` is the script's own.
TAKE_SCRIPTS = ("run", "compare", "plan", "verify")


def script_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    in_short: str,
    description: str,
) -> argparse.ArgumentParser:
    """Add a command that takes a script, and the script's own arguments after ``--``; return its parser."""
    parser = commands.add_parser(
        name,
        help=in_short,
        description=description,
        usage=f"steepest {name} [-m] SCRIPT [options] [-- arguments of the script]",
    )
    parser.add_argument("script", help="a program that calls steepest.prepare()")
    parser.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="the script is a module, named as for python -m",
    )
    return parser


def script_of(options: argparse.Namespace) -> UserScript:
    """Return the script that the options name, with its arguments; ConfigurationError: there is none."""
    read = UserScript.read_module if options.is_module else UserScript.read
    return read(options.script, options.arguments)


def add_job_options(parser: argparse.ArgumentParser, besides: str = "") -> None:
    """Add options of the job in which a script runs."""
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument(
        "--global-batch-size",
        type=int,
        metavar="N",
        help=f"samples of a step of all workers together{besides}",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, order of samples and random state"
    )


def strategy_names(text: str) -> list[str]:
    """Return the names of strategies in a comma-separated list, each once."""
    from steepest.strategies.named import as_strategy  # it imports torch

    names = [each.strip() for each in text.split(",") if each.strip()]
    for name in names:
        as_strategy(name)
    if not names:
        raise ConfigurationError("--strategies: give at least one, such as ps,local")
    return list(dict.fromkeys(names))
