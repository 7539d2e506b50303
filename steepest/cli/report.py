"""The command `steepest report RUN`: the page of a run, as one file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from steepest import __version__
from steepest.cli.files import write_whole
from steepest.observe.page.document import chart_script, document
from steepest.observe.page.overlay import overlay_of
from steepest.observe.page.run_files import read_run


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    description = (
        "write the page of a run as one HTML file, which works offline: curves, workers, changes of the job, "
        "processes; or several runs laid over one another; needs pip install 'steepest[page]'"
    )
    parser = commands.add_parser(
        "report", help="write the page of a run as one file", description=description
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="a directory or URL of Checkpoints, or a file history.jsonl; several are laid over one another",
    )
    parser.add_argument(
        "-o", "--output", default="page.html", metavar="FILE", help="default: page.html"
    )
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Write the page; return the exit status."""
    charts = chart_script()
    views = [read_run(run) for run in options.runs]
    if len(views) == 1:
        text = document(views[0].as_json(), charts)
    else:
        text = document(overlay_of(views, options.runs, __version__), charts, "comparison")
    page = text.encode()
    target = Path(options.output)
    write_whole(target, page)
    sys.stdout.write(f"{target}: {len(page) / 1e6:.1f} MB\n")
    return 0
