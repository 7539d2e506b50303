"""The `steepest` command, with its subcommands, each in a module of its name.

`python -m steepest` is the same command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from steepest import __version__
from steepest.cli import (
    compare,
    completion,
    doctor,
    explain,
    launch,
    plan,
    report,
    run,
    verify,
    watch,
)
from steepest.cli.scripts import TAKE_SCRIPTS
from steepest.cli.settings_file import with_file
from steepest.errors import RemoteTraceback, SteepestError

_ENOUGH = 0.95  # accuracy, of the demo
_FIRST = """\
first steps:
  steepest doctor                       does it work here? what Ray and torch find, in 15 seconds
  steepest demo                         train handwritten digits under every strategy
  steepest run train.py --workers 2     run a script of yours that calls steepest.prepare()
  steepest verify train.py              does it compute what one process does, also when workers die? a minute
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
        description="Distributed SGD, on this machine or on a Ray cluster.",
        epilog=_FIRST,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"steepest {__version__}")
    commands = parser.add_subparsers(dest="subcommand", required=True)
    demo = commands.add_parser("demo", help="train handwritten digits under every strategy")
    demo.add_argument("--epochs", type=int, default=8, help="of each strategy")
    demo.add_argument("--no-progress", action="store_true", help="no progress bar")
    demo.set_defaults(call=_demo)
    for each in (doctor, compare, explain, launch, plan, report, run, verify, watch):
        each.add_parser(commands)
    completion.add_parser(commands, parser)
    return parser


def _demo(options: argparse.Namespace) -> int:
    """Run the demonstration; return the exit status."""
    from steepest.cli.demo import (
        run as run_demo,  # it imports torch, as no other command does at once
    )

    rows = run_demo(options.epochs, progress=not options.no_progress)
    return 0 if all(row.accuracy >= _ENOUGH for row in rows) else 1


def _command(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    command: argparse.ArgumentParser = commands.choices[name]
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand of the command line, and return the exit status: 0 if it succeeded."""
    parser = make_parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    takes_arguments = bool(words) and words[0] in TAKE_SCRIPTS
    end = words.index("--") if takes_arguments and "--" in words else len(words)
    try:
        command = words[:end]
        if command[:1] == ["run"]:
            command = ["run", *with_file(_command(parser, "run"), command[1:])]
        chosen = parser.parse_args(command)
        if takes_arguments:
            chosen.arguments = words[end + 1 :]
        status: int = chosen.call(chosen)
        return status
    except SteepestError as error:
        if isinstance(error.__cause__, RemoteTraceback):  # the frames of the user's own code
            print(error.__cause__.text.rstrip(), file=sys.stderr)
        print(f"steepest: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
