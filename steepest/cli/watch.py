"""The command `steepest watch RUN`: the page of a run, in a browser, while it goes on."""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import urllib.error
import urllib.request
import webbrowser
from pathlib import Path
from urllib.parse import urlsplit

from steepest import __version__
from steepest.errors import ConfigurationError
from steepest.observe.page.addresses import kept_addresses, redirecting_file
from steepest.observe.page.overlay import WatchedRuns
from steepest.observe.page.run_files import WatchedRun
from steepest.observe.page.server import PageServer, PageSource

_ADDRESS = re.compile(
    r"(?:https?://)?(\[[0-9A-Fa-f:.]+\]|[\w.-]+):(\d{1,5})(?:/(?:#token=([\w-]+))?)?"
)
_ANSWER_SECONDS = 10.0
_NO_TOKEN = (
    "{0}: the page of a job is behind a token, and this user has no job on this machine with a page there: give the "
    "whole address, with #token=... at its end, as sgd.page().url has it"
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    description = (
        "show the page of a run while it goes on: that of a live job with sgd.page() or RunConfig(page=True), or one "
        "that is made of the run's files; needs pip install 'steepest[page]'"
    )
    parser = commands.add_parser(
        "watch", help="show the page of a run while it goes on", description=description
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="a directory or URL of Checkpoints, a file history.jsonl, or the address of a live job's page, HOST:PORT; "
        "several runs of files are laid over one another",
    )
    parser.add_argument("--open", action="store_true", help="open it in this machine's browser")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="where it listens, for a page of files; default: this machine alone reaches it",
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="likewise; default: a free one"
    )
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Print the page's address, and serve it unless a job does; return the exit status."""
    if len(options.runs) > 1:
        source: PageSource = WatchedRuns(options.runs, __version__)
        return _serve(PageServer(source, options.host, options.port, "comparison"), options.open)
    (run,) = options.runs
    url = _address_of(run) or _live(run)
    if url is not None:
        _require_answer(url)
        _show(url, options.open)
        return 0
    return _serve(PageServer(WatchedRun(run), options.host, options.port), options.open)


def _serve(server: PageServer, in_browser: bool) -> int:
    """Print the page's address, and serve it until Ctrl-C; return the exit status."""
    try:
        _show(server.url, in_browser)
        sys.stdout.write("Ctrl-C ends it\n")
        sys.stdout.flush()
        threading.Event().wait()
    finally:
        server.close()
    return 0


def _address_of(text: str) -> str | None:
    """Return the whole address of a page that a user names; None if the text is no address."""
    if (match := _ADDRESS.fullmatch(text)) is None or Path(text).exists():
        return None
    host, port, token = match.groups()
    if token is not None:
        return f"http://{host}:{port}/#token={token}"
    for page in kept_addresses():
        parts = urlsplit(page["url"])
        if parts.port == int(port) and host in (parts.hostname, "localhost"):
            return str(page["url"])
    raise ConfigurationError(_NO_TOKEN.format(text))


def _live(run: str) -> str | None:
    """Return the address of the page of a live job that keeps its checkpoints in a directory; None if there is none."""
    if not (path := Path(run)).exists():
        return None
    folder = str((path if path.is_dir() else path.parent).resolve())
    return next((str(page["url"]) for page in kept_addresses() if page["run"] == folder), None)


def _require_answer(url: str) -> None:
    """Check that a page answers, and knows the token."""
    place, _, token = url.partition("#token=")
    request = urllib.request.Request(f"{place}data", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
            json.load(answer)
    except urllib.error.HTTPError as error:
        why = "the token is not that of this page" if error.code == 403 else f"it says {error.code}"
        raise ConfigurationError(
            f"{place}: {why}: give the address that the job has given"
        ) from None
    except (OSError, ValueError) as error:
        why = str(getattr(error, "reason", error))
        raise ConfigurationError(
            f"{place}: no job answers there ({why}): it has ended, or is on another machine"
        ) from None


def _show(url: str, in_browser: bool) -> None:
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()
    if in_browser:
        webbrowser.open(redirecting_file(url).as_uri())
