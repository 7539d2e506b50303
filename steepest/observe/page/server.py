"""Serves the page of a job to its user's browser, behind a token."""

from __future__ import annotations

import contextlib
import errno
import hmac
import io
import json
import logging
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs

from steepest.core.transport.strangers import (
    MOST_OPENINGS,
    NO_DESCRIPTOR,
    OPENING_SECONDS,
    DescriptorReserve,
    Refusals,
    one_of_a_crowd,
    origin_of,
)
from steepest.errors import ConfigurationError
from steepest.observe.page.document import Kind, chart_script, page_script, shell
from steepest.observe.page.run_view import Known
from steepest.validation import require_count

log = logging.getLogger(__name__)
_SILENT_SECONDS = 30.0  # after which a connection that has shown the token is closed; within which an answer is read
_ROOM_SECONDS = 1.0  # within which the thread of a connection that was ended has closed it
_LONGEST = 120  # characters of what a stranger has sent in a line of the log
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

    def as_json(self, known: Known) -> Mapping[str, Any]:
        """Return the data of the page, as `RunView.as_json`."""

    def stacks(self) -> str:
        """Return what each process is doing, as text; takes some seconds at most."""

    def log(self, process: str) -> str:
        """Return the last lines that a process has printed, as text; takes some seconds at most."""


