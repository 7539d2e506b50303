"""A Ray of this process' own, and the connection to one that runs already."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator

from steepest.core.config.run import cluster_address, ray_uses_tls
from steepest.errors import ConfigurationError, DeadlineError
from steepest.validation import require_choice, require_count, require_seconds

_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # a frame of HTTP/2 of type 4, empty
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS


@contextlib.contextmanager
def local(
    workers: int | None = None, *, cpus_per_worker: int = 1, verbose: bool = False
) -> Iterator[str]:
    """Start a Ray on this machine for the length of a block, and end it with all its processes.

    It is a new one also where RAY_ADDRESS names another or an earlier `ray start` left one here. It
    ends after an error, Ctrl-C and SIGTERM too. Trainers in the block use it. Who wants to talk to
    it needs its token, which Ray takes from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or the file
    ``.ray/auth_token`` in the home directory, where it writes a new one if there is none; with
    RAY_AUTH_MODE=disabled it asks for none.

    Args:
        workers: how many there is room for, also where the machine has fewer CPUs; None for as many
            as the machine has CPUs.
        cpus_per_worker: as `ResourceConfig` has it.
        verbose: whether Ray's notices about itself are shown.

    Yields:
        The address of the cluster's control store, "host:port".

    Raises:
        ConfigurationError: an argument is wrong, or this process is connected to Ray already.

    Example:
        >>> with local(workers=2) as address:  # doctest: +SKIP
        ...     sgd = DistributedSGD(model_creator, num_workers=2)
    """
    if workers is not None:
        require_count("workers", workers)
    require_count("cpus_per_worker", cpus_per_worker)
    require_choice("verbose", verbose, (False, True))
    cpus = None if workers is None else workers * cpus_per_worker
    from steepest.runtime.connection import start_ray

    with _session("start a Ray", lambda: start_ray(cpus, verbose=verbose)) as address:
        yield address


@contextlib.contextmanager
def existing(address: str | None = None, *, timeout: float = 10.0) -> Iterator[str]:
    """Connect to a running Ray for the length of a block, and disconnect; the cluster stays.

    This process must run on a node of the cluster. A cluster that asks for a token wants the same
    one here: in RAY_AUTH_TOKEN or in the file that RAY_AUTH_TOKEN_PATH names, or, with
    RAY_AUTH_MODE=token, in ``.ray/auth_token`` in the home directory. Where one of the first two is
    set and RAY_AUTH_MODE is not, RAY_AUTH_MODE=token is set in this process.

    Args:
        address: of the cluster's control store, "host:port"; None for what RAY_ADDRESS says.
        timeout: seconds until a control store must have answered there.

    Yields:
        The address, as the cluster has it.

    Raises:
        ConfigurationError: an argument is wrong, this process is connected to Ray already, no Ray
            listens at the address, or it refuses: the message has its words.
        DeadlineError: nothing has answered at the address in time.
    """
    require_seconds("timeout", timeout)
    reached = cluster_address() if address is None else address
    if reached is None:
        raise ConfigurationError(
            "existing() was given no address and RAY_ADDRESS is not set: give the one that "
            "`ray start --head` printed, such as existing('10.0.0.1:6379'), or use local()"
        )
    host, port = _host_and_port(reached)
    from steepest.runtime.connection import connect

    def begin() -> None:
        _knock(host, port, timeout)
        connect(reached)

    with _session(f"connect to the Ray at {reached}", begin) as connected:
        yield connected


@contextlib.contextmanager
def _session(what: str, begin: Callable[[], None]) -> Iterator[str]:
    """Connect (`begin`) for a block; disconnect also when the connecting is interrupted."""
    # `what`: is done, for errors.
    import ray

    from steepest.runtime.connection import end_ray
    from steepest.runtime.signals import end_on_sigterm

    if ray.is_initialized():
        raise ConfigurationError(
            f"asked to {what}, but this process is connected to the Ray at "
            f"{ray.get_runtime_context().gcs_address} already: leave that first (ray.shutdown()), "
            "or train without this block, on the Ray that is there"
        )
    try:
        try:
            begin()
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"could not {what}: {error}") from error
        end_on_sigterm()
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        end_ray()


def _host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of an address.

    Raises:
        ConfigurationError: it is not "host:port" or, over IPv6, "[host]:port".
    """
    match = re.fullmatch(r"(?:\[([^][/]+)\]|([^][/:]+)):(\d+)", address, re.ASCII)
    if match is None or not 0 < int(match[3]) < 65536:
        raise ConfigurationError(
            f"the address of a running Ray must be 'host:port', as `ray start --head` prints it "
            f"('[host]:port' over IPv6), not {address!r}; a ray:// client is not enough, since the driver and the "
            "workers talk to each other: run on a node of the cluster"
        )
    return match[1] or match[2], int(match[3])


def _knock(host: str, port: int, timeout: float) -> None:
    """Check that a server of the kind of Ray's control store answers; Ray itself would ask for minutes.

    It speaks HTTP/2 (gRPC), whose first frame in each direction holds settings. Where Ray uses TLS it is only
    checked that something takes connections.

    Raises:
        ConfigurationError: nothing listens there, something else does, or there is no such host.
        DeadlineError: nothing answered in time.
    """
    answer = b""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout) as connection:
            if ray_uses_tls():
                return
            connection.sendall(_PREFACE)
            while len(answer) < len(_SETTINGS) and (part := connection.recv(len(_SETTINGS))):
                answer += part
    except TimeoutError:
        raise DeadlineError(
            f"nothing at {where} answered within {timeout:g} s: is the head node up, is this the "
            "port of its control store (GCS), and does a firewall let this machine through?"
        ) from None
    except ConnectionResetError:
        pass  # by something that has not understood
    except OSError as error:
        raise ConfigurationError(
            f"no Ray at {where}: {error}; start one there with `ray start --head --port={port}`, "
            "or correct the address"
        ) from None
    if answer[3:4] != _SETTINGS[3:4]:
        raise ConfigurationError(
            f"what listens at {where} is not the control store (GCS) of a Ray: give the address "
            "that `ray start --head` printed, not that of the dashboard"
        )
