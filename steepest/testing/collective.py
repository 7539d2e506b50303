"""A collective between threads."""

from __future__ import annotations

import threading

import torch

from steepest.errors import DeadlineError, PeerLostError
from steepest.sampler import even_share


class InProcessCollective:
    """A `Collective` between threads of one process: slow, simple, what others are held against.

    Make one for each member with `InProcessCollective.group`.
    """

    def __init__(self, rank: int, size: int, board: _Board) -> None:
        self.rank = rank
        self.size = size
        self._board = board

    @classmethod
    def group(cls, size: int, deadline: float = 10.0) -> list[InProcessCollective]:
        """Members that know each other; `deadline` is in seconds."""
        board = _Board(size, deadline)
        return [cls(rank, size, board) for rank in range(size)]

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor, by rank."""
        return self._board.exchange(self.rank, tensor.clone())

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        """The sum over members of this member's slice."""
        begin, end = even_share(len(vector), self.rank, self.size)
        first, *rest = [other[begin:end] for other in self._exchange(vector)]
        for other in rest:
            first = first + other
        return first

    def all_gather(self, part: torch.Tensor, length: int) -> torch.Tensor:
        """The slices of all members, put together."""
        whole = torch.cat(self._exchange(part))
        assert len(whole) == length, "the parts are not the slices of a vector of that length"
        return whole

    def broadcast(self, vector: torch.Tensor, root: int) -> torch.Tensor:
        """The root's vector."""
        return self._exchange(vector)[root]

    def barrier(self) -> None:
        """Returns when every member has called it."""
        self._exchange(torch.empty(0))

    def abort(self, reason: str) -> None:
        """Ends every operation in progress."""
        self._board.abort(reason)


class _Board:
    """Where threads lay down tensors for each other, one round after the other."""

    def __init__(self, size: int, deadline: float) -> None:
        self._size = size
        self._deadline = deadline
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, torch.Tensor]] = {}
        self._taken: dict[int, int] = {}
        self._next = [0] * size
        self._aborted = ""

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        with self._changed:
            number = self._next[rank]
            self._next[rank] += 1
            laid = self._rounds.setdefault(number, {})
            laid[rank] = tensor
            self._changed.notify_all()
            there = self._changed.wait_for(lambda: self._aborted or len(laid) == self._size, self._deadline)
            if self._aborted:
                raise PeerLostError(f"the collective was aborted: {self._aborted}")
            if not there:
                missing = [str(other) for other in range(self._size) if other not in laid]
                raise DeadlineError(f"waited {self._deadline:g} s in vain for members {', '.join(missing)}")
            self._taken[number] = self._taken.get(number, 0) + 1
            if self._taken[number] == self._size:
                del self._rounds[number], self._taken[number]
            return [laid[other] for other in range(self._size)]

    def abort(self, reason: str) -> None:
        with self._changed:
            self._aborted = self._aborted or reason
            self._changed.notify_all()
