"""All-reduce among members of one host: each adds up one slice where the others' memory lies, and all copy it.

Of a tensor of n bytes among W members each copies (W - 1)/W n into memory that it lends, reads (W - 1)/W n of the
others' to reduce its slice, and copies the other slices: no byte of it passes through a socket.
"""

from __future__ import annotations

from collections import deque

import torch

from steepest.collectives.members import MemberCollective, Receipt
from steepest.collectives.ring import OPS, check_reduction
from steepest.data.sampler import even_share

PIECE_BYTES = 4 << 20  # what one member writes the next one reads from the processor's cache
_STAGE, _TOTALS = 0, 1  # the rooms of a member


def shared_allreduce(tensor: torch.Tensor, members: MemberCollective, op: str = "sum") -> torch.Tensor:
    """The sum (or else) of all members' tensors, in the order of ranks; see `ring_allreduce`.

    Memory that is lent is kept for the next time, and nobody needs to say that it has been read. What a member stages
    has been when it has the others' totals; its own totals have been when the others stage the next operation's.
    Memory of results that are no longer held is used again: fresh pages may take several times as long as the rest.
    """
    check_reduction(tensor, op)
    given = tensor.detach().contiguous().view(-1)
    if members.size == 1 or not len(given):
        return given.clone().view(tensor.shape)
    try:
        return _Operation(given, members, op).run().view(tensor.shape)
    except BaseException:
        members.leave_rooms()  # somebody may be reading there, for who knows how long
        raise


class _Operation:
    """One all-reduce; tensors are flat, and a piece is the same part of every member's slice."""

    def __init__(self, given: torch.Tensor, members: MemberCollective, op: str) -> None:
        size, rank = members.size, members.rank
        self._given, self._members, self._op = given, members, op
        self._result = members.result(given.nbytes).view(given.dtype)
        self._others = [(rank + distance) % size for distance in range(1, size)]
        self._shares = [even_share(len(given), member, size) for member in range(size)]
        self._step = PIECE_BYTES // given.element_size()
        self._pieces = -(-self._shares[0][1] // self._step)  # nobody's slice is larger than the first
        begin, end = self._shares[rank]
        itemsize = given.element_size()
        self._stage = members.room(_STAGE, given.nbytes).view(given.dtype)
        self._totals = members.room(_TOTALS, (end - begin) * itemsize).view(given.dtype)
        self._staged: dict[int, deque[Receipt]] = {other: deque() for other in self._others}
        self._reduced: dict[int, deque[Receipt]] = {other: deque() for other in self._others}

    def run(self) -> torch.Tensor:
        """While others read a piece the next one is staged."""
        for other in self._others:
            self._await(self._staged, other, self._members.rank, 0)
            for piece in range(self._pieces):
                self._await(self._staged, other, self._members.rank, piece + 1)
                self._await(self._reduced, other, other, piece)
        self._lend(0)
        for piece in range(self._pieces):
            self._lend(piece + 1)
            self._reduce(piece)
            if piece:
                self._collect(piece - 1)
        self._collect(self._pieces - 1)
        self._members.pump()
        return self._result

    def _span(self, member: int, piece: int) -> slice:
        begin, end = self._shares[member]
        return slice(min(begin + piece * self._step, end), min(begin + (piece + 1) * self._step, end))

    def _await(self, receipts: dict[int, deque[Receipt]], source: int, member: int, piece: int) -> None:
        """In the order in which every member lends."""
        if nbytes := self._given[self._span(member, piece)].nbytes:
            receipts[source].append(self._members.borrow(nbytes, source))

    def _lend(self, piece: int) -> None:
        for other in self._others:
            span = self._span(other, piece)
            if len(part := self._stage[span]):
                self._members.lend(part.copy_(self._given[span]).view(torch.uint8), other)

    def _reduce(self, piece: int) -> None:
        own = self._given[self._span(self._members.rank, piece)]
        if not len(own):
            return
        parts = {other: self._staged[other].popleft().bytes().view(own.dtype) for other in self._others}
        parts[self._members.rank] = own
        total = self._totals[piece * self._step :][: len(own)]
        combine = OPS[self._op]
        combine(parts[0], parts[1], out=total)
        for member in range(2, self._members.size):
            combine(total, parts[member], out=total)
        if self._op == "mean":
            total /= self._members.size
        for other in self._others:
            self._members.lend(total.view(torch.uint8), other)
        self._result[self._span(self._members.rank, piece)] = total

    def _collect(self, piece: int) -> None:
        for other in self._others:
            part = self._result[self._span(other, piece)]
            if len(part):
                part.copy_(self._reduced[other].popleft().bytes().view(part.dtype))
