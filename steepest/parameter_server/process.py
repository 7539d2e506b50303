"""The process of one server of a parameter server, which a Ray actor runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future

from steepest.cluster.process import Process, on_router
from steepest.messages.message import COORDINATOR, server_peer
from steepest.optim.spec import OptimizerSpec
from steepest.parameter_server.group import ServerGroup
from steepest.parameter_server.hosting import host_server
from steepest.tensors.memory import Bytes
from steepest.tensors.shared_memory import allocate
from steepest.transport.channel import Address
from steepest.transport.ray_calls import CallTransport
from steepest.transport.sockets import WireTransport

log = logging.getLogger(__name__)


class ServerProcess(Process):
    """A process that hosts one server of a group, and the coordinator beside the first."""

    def open_group(
        self,
        group: ServerGroup,
        spec: OptimizerSpec | None,
        index: int,
        initial: Mapping[str, Bytes],
        ways: str,
    ) -> Address | None:
        """Host a server and listen for connections. Called once, on any thread.

        Args:
            group: the servers' arrays.
            spec: the optimizer; None where updates are added to the arrays.
            index: of the server.
            initial: memory (flat, uint8) of all arrays by name.
            ways: the transport, see `ParameterServer`; "ray" for actor calls.

        Returns:
            The address at which the server listens; None when it is reached by actor calls.
        """
        address = self._open_server(group, spec, index, initial, ways)
        self.router.finished.add_done_callback(_log_end)
        return address

    @on_router
    def _open_server(
        self,
        group: ServerGroup,
        spec: OptimizerSpec | None,
        index: int,
        initial: Mapping[str, Bytes],
        ways: str,
    ) -> Address | None:
        """Carry out `open_group` on the router's thread."""
        peers = (server_peer(index), COORDINATOR) if index == 0 else (server_peer(index),)
        layout = group.arrays.layout
        weights = allocate(layout.nbytes)
        memory = weights.numpy()
        for chunk in layout.chunks:
            at = chunk.start
            for piece in chunk.slices if group.owners[chunk.index] == index else ():
                size = chunk.element.itemsize
                begin, end = piece.start * size, piece.stop * size
                memory[at : at + end - begin] = initial[layout.entries[piece.entry].name][begin:end]
                at += end - begin
        host_server(group, spec, self.router, index, weights)
        if ways == "ray":
            self._use(CallTransport(self.router.destination, peers))
            return None
        wire = WireTransport(
            self._token,
            peers,
            self._place.node,
            self.router.destination,
            ways,
            identity=self._identity,
        )
        self._use(wire)
        return wire.listen(self._place.host)


def _log_end(finished: Future[None]) -> None:
    """Log the error that ended a server: no other process asks for it."""
    if finished.exception() is not None:
        log.error("a server of a parameter server ended", exc_info=finished.exception())
