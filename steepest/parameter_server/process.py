"""The process of one server of a parameter server, which a Ray actor runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from steepest.core.engine.server import Server
from steepest.core.messages.gradients import Decision
from steepest.core.messages.message import COORDINATOR, server_peer
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.tensors.memory import Bytes
from steepest.core.tensors.shared_memory import allocate
from steepest.core.transport.channel import Address
from steepest.core.transport.sockets import WireTransport
from steepest.parameter_server.group import ServerGroup
from steepest.parameter_server.hosting import committed_in, host_server
from steepest.parameter_server.succession import Succession
from steepest.runtime.chunk_transfer import RetainedChunks
from steepest.runtime.process import ProcessActor, on_router
from steepest.runtime.survivors import Survivor, catch_up, state_of
from steepest.runtime.tls.connections import Identity, encryption_with

log = logging.getLogger(__name__)

_MOST_COMMITTED = 1 << 16  # pushes that successors remember


class ServerProcess(ProcessActor):
    """A process that hosts one server of a group, the first one also the coordinator; see `ProcessActor`."""

    def __init__(self, name: str, token: bytes, identity: Identity | None = None) -> None:
        self._serving: Server | None = None  # whose state counts
        self._succession: Succession | None = None
        super().__init__(name, token, 1, identity=identity)

    @on_router
    def open_group(
        self,
        group: ServerGroup,
        spec: OptimizerSpec | None,
        index: int,
        initial: Mapping[str, Bytes],
        ways: str,
    ) -> Address:
        """Host server `index`; return the address at which it listens.

        Called once, on any thread.

        Args:
            spec: the optimizer; None where updates are added to the arrays.
            initial: memory (flat, uint8) of all arrays by name.
            ways: the transport, see `ParameterServer`.
        """
        layout = group.arrays.layout
        weights = allocate(layout.nbytes)
        memory = weights.numpy()
        for chunk in layout.chunks:
            at = chunk.start
            for piece in chunk.slices if index in group.holders[chunk.index] else ():
                size = chunk.element.itemsize
                begin, end = piece.start * size, piece.stop * size
                memory[at : at + end - begin] = initial[layout.entries[piece.entry].name][begin:end]
                at += end - begin
        self._serving = host_server(group, spec, self.router, index, weights)
        self.router.finished.add_done_callback(_log_end)
        return self._listen(index, ways)

    def _listen(self, index: int, ways: str) -> Address:
        """Use a new transport; return where it listens."""
        peers = (server_peer(index), COORDINATOR) if index == 0 else (server_peer(index),)
        wire = WireTransport(
            self._token,
            peers,
            self._place.node,
            self.router.destination,
            ways,
            encryption=encryption_with(self._identity),
        )
        self._use(wire)
        return wire.listen(self._place.host)

    # -- succession ----------------------------------------------------------------------------

    @on_router
    def serves(self) -> bool:
        """Return whether the process hosts a server that is connected to the others.

        Ray starts the process of a dead server again, without a server.
        """
        lost = any(peer.role in ("server", "coordinator") for peer in self.router.lost_peers)
        return self._serving is not None and not lost

    @on_router
    def halt(self) -> list[Decision] | None:
        """Close all connections, but keep the server's state until `succeed`.

        Return the coordinator's decisions that it has. None without a server.
        """
        self.router.clear()
        self._use(self._idle())
        self._servers = []
        if self._serving is None:
            self._retained = RetainedChunks()
            return None
        self._retained = RetainedChunks([self._serving])
        return self._serving.decisions.recent

    @on_router
    def survive(
        self, heard: Sequence[Sequence[Decision]]
    ) -> tuple[Survivor, dict[tuple[int, int], int]]:
        """Catch up with the servers whose `halt` returned `heard`.

        Return what this one holds, and the pushes that it knows of.
        """
        assert self._serving is not None
        catch_up(self._serving, heard)
        known = {} if self._succession is None else self._succession.committed
        committed = {**known, **committed_in(self._serving.decisions.recent)}
        return state_of([self._serving]), dict(list(committed.items())[-_MOST_COMMITTED:])

    @on_router
    def reopen(
        self, group: ServerGroup, spec: OptimizerSpec | None, index: int, version: int, ways: str
    ) -> Address | None:
        """Host a server that goes on from a version once `take_over` has given it its chunks; see `open_group`."""
        if not self.router.finished.done() and self._serving is None:
            self.router.finished.add_done_callback(_log_end)
        weights = allocate(group.arrays.layout.nbytes)
        self._servers = [host_server(group, spec, self.router, index, weights, version)]
        return self._listen(index, ways)

    @on_router
    def succeed(self, succession: Succession) -> None:
        """Begin to serve after a succession, which users may learn of from now on."""
        if self._servers:
            (self._serving,) = self._servers
        self._retained = RetainedChunks()
        self._succession = succession

    @on_router
    def succession(self, after: int) -> Succession | None:
        """Return the newest succession if its number is above `after`."""
        newest = self._succession
        return newest if newest is not None and newest.number > after else None


def _log_end(finished: Future[None]) -> None:
    """Log the error that ended a server: no other process asks for it."""
    if finished.exception() is not None:
        log.error("a server of a parameter server ended", exc_info=finished.exception())
