"""The Collective protocol: messages between members, and operations in which every member takes part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from steepest.data.sampler import even_share
from steepest.errors import ConfigurationError


class Work(Protocol):
    """A message that is being sent or received."""

    def wait(self) -> None:
        """Return when the message is received, or, on the sender, when its tensor may be written to
        again.
        """


class Collective(Protocol):
    """Messages, reductions and exchanges among the members of one generation.

    Messages from one member to another arrive in order. Beyond them every member calls the same
    operations in the same order. Inputs are never written to, so that an operation that fails can
    be tried again among other members. Sums are formed in the order of ranks, on every member
    alike, so that all of them hold the same bits. Tensors are on the CPU; those of reductions and
    exchanges are one-dimensional, of equal length and dtype everywhere.

    Every method, and every wait, raises `DeadlineError`, naming the member that is awaited, when it
    takes longer than the collective's deadline, and `PeerLostError` once a member is dead or the
    collective is aborted.
    """

    @property
    def rank(self) -> int:
        """This member's number, from 0."""

    @property
    def size(self) -> int:
        """The number of members."""

    def isend(self, tensor: torch.Tensor, to: int) -> Work:
        """Begin to send a contiguous tensor of any shape and dtype; an empty one is not sent.

        Raises:
            ConfigurationError: the tensor is not contiguous or not on the CPU, or there is no such
                other member.
        """

    def irecv(self, tensor: torch.Tensor, source: int) -> Work:
        """Begin to receive the next message of a member into a contiguous tensor of just its size.

        Raises:
            ConfigurationError: as `isend`; and, in `wait`, the message has another size.
        """

    def exchange(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]) -> None:
        """Send to some members while receiving from others; tensors by rank."""

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the sum over members of this member's slice: `even_share(len(vector), rank, size)`.

        Args:
            vector: (n,), on every member.
        """

    def all_gather(self, part: torch.Tensor, length: int) -> torch.Tensor:
        """Return the (length,) vector of which each member has a slice, cut by `even_share`.

        Args:
            part: this member's slice.
            length: of the whole vector.
        """

    def broadcast(self, vector: torch.Tensor, root: int) -> torch.Tensor:
        """Return the vector of member `root`."""

    def barrier(self) -> None:
        """Return when every member has called it."""

    def abort(self, reason: str) -> None:
        """End every operation in progress, here and at the other members.

        The collective stays unusable.
        """


class Done:
    """A message that needs no waiting."""

    def wait(self) -> None:
        """Return at once."""


class PointToPoint(ABC):
    """A `Collective` whose operations are made of messages; subclasses send and receive these.

    Args:
        rank: of this member.
        size: number of members.
        deadline: of each wait, in seconds.
    """

    def __init__(self, rank: int, size: int, deadline: float) -> None:
        self.rank = rank
        self.size = size
        self.deadline = deadline

    def isend(self, tensor: torch.Tensor, to: int) -> Work:
        """Begin to send; see `Collective.isend`."""
        memory = self._memory(tensor, to)
        return self._send(memory, to) if memory.numel() else Done()

    def irecv(self, tensor: torch.Tensor, source: int) -> Work:
        """Begin to receive; see `Collective.irecv`."""
        memory = self._memory(tensor, source)
        return self._receive(memory, source) if memory.numel() else Done()

    @abstractmethod
    def _send(self, memory: torch.Tensor, to: int) -> Work:
        """Begin to send flat bytes, at least one."""

    @abstractmethod
    def _receive(self, memory: torch.Tensor, source: int) -> Work:
        """Begin to receive just that many bytes, at least one."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End every operation in progress."""

    def _memory(self, tensor: torch.Tensor, other: int) -> torch.Tensor:
        """Return the bytes of a tensor, for a message between this member and another.

        Raises:
            ConfigurationError: there is no such other member, or the tensor cannot travel.
        """
        if not 0 <= other < self.size or other == self.rank:
            others = [str(rank) for rank in range(self.size) if rank != self.rank]
            raise ConfigurationError(
                f"member {self.rank} cannot exchange a message with member {other}: {', '.join(others) or 'none'} is "
                "another"
            )
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ConfigurationError(
                f"a message is a contiguous tensor on the CPU, not one of strides {tensor.stride()} on "
                f"{tensor.device}: use .cpu() and .contiguous()"
            )
        return tensor.detach().view(-1).view(torch.uint8)

    def exchange(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]) -> None:
        """Send to some members while receiving from others; tensors by rank."""
        received = [self.irecv(tensor, other) for other, tensor in incoming.items()]
        sent = [self.isend(tensor, other) for other, tensor in outgoing.items()]
        for work in received + sent:
            work.wait()

    def _others(self) -> list[int]:
        return [other for other in range(self.size) if other != self.rank]

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the sum over members of this member's slice."""
        slices = [vector[slice(*even_share(len(vector), rank, self.size))] for rank in range(self.size)]
        parts = {other: torch.empty_like(slices[self.rank]) for other in self._others()}
        self.exchange({other: slices[other] for other in parts}, parts)
        total = parts.get(0, slices[0]).clone()
        for rank in range(1, self.size):
            total += slices[rank] if rank == self.rank else parts[rank]
        return total

    def all_gather(self, part: torch.Tensor, length: int) -> torch.Tensor:
        """Return the slices of all members, put together."""
        whole = part.new_empty(length)
        slices = [whole[slice(*even_share(length, rank, self.size))] for rank in range(self.size)]
        if len(part) != len(slices[self.rank]):
            raise ConfigurationError(
                f"member {self.rank} of {self.size} gave {len(part)} elements: its slice of {length} has "
                f"{len(slices[self.rank])}"
            )
        slices[self.rank].copy_(part)
        self.exchange(dict.fromkeys(self._others(), part), {other: slices[other] for other in self._others()})
        return whole

    def broadcast(self, vector: torch.Tensor, root: int) -> torch.Tensor:
        """Return the vector of member `root`."""
        if self.rank == root:
            self.exchange(dict.fromkeys(self._others(), vector), {})
            return vector.clone()
        received = torch.empty_like(vector)
        self.exchange({}, {root: received})
        return received

    def barrier(self) -> None:
        """Return when every member has called it (dissemination: Hensgen, Finkel & Manber, 1988)."""
        distance = 1
        while distance < self.size:
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            self.exchange({to: torch.zeros(1)}, {source: torch.empty(1)})
            distance *= 2
