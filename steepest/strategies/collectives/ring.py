"""All-reduce around a ring: a member sends 2 (size - 1) / size bytes per byte of the tensor.

In the first half of the hops (reduce-scatter) each member ends with one finished slice of the
result, in the second (all-gather) the slices travel around; Patarasuk & Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009. `docs/howto/collectives.md` compares its cost
with that of other ways.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from steepest.core.data.sampler import even_share
from steepest.core.tensors.half_precision import WIRE_DTYPES
from steepest.errors import ConfigurationError
from steepest.strategies.collectives.protocol import Collective, Work

OPS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
PIECE_BYTES = 2 << 20
_AHEAD = 16  # pieces for which memory is ready before they come; others have to be copied
_SENT_AHEAD = 4  # pieces that may wait to leave


def check_reduction(tensor: torch.Tensor, op: str) -> None:
    """Check that a tensor can be reduced by an operation; ConfigurationError otherwise."""
    if op not in OPS:
        raise ConfigurationError(f'op="{op}": give one of {", ".join(OPS)}')
    if op == "mean" and not tensor.is_floating_point():
        raise ConfigurationError(
            f'op="mean" of {tensor.dtype}: give a floating-point tensor, or op="sum"'
        )
    if op in ("min", "max") and tensor.is_complex():
        raise ConfigurationError(f'op="{op}" of {tensor.dtype}: complex numbers have no order')


def ring_allreduce(
    tensor: torch.Tensor, collective: Collective, op: str = "sum", wire_dtype: str | None = None
) -> torch.Tensor:
    """Return all members' tensors reduced, on every member, to the same bits.

    Args:
        tensor: on the CPU, of one shape and dtype on all members; it is not written to.
        collective: the members.
        op: "sum", "mean" (of floating-point numbers), "min", "max" or "product".
        wire_dtype: "fp16" or "bf16" to send float32 in half the bytes, and 4 bytes for each piece
            of 2 MB: they are added up in float32, and rounded at each hop. A piece whose values do
            not fit is scaled by a power of two.

    Returns:
        A new contiguous tensor of that shape.

    Raises:
        ConfigurationError: such tensors cannot be reduced or sent so.
        DeadlineError, PeerLostError: see `Collective`.

    Example:
        >>> from steepest.testing import InProcessCollective
        >>> ring_allreduce(torch.tensor([1, 2]), InProcessCollective.group(1)[0])
        tensor([1, 2])
    """
    check_reduction(tensor, op)
    wire = _Wire(tensor.dtype, wire_dtype)
    how = "" if wire.whole else f", wire_dtype={wire_dtype!r}"
    with collective.within(f"all_reduce(op={op!r}{how})", tensor):
        return _around(tensor, collective, op, wire)


def _around(tensor: torch.Tensor, collective: Collective, op: str, wire: _Wire) -> torch.Tensor:
    """Return the reduced tensors, whose pieces go around the ring twice: to be reduced, then to all members."""
    size, rank = collective.size, collective.rank
    left, right = (rank - 1) % size, (rank + 1) % size
    flat = tensor.detach().contiguous().view(-1)
    result = torch.empty_like(flat)
    own, whole = _cut(flat, size), _cut(result, size)
    way = [
        (hop, piece)
        for hop in range(1, 2 * size - 1)
        for piece in range(len(own[(rank - hop) % size]))
    ]
    sent = deque(collective.isend(wire.pack(piece), right) for piece in own[rank] if size > 1)
    kept = len(sent) + _SENT_AHEAD  # pieces in flight while all members are equally fast
    coming: deque[tuple[Work, torch.Tensor]] = deque()
    posted = 0
    for hop, piece in way:
        # Memory for the next pieces; that of finished ones is the result's.
        while posted < len(way) and len(coming) < _AHEAD:
            ahead, number = way[posted]
            place = whole[(rank - ahead) % size][number]
            memory = torch.empty_like(place) if ahead < size and wire.whole else wire.buffer(place)
            coming.append((collective.irecv(memory, left), memory))
            posted += 1
        work, arrived = coming.popleft()
        work.wait()
        place = whole[(rank - hop) % size][piece]
        if hop < size:
            mean_of = size if hop == size - 1 and op == "mean" else 1
            arrived = wire.pack(
                _combined(wire.unpack(arrived), own[(rank - hop) % size][piece], op, mean_of)
            )
        if hop >= size - 1:  # finished, and rounded, by its owner
            wire.unpack(arrived, place)
        if hop < 2 * size - 2:
            sent.append(collective.isend(arrived, right))
        while len(sent) > kept:
            sent.popleft().wait()
    if size == 1:
        result.copy_(flat)
    for work in sent:
        work.wait()
    return result.view(tensor.shape)


def _combined(total: torch.Tensor, piece: torch.Tensor, op: str, mean_of: int) -> torch.Tensor:
    """Return a piece reduced into `total`, in place, divided by a number of members."""
    OPS[op](total, piece, out=total)
    if mean_of > 1:
        total /= mean_of
    return total


def _cut(vector: torch.Tensor, size: int) -> list[tuple[torch.Tensor, ...]]:
    """Return the members' slices of a vector, each in pieces."""
    elements = PIECE_BYTES // vector.element_size()
    slices = [vector[slice(*even_share(len(vector), rank, size))] for rank in range(size)]
    return [torch.split(part, elements) if len(part) else () for part in slices]


class _Wire:
    """The form in which pieces travel: as they are, or in half precision behind a scale."""

    def __init__(self, dtype: torch.dtype, wire_dtype: str | None) -> None:
        if wire_dtype is not None and wire_dtype not in WIRE_DTYPES:
            raise ConfigurationError(
                f'wire_dtype="{wire_dtype}": give {", ".join(WIRE_DTYPES)} or None'
            )
        self._half = (
            WIRE_DTYPES[wire_dtype] if wire_dtype is not None and dtype is torch.float32 else None
        )

    @property
    def whole(self) -> bool:
        """Whether pieces travel as they are."""
        return self._half is None

    def buffer(self, piece: torch.Tensor) -> torch.Tensor:
        """Return the memory to receive a piece: `piece` itself if it travels as it is."""
        return piece if self._half is None else piece.new_empty(2 + len(piece), dtype=self._half)

    def pack(self, piece: torch.Tensor) -> torch.Tensor:
        """Return a piece in the form in which it travels."""
        if self._half is None:
            return piece
        packed = self.buffer(piece)
        finite = torch.nan_to_num(piece, nan=0.0, posinf=0.0, neginf=0.0)
        largest = float(torch.stack(torch.aminmax(finite)).abs().max())
        scale = 1.0
        while largest > scale * torch.finfo(self._half).max:
            scale *= 2.0
        packed[:2].view(torch.float32).fill_(scale)
        packed[2:].copy_(piece if scale == 1.0 else piece / scale)
        return packed

    def unpack(self, packed: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a piece that has travelled, written to `out` if that is given."""
        if self._half is None:
            return packed if out is None or out is packed else out.copy_(packed)
        values = packed[2:].float()
        scale = packed[:2].view(torch.float32)
        values *= scale
        return values if out is None else out.copy_(values)
