"""The connections of this process to parameter servers: one to each, shared by all handles of it.

A task gets a handle of its own, the connection is kept between tasks. Pushes that are not committed are waited for
before the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading

from steepest.errors import SteepestError
from steepest.parameter_server.access import Access
from steepest.parameter_server.connection import Connection

log = logging.getLogger(__name__)

_connections: dict[bytes, Connection] = {}  # by the parameter server's token
_opening = threading.RLock()


def to(access: Access) -> Connection:
    """Return this process' connection, opened now unless there is an open one; errors: see `Access.connect`."""
    connection = _connections.get(access.token)
    if connection is None or connection.closed:
        with _opening:
            connection = _connections.get(access.token)
            if connection is None or connection.closed:
                _close_lost()
                connection = _connections[access.token] = access.connect()
                _flush_at_end()
    return connection


def known(token: bytes) -> Connection | None:
    """Return the connection to the parameter server of a token, if there is one; it may be closed."""
    return _connections.get(token)


def close(token: bytes) -> None:
    """Close the connection to a parameter server, if any, even one that another thread is opening."""
    with _opening:
        connection = _connections.pop(token, None)
    if connection is not None:
        connection.close()


def drop(token: bytes) -> None:
    """Close the connection to a parameter server, if any, without waiting for other threads."""
    if (connection := _connections.pop(token, None)) is not None:
        connection.close()


def flush(connection: Connection) -> None:
    """Wait for a connection's uncommitted pushes; log those that cannot be committed any more."""
    try:
        if connection.pusher.pushing and not connection.turning_here:
            connection.flush()
    except SteepestError as error:
        log.warning("pushes in flight were not committed: %s", error)


def _close_lost() -> None:
    """Close connections to servers that have ended: a long-lived process may use many."""
    for token, connection in list(_connections.items()):
        if not connection.turning_here and connection.lost():
            drop(token)


def _leave_connections() -> None:
    """Let a forked child open connections of its own."""
    global _opening
    _connections.clear()
    _opening = threading.RLock()  # another thread may have held it


os.register_at_fork(after_in_child=_leave_connections)


def _flush_at_end() -> None:
    """Let processes of `multiprocessing` call `_flush_all`: they end without the interpreter's exit functions."""
    if "multiprocessing.util" in sys.modules:
        sys.modules["multiprocessing.util"].Finalize(None, _flush_all, exitpriority=0)


@atexit.register
def _flush_all() -> None:
    """Wait for uncommitted pushes as the process ends, and close all connections."""
    for connection in list(_connections.values()):
        with contextlib.suppress(RuntimeError):  # interpreters that end refuse new threads
            flush(connection)
            connection.close()
