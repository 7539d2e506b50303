"""Collective operations for users' code, close to torch.distributed's; results are returned.

They work among the members of the *current* collective: in workers of `DistributedSGD` all of them,
elsewhere that of `using`. Every member calls the same operations in the same order, with tensors of
the same shape and dtype, on the CPU. Inputs are never written to. Reductions take the members in
the order of their ranks, or go around the ring; all members get the same bits.

Every function raises `ConfigurationError` if there is no current collective, or for tensors that
cannot travel; `DeadlineError`, naming the member that is awaited, when it takes too long;
`PeerLostError` when a member is dead, or its function has raised.

Example:
    >>> from steepest import collectives
    >>> from steepest.testing import InProcessCollective
    >>> with collectives.using(InProcessCollective.group(1)[0]):
    ...     collectives.all_reduce(torch.tensor([3.0, 4.0]), op="mean")
    tensor([3., 4.])
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch

from steepest.errors import ConfigurationError
from steepest.strategies.collectives.members import MemberCollective
from steepest.strategies.collectives.protocol import Collective, Work
from steepest.strategies.collectives.ring import OPS, check_reduction, ring_allreduce
from steepest.strategies.collectives.shared_memory_reduce import shared_allreduce

#: The current collective, or why there is none.
_current: ContextVar[Collective | str] = ContextVar(
    "collective",
    default="there is no current collective here: call it in a worker (sgd.foreach_worker), on the "
    "thread that runs your function, or within collectives.using(...)",
)


def _leave() -> None:
    """Remove the collective in a forked child: its process is no member, and has no connections."""
    if not isinstance(_current.get(), str):
        _current.set(
            "this process was forked from a member of the collective and is none itself: call "
            "collective operations in that process, not in a DataLoader worker, say"
        )


os.register_at_fork(after_in_child=_leave)


class Receiving:
    """A tensor that is being received."""

    def __init__(self, tensor: torch.Tensor, work: Work) -> None:
        self._tensor, self._work = tensor, work

    def wait(self) -> torch.Tensor:
        """Return the tensor when it is here."""
        self._work.wait()
        return self._tensor


@contextlib.contextmanager
def using(collective: Collective | str) -> Iterator[None]:
    """Make a collective the current one of this thread inside of this context.

    Args:
        collective: or why there is none, for the error.
    """
    token = _current.set(collective)
    try:
        yield
    finally:
        _current.reset(token)


def install(collective: Collective | str) -> None:
    """Make a collective the current one of this thread; see `using`."""
    _current.set(collective)


def current() -> Collective:
    """Return the current collective; ConfigurationError: there is none, and why."""
    collective = _current.get()
    if isinstance(collective, str):
        raise ConfigurationError(collective)
    return collective


def rank() -> int:
    """Return this member's number, from 0."""
    return current().rank


def size() -> int:
    """Return the number of members."""
    return current().size


def barrier() -> None:
    """Return when every member has called it."""
    current().barrier()


def isend(tensor: torch.Tensor, dst: int) -> Work:
    """Begin to send a tensor; after the result's `wait` the tensor may be written to again."""
    return current().isend(tensor.detach().contiguous(), dst)


def irecv(like: torch.Tensor, src: int) -> Receiving:
    """Begin to receive a tensor of the shape and dtype of `like`, which `wait` returns."""
    received = _empty(like)
    return Receiving(received, current().irecv(received, src))


def send(tensor: torch.Tensor, dst: int) -> None:
    """Send a tensor to member `dst`, and return when it may be written to again."""
    isend(tensor, dst).wait()


def recv(like: torch.Tensor, src: int) -> torch.Tensor:
    """Return the next tensor that member `src` sends here, of the shape and dtype of `like`."""
    return irecv(like, src).wait()


def broadcast(tensor: torch.Tensor, src: int) -> torch.Tensor:
    """Return the tensor of member `src`."""
    with current().within(f"broadcast(src={_member(src)})", tensor):
        return current().broadcast(tensor.detach().contiguous().view(-1), src).view(tensor.shape)


def all_reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Return the members' tensors reduced by "sum", "mean", "min", "max" or "product".

    In shared memory when all members share a host, else around the ring.
    """
    members = current()
    if isinstance(members, MemberCollective) and members.one_host:
        return shared_allreduce(tensor, members, op)
    return ring_allreduce(tensor, members, op)


def reduce(tensor: torch.Tensor, dst: int, op: str = "sum") -> torch.Tensor | None:
    """Return the reduced tensors as `all_reduce` does on member `dst`; None on the others."""
    check_reduction(tensor, op)
    with current().within(f"reduce(dst={_member(dst)}, op={op!r})"):
        parts = gather(tensor, dst)
    return None if parts is None else _reduced(parts, op)


def reduce_scatter(tensors: Sequence[torch.Tensor], op: str = "sum") -> torch.Tensor:
    """Return the members' `tensors[rank()]` reduced as by `all_reduce`.

    Args:
        tensors: one for every member, by rank, of one shape and dtype.
        op: as for `all_reduce`.
    """
    check_reduction(tensors[0], op)
    own = _one_each(tensors)
    parts = [
        tensor.clone() if other == rank() else torch.empty_like(own[0])
        for other, tensor in enumerate(own)
    ]
    with current().within(f"reduce_scatter(op={op!r})"):
        current().exchange(_others(own), _others(parts))
    return _reduced(parts, op)


def scatter(
    like: torch.Tensor, tensors: Sequence[torch.Tensor] | None = None, src: int = 0
) -> torch.Tensor:
    """Return this member's tensor of those from member `src`.

    Args:
        like: has the shape and dtype of each.
        tensors: on member `src`, one for every member, by rank.
        src: the member that gives them.
    """
    with current().within(f"scatter(src={_member(src)})"):
        if rank() != src:
            return recv(like, src)
        own = _one_each(tensors or ())
        current().exchange(_others(own), {})
        return own[src].clone()


def gather(tensor: torch.Tensor, dst: int = 0) -> list[torch.Tensor] | None:
    """Return the tensors of all members, by rank, on member `dst`; None on the others."""
    with current().within(f"gather(dst={_member(dst)})"):
        if rank() != dst:
            send(tensor, dst)
            return None
        everyone = range(size())
        parts = [tensor.detach().clone() if other == dst else _empty(tensor) for other in everyone]
        current().exchange({}, _others(parts))
        return parts


def all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all members, by rank."""
    own = tensor.detach().contiguous()
    parts = [own.clone() if other == rank() else _empty(own) for other in range(size())]
    with current().within("all_gather()"):
        current().exchange(_others([own] * size()), _others(parts))
    return parts


def _empty(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype)


def _others(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    return {other: tensor for other, tensor in enumerate(tensors) if other != rank()}


def _member(other: int) -> int:
    if not 0 <= other < size():
        raise ConfigurationError(f"there is no member {other}: give one of 0 to {size() - 1}")
    return other


def _one_each(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if len(tensors) != size():
        raise ConfigurationError(
            f"{len(tensors)} tensors for {size()} members: give one for each, by rank"
        )
    return [tensor.detach().contiguous() for tensor in tensors]


def _reduced(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Return tensors reduced in the order of ranks; the first one is written to."""
    total = parts[0]
    for part in parts[1:]:
        OPS[op](total, part, out=total)
    return total / len(parts) if op == "mean" else total
