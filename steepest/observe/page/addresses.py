"""Where the pages of live jobs are, for `steepest watch`: files that only their user can read."""

from __future__ import annotations

import contextlib
import html
import json
import os
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from steepest.core.config.folders import private_file, private_folder
from steepest.observe.page.server import PageServer


def _folder() -> Path:
    """Return this user's folder of addresses, which is made if it is missing."""
    base = Path(tempfile.gettempdir())
    return private_folder(base, "steepest-pages", "addresses of pages with their tokens")


def redirecting_file(url: str) -> Path:
    """Return a file that leads a browser to a page: every user of a machine sees what a browser is started with.

    Args:
        url: of the page, with its token, which is in the file alone.
    """
    file = _folder() / f"{urlsplit(url).port}.html"
    to = html.escape(url)
    private_file(
        file,
        f'<!doctype html><meta http-equiv="refresh" content="0; url={to}"><a href="{to}">the page</a>\n',
    )
    return file


class KeptAddress:
    """The file of a page's address, `file`, until it is removed.

    Args:
        page: that is served.
        run: the directory of the job's checkpoints, if it has one.
    """

    def __init__(self, page: PageServer, run: Path | None) -> None:
        self.file = _folder() / f"{page.port}.json"
        address = {"url": page.url, "pid": os.getpid(), "run": str(run.resolve()) if run else None}
        private_file(self.file, json.dumps(address))

    def remove(self) -> None:
        """Remove it, and what leads a browser to the page."""
        self.file.unlink(missing_ok=True)
        self.file.with_suffix(".html").unlink(missing_ok=True)


def kept_addresses() -> list[dict[str, Any]]:
    """Return the pages of this user's jobs whose processes are there: "url", "pid", "run"; the newest first."""
    addresses = []
    files = sorted(_folder().glob("*.json"), key=lambda file: -file.stat().st_mtime)
    for file in files:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            address = json.loads(file.read_text())
            os.kill(int(address["pid"]), 0)  # raises where there is no such process
            addresses.append({name: address[name] for name in ("url", "pid", "run")})
    return addresses