class PageServer:
    """A page, served until `close` on threads that do not keep the interpreter from ending.

    The page itself has nothing of the job: its script fetches that with the token of the address's
    fragment, which browsers do not send. Neither is logged.

    Args:
        source: what it shows.
        host: the address at which it listens; others than this machine's own reach it only if another
            is given, and then the token travels in plain text.
        port: 0 for a free one.
        kind: of the page, as of `document`.

    Attributes:
        host, port: where it listens.
        url: the whole address, with the token.

    Raises:
        ConfigurationError: plotly is not installed; the port is in use, or is none; there is no such
            address here.
    """

    def __init__(
        self, source: PageSource, host: str = "127.0.0.1", port: int = 0, kind: Kind = "page"
    ) -> None:
        require_count("port", port, 0)
        if not isinstance(host, str) or not host:
            raise ConfigurationError(f"host={host!r}: give an address of this machine")
        self._token = secrets.token_urlsafe(24)
        files = {
            "/": ("text/html", shell(kind).encode()),
            "/charts.js": ("text/javascript", chart_script().encode()),
            "/page.js": ("text/javascript", page_script(kind).encode()),
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
        """Stop serving; a second call does nothing."""
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
    """The server; each connection has a thread.

    At most `MOST_OPENINGS` connections may be open that have not shown the token, as of a job's own: a further one
    takes the place of another. When descriptors run out, one of them is ended, or the caller is sent away.

    Args:
        address: at which it listens, and the port.
        source: what is shown.
        token: that readers show.
        files: the type and the content of each file that needs no token, by its path.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128  # callers that wait to be accepted, while others are

    def __init__(
        self,
        address: tuple[str, int],
        source: PageSource,
        token: str,
        files: Mapping[str, tuple[str, bytes]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source, self.token, self.files = source, token, files
        self.has_ended = False  # readers that are connected get no more answers either
        self._refusals = Refusals(clock, " to the page of a job")
        self._reserve = DescriptorReserve()
        self._changed = threading.Condition()
        # The origins of open connections that have not shown the token, and those of them that were ended, which their
        # threads have yet to close.
        self._strangers: dict[socket.socket, str] = {}
        self._ended: set[socket.socket] = set()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _PageRequest)
        self._reserve.fill()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; OSError: there is none, or no descriptor for it."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in NO_DESCRIPTOR and not self._end_one("others want its descriptor"):
                self._reserve.spend(self._send_away)
            raise

    def _send_away(self) -> None:
        sock, address = self.socket.accept()
        with sock:
            self.refuse(sock, address, "this process has no descriptor left")

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether a connection gets a place, which is another's if all are taken."""
        if len(self._strangers) >= MOST_OPENINGS and not self._end_one("others want its place"):
            return False
        with self._changed:
            self._strangers[request] = origin_of(request, client_address)[0]
        return True

    def _end_one(self, why: str) -> bool:
        """End a connection that has not shown the token, and return whether it was closed."""
        with self._changed:
            alive = {sock: at for sock, at in self._strangers.items() if sock not in self._ended}
            if not alive:
                return False
            victim = one_of_a_crowd(alive)
            self._ended.add(victim)
            self._refusals.add(self._strangers[victim], why)
            with contextlib.suppress(OSError):  # its reader is gone
                victim.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
            return self._changed.wait_for(lambda: victim not in self._strangers, _ROOM_SECONDS)

    def welcome(self, sock: socket.socket) -> None:
        """Keep the connection of a reader who has shown the token, whoever else comes."""
        with self._changed:
            if sock not in self._ended:
                self._strangers.pop(sock, None)
                self._changed.notify_all()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, whose place is free then."""
        super().shutdown_request(request)
        with self._changed:
            self._strangers.pop(request, None)
            self._ended.discard(request)
            self._changed.notify_all()

    def service_actions(self) -> None:
        """Log the refusals that are due."""
        with self._changed:
            self._refusals.log_if_due()

    def server_close(self) -> None:
        """Stop listening."""
        super().server_close()
        self._reserve.free()
        with self._changed:
            self._refusals.log_if_due(now=True)

    def refuse(self, sock: socket.socket, address: Any, why: str) -> None:
        """Count a refused connection or request."""
        with self._changed:
            self._refusals.add(origin_of(sock, address)[0], why)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a reader that has disconnected; count any other error that ended the connection."""
        error = sys.exc_info()[1]
        if not isinstance(error, (ConnectionError, TimeoutError)):
            log.debug("a request for the page of a job failed", exc_info=True)
            self.refuse(request, client_address, f"the request failed: {error!r}")


class _Timed(io.RawIOBase):
    """The bytes of a socket, to be read by a deadline on the clock of `time.monotonic`; TimeoutError after it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.deadline = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
        return self._socket.recv_into(into)


class _PageRequest(BaseHTTPRequestHandler):
    """One connection of a reader.

    Its first request has to come whole within `OPENING_SECONDS`, one behind a request with the token within
    `_SILENT_SECONDS`.
    """

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # so that headers are sent whatever the request was
    server: _PageHTTPServer
    server_version, sys_version = "steepest", ""

    def setup(self) -> None:
        """Read with a deadline."""
        super().setup()
        self.rfile.close()
        self._bytes = _Timed(self.connection)
        self.rfile = io.BufferedReader(self._bytes)
        self._patience = OPENING_SECONDS

    def handle_one_request(self) -> None:
        """Read a request and answer it, or close the connection."""
        self._bytes.deadline = time.monotonic() + self._patience
        super().handle_one_request()

    def do_GET(self) -> None:
        """Answer a request."""
        if self.server.has_ended:
            self.close_connection = True
            return
        path, _, query = self.path.partition("?")
        if (file := self.server.files.get(path)) is not None:
            self._send(200, *file)
        elif path not in ("/data", "/stacks", "/log"):
            self._send(404, "text/plain", b"There is no such page here.\n")
        elif not self._is_known():
            self._send(403, "text/plain", _STRANGER.encode())
        else:
            self.server.welcome(self.connection)
            self._patience = _SILENT_SECONDS
            self._tell(path, query)

    def _tell(self, path: str, query: str) -> None:
        """Answer a reader who has shown the token."""
        if path == "/stacks":
            self._send(200, "text/plain", self.server.source.stacks().encode())
            return
        if path == "/log":
            process = parse_qs(query).get("process", [""])[-1][:_LONGEST]
            self._send(200, "text/plain", self.server.source.log(process).encode())
            return
        asked = {name: _count(values[-1]) for name, values in parse_qs(query).items()}
        known = Known(asked.get("since") or 0, asked.get("revision"), asked.get("changes"))
        content = self.server.source.as_json(known)
        self._send(200, "application/json", json.dumps(content, separators=(",", ":")).encode())

    def _is_known(self) -> bool:
        """Return whether the reader has the token; the time that this takes does not depend on the token."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(token.encode(), self.server.token.encode())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a malformed or unknown request, and close the connection."""
        why = message or self.responses.get(code, ("???",))[0]
        self.server.refuse(self.connection, self.client_address, f"{int(code)} {why}"[:_LONGEST])
        self.close_connection = True
        self._send(int(code), "text/plain", b"This page answers GET alone.\n")

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.connection.settimeout(_SILENT_SECONDS)  # for all of the answer
        try:
            self.send_response(status)
            for name, value in (
                ("Content-Type", f"{kind}; charset=utf-8"),
                ("Content-Length", str(len(content))),
                ("Content-Security-Policy", _POLICY),
                ("X-Content-Type-Options", "nosniff"),
                ("Referrer-Policy", "no-referrer"),
                ("Cache-Control", "no-store"),
                *((("Connection", "close"),) if self.close_connection else ()),
            ):
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
        except (ConnectionError, TimeoutError):  # the reader is gone
            self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""


def _count(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 12 else None
