"""The Ray actor that one server of a parameter server is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from steepest.parameter_server.group import ServerGroup
from steepest.tensors.memory import Bytes
from steepest.transport.channel import Address
from steepest.transport.ray_calls import Answer, Callee

if TYPE_CHECKING:
    from steepest.cluster.process import Place
    from steepest.optim.spec import OptimizerSpec


class ServerActor:
    """A `ServerProcess`, which is imported where the actor runs.

    Whoever receives an actor's handle imports the actor's class: users of a server would import
    torch with it.

    Args:
        name: for threads and logs.
        token: the secret of these servers.
    """

    def __init__(self, name: str, token: bytes) -> None:
        from steepest.parameter_server.process import ServerProcess

        self._process = ServerProcess(name, token, 1)

    def open_group(
        self,
        group: ServerGroup,
        spec: OptimizerSpec | None,
        index: int,
        initial: Mapping[str, Bytes],
        ways: str,
    ) -> Address | None:
        """See `ServerProcess.open_group`."""
        return self._process.open_group(group, spec, index, initial, ways)

    def connect(self, others: Sequence[Address | Callee], timeout: float) -> None:
        """See `Process.connect`."""
        self._process.connect(others, timeout)

    def exchange(self, call: bytes, *payloads: Bytes) -> Answer:
        """See `Process.exchange`."""
        return self._process.exchange(call, *payloads)

    def place(self) -> Place:
        """See `Process.place`."""
        return self._process.place()

    def counters(self) -> dict[str, int]:
        """See `Process.counters`."""
        return self._process.counters()
