"""The process that Ray runs for one server of a parameter server, and how its users reach it."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import ray

from steepest.cluster.process import Process, connect, on_router
from steepest.errors import DeadlineError, PeerLostError
from steepest.messages.message import COORDINATOR, server_peer
from steepest.parameter_server.connection import Connection
from steepest.parameter_server.group import ServerGroup
from steepest.tensors.shared_memory import allocate
from steepest.transport.channel import Address
from steepest.transport.ray_calls import Bytes, Callee, CallTransport
from steepest.transport.router import Router
from steepest.transport.sockets import WireTransport

log = logging.getLogger(__name__)


class ServerProcess(Process):
    """A Ray actor's body: one server of a group."""

    def open_group(self, group: ServerGroup, index: int, initial: Mapping[str, Bytes], ways: str) -> Address | None:
        """Host a server, and listen; return where, or None when it is reached by calls.

        Args:
            initial: memory of all arrays by name.
            ways: how it talks, "ray" for calls.
        """
        address = self._open_server(group, index, initial, ways)
        self.router.finished.add_done_callback(_log_end)
        return address

    @on_router
    def _open_server(self, group: ServerGroup, index: int, initial: Mapping[str, Bytes], ways: str) -> Address | None:
        peers = (server_peer(index), COORDINATOR) if index == 0 else (server_peer(index),)
        layout = group.arrays.layout
        weights = allocate(layout.nbytes)
        memory = weights.numpy()
        for chunk in layout.chunks:
            at = chunk.start
            for piece in chunk.slices if group.owners[chunk.index] == index else ():
                size = chunk.dtype.itemsize
                begin, end = piece.start * size, piece.stop * size
                memory[at : at + end - begin] = initial[layout.entries[piece.entry].name][begin:end]
                at += end - begin
        group.host_server(self.router, index, weights)
        if ways == "ray":
            self._use(CallTransport(self.router.destination, peers))
            return None
        wire = WireTransport(self._token, peers, self._place.node, self.router.destination, ways)
        self._use(wire)
        return wire.listen(self._place.host)


@dataclass(frozen=True)
class Access:
    """All that a process needs to use a parameter server.

    Attributes:
        servers: their actors; whoever holds these keeps the servers alive.
        addresses: where they listen; empty when they are reached by calls.
        token: the secret of these servers.
        timeout: seconds that a call may take.
        max_in_flight: pushes that nobody waits for.
        ways: how everybody talks; "ray" for calls.
    """

    group: ServerGroup
    servers: tuple[Any, ...]
    addresses: tuple[Address, ...]
    token: bytes = field(repr=False)
    timeout: float
    max_in_flight: int
    ways: str

    @property
    def name(self) -> str:
        """For errors."""
        return f"parameter server of {self.group.num_servers} servers"

    def callees(self, count: int) -> list[Address | Callee]:
        """How to reach the first servers."""
        if self.addresses:
            return list(self.addresses[:count])
        hosted = [(server_peer(i), COORDINATOR) if i == 0 else (server_peer(i),) for i in range(count)]
        return [Callee(peers, actor) for peers, actor in zip(hosted, self.servers, strict=False)]

    def connect(self) -> Connection:
        """Connects this process.

        Raises:
            PeerLostError: a server is not there any more.
            DeadlineError: one does not answer.
            ConfigurationError: this process is on another node, which the transport excludes.
        """
        deadline = time.monotonic() + self.timeout
        router = Router()
        index = secrets.randbelow(1 << 31)
        peers = self.group.user_peers(index)
        transport: WireTransport | CallTransport = CallTransport(router.destination, peers)
        usable = _same_ray()
        if self.addresses:
            usable = _always
            node = ray.get_runtime_context().get_node_id()
            transport = WireTransport(self.token, peers, node, router.destination, self.ways)
        router.use(transport)
        pusher, client = self.group.host_user(router, index)
        connection = Connection(
            router,
            pusher,
            client,
            name=self.name,
            timeout=self.timeout,
            max_in_flight=self.max_in_flight,
            usable=usable,
        )
        try:
            for other in self.callees(len(self.servers)):
                router.attach(connect(transport, other, max(deadline - time.monotonic(), 0.001)))
        except PeerLostError as error:
            connection.close()
            raise PeerLostError(f"{self.name}: {error}: it was shut down or died") from error
        except DeadlineError as error:
            connection.close()
            raise DeadlineError(f"{self.name}: {error}") from error
        except BaseException:
            connection.close()
            raise
        return connection


def _log_end(finished: Future[None]) -> None:
    """Nobody watches these servers: what ended one must be found in its log."""
    if finished.exception() is not None:
        log.error("a server of a parameter server ended", exc_info=finished.exception())


def _always() -> bool:
    return True


def _same_ray() -> Callable[[], bool]:
    """Tells whether Ray is still what it is now; a call that finds it shut down would begin another one."""
    job = ray.get_runtime_context().get_job_id()
    return lambda: ray.is_initialized() and ray.get_runtime_context().get_job_id() == job
