"""The Ray actor of one server of a parameter server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from steepest.parameter_server.group import ServerGroup
from steepest.tensors.memory import Bytes
from steepest.transport.channel import Address
from steepest.transport.ray_calls import Answer, Callee

if TYPE_CHECKING:
    from steepest.cluster.activity import Activity
    from steepest.cluster.locations import Place
    from steepest.engine.chunk_transfer import ChunkState
    from steepest.engine.survivors import ServerState
    from steepest.messages.gradients import Decision
    from steepest.optim.spec import OptimizerSpec
    from steepest.parameter_server.succession import Succession
    from steepest.transport.tls import Identity


class ServerActor:
    """A `ServerProcess` that is imported only where the actor runs."""

    # A process that receives an actor's handle imports the actor's class: with `ServerProcess` as the actor, users
    # would import torch.

    def __init__(self, name: str, token: bytes, identity: Identity | None = None) -> None:
        from steepest.parameter_server.process import ServerProcess

        self._process = ServerProcess(name, token, identity)

    def open_group(
        self,
        group: ServerGroup,
        spec: OptimizerSpec | None,
        index: int,
        initial: Mapping[str, Bytes],
        ways: str,
    ) -> Address | None:
        """Host a server, see `ServerProcess.open_group`."""
        return self._process.open_group(group, spec, index, initial, ways)

    def connect(self, others: Sequence[Address | Callee], timeout: float) -> None:
        """Connect to other servers, see `Process.connect`."""
        self._process.connect(others, timeout)

    def serves(self) -> bool:
        """Return whether the process hosts a server, see `ServerProcess.serves`."""
        return self._process.serves()

    def halt(self) -> list[Decision] | None:
        """Close all connections, see `ServerProcess.halt`."""
        return self._process.halt()

    def survive(
        self, heard: Sequence[Sequence[Decision]]
    ) -> tuple[ServerState, dict[tuple[int, int], int]]:
        """Catch up with other servers, see `ServerProcess.survive`."""
        return self._process.survive(heard)

    def reopen(
        self, group: ServerGroup, spec: OptimizerSpec | None, index: int, version: int, ways: str
    ) -> Address | None:
        """Host a server that goes on, see `ServerProcess.reopen`."""
        return self._process.reopen(group, spec, index, version, ways)

    def give(self, chunks: Sequence[int]) -> dict[int, ChunkState]:
        """Return the state of chunks, see `Process.give`."""
        return self._process.give(chunks)

    def take_over(self, *given: Mapping[int, ChunkState]) -> None:
        """Give the server the state of its chunks, see `Process.take_over`."""
        self._process.take_over(*given)

    def succeed(self, succession: Succession) -> None:
        """Begin to serve as of a succession, see `ServerProcess.succeed`."""
        self._process.succeed(succession)

    def succession(self, after: int) -> Succession | None:
        """Return the newest succession, see `ServerProcess.succession`."""
        return self._process.succession(after)

    def exchange(self, call: bytes, *payloads: Bytes) -> Answer:
        """Take messages that arrive by an actor call, see `Process.exchange`."""
        return self._process.exchange(call, *payloads)

    def place(self) -> Place:
        """Return where the process runs, see `Process.place`."""
        return self._process.place()

    def doing(self) -> Activity:
        """Return what the process is doing, see `Process.doing`."""
        return self._process.doing()

    def counters(self) -> dict[str, int]:
        """Return the counters of the process, see `Process.counters`."""
        return self._process.counters()
