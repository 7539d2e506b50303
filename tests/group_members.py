"""Members of one process group of torch's in this process, with a program for them, and jobs of processes."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from steepest import AllreduceStrategy
from steepest.core.transport.router import Router
from steepest.core.transport.sockets import WireTransport
from steepest.strategies.process_groups.extension import ProcessGroups
from steepest.strategies.process_groups.group import (
    Await,
    Broadcast,
    Gather,
    GroupPlace,
    Groups,
    ProcessGroup,
    Program,
    Reduce,
    Ways,
)
from steepest.strategies.process_groups.torch_groups import TorchGroups
from tests.core import models
from tests.jobs_on_processes import trained

SECONDS = 30.0


class Member:
    """A member of a group in this process, on a router of its own."""

    def __init__(
        self, rank: int, size: int, seconds: float, others: list[Member], groups: Groups
    ) -> None:
        self.router = Router()
        wire = WireTransport(b"0123456789abcdef", (), "here", self.router.destination, "tcp")
        self.router.use(wire)
        wire.listen("127.0.0.1")
        self.router.start(f"member {rank}")
        self.failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.others = others
        ways = Ways(self.router, self.tell, self.failures.put)
        self.group: ProcessGroup = groups.join(
            GroupPlace(1, rank, size, seconds, torch.device("cpu")), ways
        )

    def tell(self, key: str, value: bytes) -> None:
        for other in self.others:
            if other is not self:
                other.group.take_key(key, value)

    def run(self, program: Callable[[Member], Program]) -> None:
        self.router.call(partial(self.group.run, program(self))).result(SECONDS)


@contextmanager
def group(
    size: int, seconds: float = SECONDS, groups: Groups | None = None
) -> Iterator[list[Member]]:
    """Members of one group, of Gloo by default."""
    members: list[Member] = []
    made = [Member(rank, size, seconds, members, groups or TorchGroups()) for rank in range(size)]
    members += made
    for member in made:  # keys that were told before all members were known
        for key, value in list(member.group._store._values.items()):  # type: ignore[attr-defined]
            member.tell(key, value)
    try:
        yield made
    finally:
        for member in made:
            member.router.call(member.group.end).result(SECONDS)
            member.router.stop()


def added(member: Member) -> Program:
    """Adds up and gathers ranks, and says what came of it."""
    rank = float(member.others.index(member))
    last = len(member.others) - 1
    total, own, given = torch.full((3,), rank), torch.full((3,), rank), torch.full((3,), rank)
    yield Await(lambda: True)
    yield Reduce(total, "a test")
    yield Reduce(own, "a test", root=last)
    yield Broadcast(given, last, "a test")
    found = yield Gather(torch.tensor([rank]))
    assert found is not None
    sums = [total.tolist(), total.tolist() if rank != last else own.tolist()]
    member.done.put((sums, given.tolist(), [float(part) for part in found]))


def weights(
    workers: int,
    creator: Any = models.classifier,
    groups: Groups | None = None,
    *,
    sharded: bool = False,
    nonfinite: str = "refuse",
) -> dict[str, torch.Tensor]:
    """Return what processes train in two epochs."""
    strategy = AllreduceStrategy(
        data_plane="gloo", sharded=sharded, nonfinite=nonfinite, chunk_bytes=64
    )
    return trained(creator, workers, strategy=strategy, extensions=(ProcessGroups(groups),))
