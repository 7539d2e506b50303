"""All-reduce among members of one host, in memory that they lend each other.

Each member adds up one slice where the others' memory lies, and all copy it. Of a tensor of n bytes
among W members each copies (W - 1)/W n into memory that it lends, reads (W - 1)/W n of the others'
to reduce its slice, and copies the other slices: no byte of it passes through a socket.
"""

from __future__ import annotations

from collections import deque

import torch

from steepest.core.data.sampler import even_share
from steepest.strategies.collectives.members import MemberCollective, ReceiveWork
from steepest.strategies.collectives.ring import OPS, check_reduction

PIECE_BYTES = 4 << 20  # small enough to be read from the processor's cache after it is written
_STAGE, _TOTALS = 0, 1  # numbers of a member's memory, see `MemberCollective.lending_buffer`


def shared_allreduce(
    tensor: torch.Tensor, members: MemberCollective, op: str = "sum"
) -> torch.Tensor:
    """Return all members' tensors reduced in the order of ranks; for arguments and errors see `ring_allreduce`.

    Lent memory is used again by the next operation, without a message that it was read: a member's staged part has been
    read when it has the others' totals, and its own totals when the others stage the next operation's. Memory of
    results that are no longer held is also used again: fresh pages may take several times as long.
    """
    check_reduction(tensor, op)
    flat = tensor.detach().contiguous().view(-1)
    if members.size == 1 or not len(flat):
        return flat.clone().view(tensor.shape)
    try:
        with members.within(f"all_reduce(op={op!r})", tensor):
            return _Operation(flat, members, op).run().view(tensor.shape)
    except BaseException:
        members.drop_lending_buffers()  # another member may go on reading there
        raise


class _Operation:
    """One all-reduce; tensors are flat, and a piece is the same part of every member's slice."""

    def __init__(self, flat: torch.Tensor, members: MemberCollective, op: str) -> None:
        size, rank = members.size, members.rank
        self._given, self._members, self._op = flat, members, op
        self._result = members.result(flat.nbytes).view(flat.dtype)
        self._others = [(rank + distance) % size for distance in range(1, size)]
        self._shares = [even_share(len(flat), member, size) for member in range(size)]
        self._step = PIECE_BYTES // flat.element_size()
        self._pieces = -(-self._shares[0][1] // self._step)  # no slice is larger than the first
        begin, end = self._shares[rank]
        itemsize = flat.element_size()
        self._stage = members.lending_buffer(_STAGE, flat.nbytes).view(flat.dtype)
        self._totals = members.lending_buffer(_TOTALS, (end - begin) * itemsize).view(flat.dtype)
        self._staged: dict[int, deque[ReceiveWork]] = {other: deque() for other in self._others}
        self._reduced: dict[int, deque[ReceiveWork]] = {other: deque() for other in self._others}

    def run(self) -> torch.Tensor:
        """Return the result; the next piece is staged while the other members read one."""
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
        return slice(
            min(begin + piece * self._step, end), min(begin + (piece + 1) * self._step, end)
        )

    def _await(
        self, receipts: dict[int, deque[ReceiveWork]], source: int, member: int, piece: int
    ) -> None:
        """Begin to receive a piece, in the order in which every member lends."""
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
        parts = {
            other: self._staged[other].popleft().bytes().view(own.dtype) for other in self._others
        }
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
