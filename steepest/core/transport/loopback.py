"""This machine's own address, over which its processes reach each other."""

from __future__ import annotations

import socket

from steepest.errors import ConfigurationError

HOST = "127.0.0.1"
_SECONDS = 10.0


def require_loopback() -> None:
    """Check that this process reaches itself by `HOST`.

    Raises:
        ConfigurationError: it does not, as in a container or network namespace whose loopback is down.
    """
    try:
        with socket.create_server((HOST, 0)) as listener:
            socket.create_connection(listener.getsockname(), _SECONDS).close()
    except OSError as error:
        raise ConfigurationError(
            f"this machine does not reach itself at {HOST} ({error.strerror or error}), by which its processes talk: "
            "bring its loopback up, as by `ip link set lo up`"
        ) from error
