"""The Ray actor of one server of a parameter server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steepest.runtime.tls.connections import Identity


def _forwarded(name: str) -> Callable[..., Any]:
    """Return a method that calls the server process' method of that name."""

    def call(self: ServerActor, *arguments: Any) -> Any:
        return getattr(self._process, name)(*arguments)

    return call


class ServerActor:
    """A `ServerProcess` that is imported only where the actor runs; its methods are described there."""

    # A process that receives an actor's handle imports the actor's class: with `ServerProcess` as the actor, users
    # would import torch.

    def __init__(self, name: str, token: bytes, identity: Identity | None = None) -> None:
        from steepest.parameter_server.process import ServerProcess

        self._process = ServerProcess(name, token, identity)

    open_group = _forwarded("open_group")
    connect = _forwarded("connect")
    serves = _forwarded("serves")
    halt = _forwarded("halt")
    survive = _forwarded("survive")
    reopen = _forwarded("reopen")
    give = _forwarded("give")
    take_over = _forwarded("take_over")
    succeed = _forwarded("succeed")
    succession = _forwarded("succession")
    exchange = _forwarded("exchange")
    place = _forwarded("place")
    doing = _forwarded("doing")
    counters = _forwarded("counters")
