"""Collective: messages between members, and operations in which every member takes part."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

import torch

from steepest.errors import ConfigurationError


class Work(Protocol):
    """A message that is being sent or received."""

    def wait(self) -> None:
        """Return when the tensor is received, or may be written to again after it was sent."""


class CompletedWork:
    """A message that needs no waiting."""

    def wait(self) -> None:
        """Return at once."""


class Collective(ABC):
    """Messages and exchanges among the members of one generation; a subclass moves the bytes.

    Messages from one member to another arrive in order. Beyond them every member calls the same
    operations in the same order: a description travels with each message, if the subclass can send
    one, and its receiver compares it. Inputs are never written to, so that an operation that fails can
    be tried again among other members. Tensors are on the CPU.

    Every method, and every wait, raises `DeadlineError`, naming the member that is awaited, when it
    takes longer than the collective's deadline, and `PeerLostError` once a member is lost or the
    collective is aborted.

    Args:
        rank: of this member, from 0.
        size: number of members.
        deadline: of each wait, in seconds.
    """

    def __init__(self, rank: int, size: int, deadline: float) -> None:
        self.rank = rank
        self.size = size
        self.deadline = deadline
        self._operation = ""  # in progress, if any
        self._whole = ""  # dtype and shape of its tensor, where its messages are parts of that

    @abstractmethod
    def _send(self, memory: torch.Tensor, to: int, what: str) -> Work:
        """Begin to send bytes (flat, uint8), at least one; `what` they are, in words."""

    @abstractmethod
    def _receive(self, memory: torch.Tensor, source: int, what: str) -> Work:
        """Begin to receive exactly as many bytes as `memory` (flat, uint8) has, at least one; `what` they should be."""

    @contextlib.contextmanager
    def within(self, operation: str, whole: torch.Tensor | None = None) -> Iterator[None]:
        """Mark messages in this context as parts of an operation, unless they already belong to one.

        Args:
            operation: as a user calls it, with its arguments.
            whole: the tensor of which messages are parts; None if each has its own dtype and shape.
        """
        before = self._operation, self._whole
        if not self._operation:
            self._operation = operation
            self._whole = "" if whole is None else _form(whole)
        try:
            yield
        finally:
            self._operation, self._whole = before

    def _named(self, tensor: torch.Tensor) -> str:
        """Return in words what the message of a tensor is."""
        return f"{self._operation or 'a message'} of {self._whole or _form(tensor)}"

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End every operation in progress, here and at the other members; there is no way back."""

    def isend(self, tensor: torch.Tensor, to: int) -> Work:
        """Begin to send a contiguous tensor of any shape and dtype; an empty one is not sent.

        Raises:
            ConfigurationError: the tensor is not contiguous or not on the CPU, or there is no such
                other member.
        """
        memory = self._memory(tensor, to)
        return self._send(memory, to, self._named(tensor)) if memory.numel() else CompletedWork()

    def irecv(self, tensor: torch.Tensor, source: int) -> Work:
        """Begin to receive the next message of a member into a contiguous tensor of just its size.

        Raises:
            ConfigurationError: as `isend`; and, in `wait`, the message has another size, dtype or
                shape, or is of another operation.
        """
        memory = self._memory(tensor, source)
        if not memory.numel():
            return CompletedWork()
        return self._receive(memory, source, self._named(tensor))

    def _memory(self, tensor: torch.Tensor, other: int) -> torch.Tensor:
        """Return the bytes of a tensor, for a message between this member and another."""
        if not 0 <= other < self.size or other == self.rank:
            others = [str(rank) for rank in range(self.size) if rank != self.rank]
            raise ConfigurationError(
                f"member {self.rank} cannot exchange a message with member {other}: "
                f"{', '.join(others) or 'none'} is "
                "another"
            )
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ConfigurationError(
                f"a message is a contiguous tensor on the CPU, not one of strides "
                f"{tensor.stride()} on {tensor.device}: use .cpu() and .contiguous()"
            )
        return tensor.detach().view(-1).view(torch.uint8)

    def exchange(
        self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]
    ) -> None:
        """Send to some members while receiving from others; tensors by rank."""
        received = [self.irecv(tensor, other) for other, tensor in incoming.items()]
        sent = [self.isend(tensor, other) for other, tensor in outgoing.items()]
        for work in received + sent:
            work.wait()

    def _others(self) -> list[int]:
        return [other for other in range(self.size) if other != self.rank]

    def broadcast(self, vector: torch.Tensor, root: int) -> torch.Tensor:
        """Return the root's vector, one-dimensional and of one length and dtype everywhere."""
        with self.within(f"broadcast(src={root})", vector):
            if self.rank == root:
                self.exchange(dict.fromkeys(self._others(), vector), {})
                return vector.clone()
            received = torch.empty_like(vector)
            self.exchange({}, {root: received})
            return received

    def barrier(self) -> None:
        """Return when every member has called it, by dissemination (Hensgen et al., 1988)."""
        distance = 1
        with self.within("barrier()"):
            while distance < self.size:
                to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
                self.exchange({to: torch.zeros(1)}, {source: torch.empty(1)})
                distance *= 2


def check_message(source: int, sent: str, rank: int, awaited: str) -> None:
    """Check that a message of one member is what another awaits, both in words; ConfigurationError otherwise."""
    if sent != awaited:
        raise ConfigurationError(
            f"member {source} sent {sent} where member {rank} awaits {awaited}: all members must call the same "
            "operations in the same order, with tensors of one shape and dtype"
        )


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
