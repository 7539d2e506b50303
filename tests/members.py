"""Members of collectives as threads, over every implementation that there is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from steepest.core.messages.message import member_peer
from steepest.core.transport.router import Router
from steepest.core.transport.sockets import WireTransport
from steepest.strategies.collectives.members import MemberCollective
from steepest.strategies.collectives.protocol import Collective
from steepest.strategies.collectives.torch_group import TorchCollective
from steepest.testing import InProcessCollective

TOKEN = b"correct horse battery staple"
SECONDS = 60.0

#: Makes members, given their number and, in seconds, the deadline; what is to be closed goes onto
#: the stack.
MakeGroup = Callable[..., list[Any]]


def together(members: Sequence[Collective], do: Callable[[Any], Any]) -> list[Any]:
    """What each member's thread returned; raises what the first of them raised."""
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(do, members))


class Member(MemberCollective):
    """A member whose router a test may use; `generation` is the one in which it is."""

    def __init__(
        self, rank: int, size: int, router: Router, *arguments: Any, **options: Any
    ) -> None:
        self.router, self.generation = router, 0
        super().__init__(
            rank, size, router, *arguments, generation=lambda: self.generation, **options
        )

    @property
    def transport(self) -> WireTransport:
        """Through which its messages go."""
        assert isinstance(self.router.transport, WireTransport)
        return self.router.transport


def wire_group(
    closing: contextlib.ExitStack,
    size: int,
    deadline: float = SECONDS,
    *,
    ways: str = "wire",
    apart: bool = False,
) -> list[Member]:
    """Members that talk over Unix-domain sockets, or, apart, over TCP; each has a router of its own."""
    routers, wires = [Router() for _ in range(size)], []
    for rank, router in enumerate(routers):
        node = f"node {rank}" if apart else "here"
        wire = WireTransport(TOKEN, (member_peer(rank),), node, router.destination, ways)
        router.use(wire)
        wires.append(wire)
        closing.callback(wire.close)
    addresses = [wire.listen("127.0.0.1") for wire in wires]
    one_host = not apart and wires[0].lends
    return [
        Member(
            rank,
            size,
            router,
            deadline,
            lambda other, seconds, wire=wire: wire.connect(addresses[other], seconds),
            one_host=one_host,
        )
        for rank, (router, wire) in enumerate(zip(routers, wires, strict=True))
    ]


def torch_groups(size: int, deadline: float = SECONDS) -> list[Any]:
    """One process group of Gloo's for each thread."""
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        make = lambda rank: dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=deadline))  # noqa: E731
        return list(pool.map(make, range(size)))


def _torch(
    closing: contextlib.ExitStack, size: int, deadline: float = SECONDS
) -> list[TorchCollective]:
    return [TorchCollective(group, deadline) for group in torch_groups(size, deadline)]


def _in_process(
    closing: contextlib.ExitStack, size: int, deadline: float = SECONDS
) -> list[InProcessCollective]:
    return InProcessCollective.group(size, deadline)


def _unix(
    closing: contextlib.ExitStack, size: int, deadline: float = SECONDS
) -> list[MemberCollective]:
    return wire_group(closing, size, deadline)


def _tcp(
    closing: contextlib.ExitStack, size: int, deadline: float = SECONDS
) -> list[MemberCollective]:
    return wire_group(closing, size, deadline, apart=True)


GROUPS: dict[str, MakeGroup] = {
    "in-process": _in_process,
    "unix": _unix,
    "tcp": _tcp,
    "torch": _torch,
}


@contextlib.contextmanager
def group_of(kind: str) -> Iterator[MakeGroup]:
    """Makes groups of a kind; they are closed with the block."""
    with contextlib.ExitStack() as closing:
        yield lambda size, deadline=SECONDS: GROUPS[kind](closing, size, deadline)


def pattern(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers that differ from member to member; their sums are exact in every dtype."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * (rank + 3) + rank) % 7).reshape(shape).to(dtype)
