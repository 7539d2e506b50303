"""Serves the page of a job to its user's browser, behind a token."""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import logging
import secrets
import socket
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from steepest.errors import ConfigurationError
from steepest.observe.page.document import chart_script, page_script, shell
from steepest.observe.page.run_view import Known
from steepest.validation import require_count

log = logging.getLogger(__name__)
_SILENT_SECONDS = 30.0  # after which a connection is closed
_CLOSE_SECONDS = 0.1  # within which a server sees that it is to close
_STRANGER = (
    "This page is behind a token: open the whole address that the job has given, with #token=... at its end, or run "
    "`steepest watch` on the job's machine.\n"
)
#: Nothing is loaded from elsewhere, and nobody else may frame the page.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class PageSource(Protocol):
    """What a page shows; any thread may ask."""

    def told(self, known: Known) -> Mapping[str, Any]:
        """Return the data of the page, as `RunView.told`."""

    def stacks(self) -> str:
        """Return what each process is doing, as text; takes some seconds at most."""


class PageServer:
    """A page, served until `close` on threads that do not keep the interpreter from ending.

    The page itself has nothing of the job: its script fetches that with the token of the address's
    fragment, which browsers send to nobody. Neither is logged.

    Args:
        source: what it shows.
        host: the address at which it listens; others than this machine's own reach it only if another
            is given, and then the token travels in plain text.
        port: 0 for a free one.

    Attributes:
        host, port: where it listens.
        url: the whole address, with the token.

    Raises:
        ConfigurationError: plotly is not installed; the port is in use, or is none; there is no such
            address here.
    """

    def __init__(self, source: PageSource, host: str = "127.0.0.1", port: int = 0) -> None:
        require_count("port", port, 0)
        if not isinstance(host, str) or not host:
            raise ConfigurationError(f"host={host!r}: give an address of this machine")
        self._token = secrets.token_urlsafe(24)
        files = {
            "/": ("text/html", shell().encode()),
            "/charts.js": ("text/javascript", chart_script().encode()),
            "/page.js": ("text/javascript", page_script().encode()),
        }
        try:
            self._server = _PageHTTPServer((host, port), source, self._token, files)
        except OverflowError:
            raise ConfigurationError(f"port={port}: give a number up to 65535, or 0") from None
        except OSError as error:
            raise ConfigurationError(_refusal(host, port, error)) from error
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_CLOSE_SECONDS,),
            name="steepest page",
            daemon=True,
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The whole address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/#token={self._token}"

    def close(self) -> None:
        """Serve no more; a second call does nothing."""
        self._server.has_ended = True
        self._server.shutdown()
        self._server.server_close()


def _refusal(host: str, port: int, error: OSError) -> str:
    """Return in words why a page cannot be served."""
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use: give another port, or 0 for a free one"
    if error.errno == errno.EACCES:
        return f"port {port} of {host} is for administrators: give one from 1024 on, or 0 for a free one"
    return f"the page cannot be served at {host}:{port}: {error.strerror or error}; give an address of this machine"


class _PageHTTPServer(ThreadingHTTPServer):
    """The server; each connection has a thread."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        address: tuple[str, int],
        source: PageSource,
        token: str,
        files: Mapping[str, tuple[str, bytes]],
    ) -> None:
        self.source, self.token, self.files = source, token, files
        self.has_ended = False  # readers that are connected get no more answers either
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _PageRequest)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Let a reader go that is gone; log any other error, which has ended the connection."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            log.exception("a request for the page of a job failed")


class _PageRequest(BaseHTTPRequestHandler):
    """One connection of a reader."""

    protocol_version = "HTTP/1.1"
    timeout = _SILENT_SECONDS
    server: _PageHTTPServer
    server_version, sys_version = "steepest", ""

    def do_GET(self) -> None:
        """Answer a request."""
        if self.server.has_ended:
            self.close_connection = True
            return
        parts = urlsplit(self.path)
        if (file := self.server.files.get(parts.path)) is not None:
            self._send(200, *file)
        elif parts.path not in ("/data", "/stacks"):
            self._send(404, "text/plain", b"There is no such page here.\n")
        elif not self._is_known():
            self._send(403, "text/plain", _STRANGER.encode())
        elif parts.path == "/stacks":
            self._send(200, "text/plain", self.server.source.stacks().encode())
        else:
            asked = {name: _count(values[-1]) for name, values in parse_qs(parts.query).items()}
            known = Known(asked.get("since") or 0, asked.get("revision"), asked.get("changes"))
            told = self.server.source.told(known)
            self._send(200, "application/json", json.dumps(told, separators=(",", ":")).encode())

    def _is_known(self) -> bool:
        """Return whether the reader has the token; it takes equally long whatever is given."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), self.server.token.encode())

    def _send(self, status: int, kind: str, content: bytes) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):  # the reader is gone
            self.send_response(status)
            for name, value in (
                ("Content-Type", f"{kind}; charset=utf-8"),
                ("Content-Length", str(len(content))),
                ("Content-Security-Policy", _POLICY),
                ("X-Content-Type-Options", "nosniff"),
                ("Referrer-Policy", "no-referrer"),
                ("Cache-Control", "no-store"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""


def _count(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 12 else None
