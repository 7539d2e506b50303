"""The command `steepest launch PLACE ...`."""

from __future__ import annotations

import argparse
from types import ModuleType

from steepest.places import kubernetes, sagemaker, slurm, spark

#: Modules by the name of their place. Each has `add_arguments(parser)`, which fills in the parser of its
#: command, and `run(options)`, which returns the exit status. They import what they need when they run.
PLACES: dict[str, ModuleType] = {
    "kubernetes": kubernetes,
    "sagemaker": sagemaker,
    "slurm": slurm,
    "spark": spark,
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command with a subcommand for each place."""
    launch = commands.add_parser("launch", help="run a program in some place")
    places = launch.add_subparsers(dest="place", required=True)
    for name, place in PLACES.items():
        description = (place.__doc__ or "").strip().splitlines()[0]
        place.add_arguments(places.add_parser(name, help=description, description=description))
    launch.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Run a program in the place that the options name; return the exit status."""
    status: int = PLACES[options.place].run(options)
    return status
