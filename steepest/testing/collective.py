"""A collective between threads of one process."""

from __future__ import annotations

import threading
from collections import Counter

import torch

from steepest.errors import ConfigurationError, DeadlineError, PeerLostError
from steepest.strategies.collectives.protocol import Collective, CompletedWork, Work, check_message


class InProcessCollective(Collective):
    """A `Collective` between threads of one process: slow and simple, the reference for the others.

    Make one for each member with `InProcessCollective.group`.

    Attributes:
        bytes_sent: by this member.
    """

    def __init__(self, rank: int, size: int, deadline: float, post: _Post) -> None:
        super().__init__(rank, size, deadline)
        self.bytes_sent = 0
        self._post = post
        self._sent: Counter[int] = Counter()
        self._awaited: Counter[int] = Counter()

    @classmethod
    def group(cls, size: int, deadline: float = 10.0) -> list[InProcessCollective]:
        """Return the members of a group.

        Args:
            size: their number.
            deadline: of each wait, in seconds.
        """
        post = _Post()
        return [cls(rank, size, deadline, post) for rank in range(size)]

    def _send(self, memory: torch.Tensor, to: int, what: str) -> Work:
        self._post.put((self.rank, to, self._sent[to]), (memory.clone(), what))
        self._sent[to] += 1
        self.bytes_sent += memory.numel()
        return CompletedWork()

    def _receive(self, memory: torch.Tensor, source: int, what: str) -> Work:
        place = source, self.rank, self._awaited[source]
        work = _Receipt(self, self._post, place, memory, what)
        self._awaited[source] += 1
        return work

    def abort(self, reason: str) -> None:
        """End every operation in progress, of all members."""
        self._post.abort(reason)


class _Receipt:
    def __init__(
        self,
        member: InProcessCollective,
        post: _Post,
        place: tuple[int, int, int],
        memory: torch.Tensor,
        what: str,
    ) -> None:
        self._member, self._post, self._place = member, post, place
        self._memory, self._what = memory, what

    def wait(self) -> None:
        received, sent = self._post.take(self._place, self._member.deadline)
        check_message(self._place[0], sent, self._member.rank, self._what)
        if received.numel() != self._memory.numel():
            raise ConfigurationError(
                f"member {self._place[0]} sent {received.numel()} bytes, {self._memory.numel()} are "
                "awaited"
            )
        self._memory.copy_(received)


class _Post:
    """The messages that threads have sent each other, by sender, receiver and number."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sent: dict[tuple[int, int, int], tuple[torch.Tensor, str]] = {}
        self._aborted = ""

    def put(self, place: tuple[int, int, int], message: tuple[torch.Tensor, str]) -> None:
        with self._changed:
            self._raise_if_aborted()
            self._sent[place] = message
            self._changed.notify_all()

    def take(self, place: tuple[int, int, int], deadline: float) -> tuple[torch.Tensor, str]:
        with self._changed:
            came = self._changed.wait_for(lambda: self._aborted or place in self._sent, deadline)
            self._raise_if_aborted()
            if not came:
                raise DeadlineError(
                    f"member {place[1]} waited {deadline:g} s in vain for a message by member "
                    f"{place[0]}"
                )
            return self._sent.pop(place)

    def abort(self, reason: str) -> None:
        with self._changed:
            self._aborted = self._aborted or reason
            self._changed.notify_all()

    def _raise_if_aborted(self) -> None:
        if self._aborted:
            raise PeerLostError(f"the collective was aborted: {self._aborted}")
