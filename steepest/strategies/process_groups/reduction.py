"""Adds up one gradient of all workers among the members of a process group, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from steepest.core.messages.gradients import HostPush
from steepest.core.messages.message import PushId
from steepest.core.tensors.half_precision import sum_dtype
from steepest.core.tensors.layout import ParameterLayout
from steepest.core.tensors.memory import sum_of_squares
from steepest.errors import DataPlaneError
from steepest.strategies.process_groups.group import Await, Gather, Operation, Program, Reduce

#: Bytes of a first chunk up to which it is gathered with the header: one exchange in the step of a small model.
_WITH_HEADER = 1 << 16


def event_after(tensor: torch.Tensor) -> torch.Event | None:
    """Return an event after all work so far of this thread's stream on a tensor's GPU; None on the CPU."""
    if tensor.is_cpu:
        return None
    return torch.accelerator.current_stream(tensor.device).record_event()


def continue_after(event: torch.Event | None, tensor: torch.Tensor) -> None:
    """Let this thread's stream on a tensor's GPU wait for an event."""
    if event is not None:
        torch.accelerator.current_stream(tensor.device).wait_event(event)


class HandedChunk(NamedTuple):
    """A complete chunk of a worker's gradient, see `ChunkReady`."""

    payload: torch.Tensor  # flat uint8, empty where there is no gradient; it is not written to
    unit: float
    total: float
    absent: frozenset[int]
    made: torch.Event | None = None  # on its GPU, behind what writes it, see `continue_after`


@dataclass(eq=False)
class OwnGradient:
    """A worker's gradient of a step, as its chunks become ready on the router's thread."""

    generation: int
    pulled: int
    incarnation: int
    sequence: int
    held_back: bool = False  # whether it may be taken back, so that nothing of it is added up yet
    cancelled: bool = False  # whether it is computed anew, and nothing of it was added up
    chunks: dict[int, HandedChunk] = field(default_factory=dict)

    def has(self, chunk: int) -> bool:
        """Return whether a chunk can be added up, or never will be."""
        return self.cancelled or (chunk in self.chunks and not self.held_back)


class _GradientHeader(NamedTuple):
    """A member's description of its gradient, sent before its first chunk."""

    push: PushId
    pulled: int
    unit: float
    total: float

    @property
    def weighs(self) -> bool:
        return self.unit != 0.0


class _Mean(NamedTuple):
    """The way to form a weighted mean of gradients as servers do, so that they need not copy it."""

    unit: float  # of all gradients, which are divided by their number when they are added up; 0 where units differ
    total: float  # summed weight

    @classmethod
    def of(cls, headers: list[_GradientHeader]) -> _Mean | None:
        """Return that of some gradients; None if all weigh nothing."""
        units = {header.unit for header in headers if header.weighs}
        total = math.fsum(header.total for header in headers)
        if not units or not total:
            return None
        return cls(units.pop() if len(units) == 1 else 0.0, total)

    def factor(self, unit: float) -> float:
        """Return the factor of a gradient in this unit before it is added."""
        return 1.0 if self.unit else unit / self.total

    def finish(self, elements: torch.Tensor) -> None:
        """Turn the sum into the mean: divided by a count, so that the mean of equal values is that value."""
        if self.unit and self.unit != self.total:
            elements.div_(self.total / self.unit)


class Sums:
    """The memory in which chunks are added up, by chunk: its elements, then a flag for each parameter's part.

    A flag counts the members that have a gradient of the part, so that a parameter without any gradient is known
    without a further operation.

    Args:
        layout: of the model.
        narrow: the dtype in which float32 chunks are added up among members; None for their own.
        device: where the memory is.

    Attributes:
        lent: chunks whose memory is being read on the router's thread; it is not written to meanwhile.
    """

    def __init__(
        self,
        layout: ParameterLayout,
        narrow: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._layout, self._narrow, self._device = layout, narrow, device
        self._memory: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.lent: set[int] = set()

    def of(self, chunk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the memory of a chunk: all of it, its elements, its flags; of the chunk's dtype."""
        return self._in(self._layout.chunks[chunk].dtype, chunk)

    def to_add_up(self, chunk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return memory as `of` does, in the dtype in which the chunk is added up, which may be its own."""
        return self._in(self.dtype(chunk), chunk)

    def dtype(self, chunk: int) -> torch.dtype:
        """Return the dtype in which a chunk is added up among members: the narrow one, or float32 at least."""
        own = self._layout.chunks[chunk].dtype
        return self._narrow if self._narrow and own is torch.float32 else sum_dtype(own)

    def _in(
        self, dtype: torch.dtype, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spec = self._layout.chunks[chunk]
        size = spec.nbytes // spec.dtype.itemsize
        if (chunk, dtype) not in self._memory:
            count = size + len(spec.slices)
            self._memory[chunk, dtype] = torch.empty(count, dtype=dtype, device=self._device)
        memory = self._memory[chunk, dtype]
        return memory, memory[:size], memory[size:]


class Reduction:
    """Adds up one gradient of all members, in the order of the chunks, and passes each sum on.

    A chunk that one server holds is added up at that server's worker alone, others at all workers; a worker passes on
    the chunks that its own server holds.

    Args:
        layout: of the model.
        holders: by chunk, the servers that hold it.
        worker: the rank of this member.
        checked: whether a sum that is not finite is followed by each member's gradient, so that the server can name
            the worker at fault, or add up what a narrow dtype does not hold.
        own: the gradient of this member.
        sums: memory that no other reduction uses meanwhile.
        push: is given the sum of each chunk as a push that stands for all workers, or each worker's by itself.
    """

    def __init__(
        self,
        layout: ParameterLayout,
        holders: Sequence[Sequence[int]],
        worker: int,
        own: OwnGradient,
        sums: Sums,
        push: Callable[[HostPush, torch.Tensor | None], None],
        *,
        checked: bool,
    ) -> None:
        self._layout, self._worker, self._checked = layout, worker, checked
        self._is_own = [worker in servers for servers in holders]
        self._roots = [servers[0] if len(servers) == 1 else None for servers in holders]
        self._rooted: list[int] = []  # chunks of which one member alone has the sum
        self._spoilt: set[int] = set()  # those of them whose sum, known here, is not finite
        self._own, self._sums, self._push = own, sums, push
        self.chunk = -1  # that is awaited or added up, for errors
        self.doing = "adding up gradients with"

    def program(self) -> Program:
        """Yield the operations of the reduction; see `Program`.

        Raises:
            DataPlaneError: another member's gradient is of another version.
        """
        own, lent, headers = self._own, self._sums.lent, list[_GradientHeader]()
        for chunk in self._layout.dense_chunks:
            self.chunk = chunk
            yield Await(lambda chunk=chunk: own.has(chunk) and chunk not in lent)  # type: ignore[misc]
            if own.cancelled:
                return
            handed = own.chunks[chunk]
            if headers:
                yield from self._reduce(chunk, handed, headers)
            elif self._layout.chunks[chunk].nbytes <= _WITH_HEADER:
                headers = yield from self._gather_first(chunk, handed)
            else:
                gathered = yield Gather(self._own_header(handed))
                headers = self._headers(gathered or [])
                yield from self._reduce(chunk, handed, headers)
        yield from self._tell_spoilt(headers)

    def _own_header(self, first: HandedChunk) -> torch.Tensor:
        """Return this member's header, as int64."""
        own = self._own
        numbers = torch.tensor([own.incarnation, own.sequence, own.pulled], dtype=torch.int64)
        weights = torch.tensor([first.unit, first.total], dtype=torch.float64)
        return torch.cat([numbers, weights.view(torch.int64)])

    def _headers(self, gathered: list[torch.Tensor]) -> list[_GradientHeader]:
        return [self._header(rank, values) for rank, values in enumerate(gathered)]

    def _header(self, rank: int, values: torch.Tensor) -> _GradientHeader:
        incarnation, sequence, pulled = values[:3].tolist()
        unit, total = values[3:].view(torch.float64).tolist()
        if pulled != self._own.pulled:
            raise DataPlaneError(
                f"worker {rank} has a gradient from version {pulled} where worker {self._worker} has one from "
                f"version {self._own.pulled}"
            )
        return _GradientHeader(PushId(rank, incarnation, sequence), pulled, unit, total)

    def _gather_first(
        self, chunk: int, handed: HandedChunk
    ) -> Generator[Operation, list[torch.Tensor] | None, list[_GradientHeader]]:
        """Gather the headers with the first chunk, which is small, and push its sum; return the headers."""
        memory, elements, flags = self._sums.of(chunk)
        self._contribute(chunk, handed, 1.0, elements, flags)
        header = self._own_header(handed).view(torch.uint8).to(memory.device)
        gathered = yield Gather(torch.cat([header, memory.view(torch.uint8)]))
        assert gathered is not None
        size = header.numel()
        headers = self._headers([part[:size].view(torch.int64) for part in gathered])
        parts = [part[size:].view(memory.dtype) for part in gathered]
        mean = _Mean.of(headers)
        if mean is None:
            self._pass_on(chunk, headers, 0.0, None, None)
            return headers
        # in a dtype of its own only where that is wider: what is this small is not added up in a narrow one
        wide = torch.zeros_like(memory, dtype=sum_dtype(memory.dtype))
        for one, part in zip(headers, parts, strict=True):
            if one.weighs:
                size = len(elements)
                wide[:size].add_(part[:size], alpha=mean.factor(one.unit))
                wide[size:].add_(part[size:])
        mean.finish(wide[: len(elements)])
        memory.copy_(wide)
        if self._checked and not _is_finite(elements):
            self._push_each(chunk, headers, parts)
        else:
            self._pass_on(chunk, headers, mean.total, elements, flags)
        return headers

    def _reduce(self, chunk: int, handed: HandedChunk, headers: list[_GradientHeader]) -> Program:
        """Add up one chunk, and push the sum."""
        mean = _Mean.of(headers)
        if mean is None:
            self._pass_on(chunk, headers, 0.0, None, None)
            return
        dtype = self._layout.chunks[chunk].dtype
        memory, elements, flags = self._sums.to_add_up(chunk)
        if (
            memory.dtype.itemsize < dtype.itemsize
        ):  # what is added up is the mean, which overflows least
            mean = mean._replace(unit=0.0)
        self._contribute(chunk, handed, mean.factor(handed.unit), elements, flags)
        root = self._roots[chunk]
        yield Reduce(memory, f"chunk {chunk}", root)
        if root is not None:
            self._rooted.append(chunk)
            if root != self._worker:
                return
        mean.finish(elements)
        if memory.dtype is not dtype:
            elements = self._sums.of(chunk)[1].copy_(elements)
        if not self._checked or _is_finite(elements):
            self._pass_on(chunk, headers, mean.total, elements, flags)
        elif root is None:
            yield from self._each_by_itself(chunk, handed, headers)
        else:
            self._spoilt.add(chunk)

    def _tell_spoilt(self, headers: list[_GradientHeader]) -> Program:
        """Tell all members which chunks have sums that are not finite, and push each member's gradient of these."""
        if not self._rooted or not self._checked:
            return
        # servers and the coordinator go on with a step that is finite meanwhile
        gathered = yield Gather(
            torch.tensor([chunk in self._spoilt for chunk in self._rooted], dtype=torch.uint8)
        )
        assert gathered is not None
        spoilt = torch.stack(gathered).amax(0).tolist()
        for chunk, is_spoilt in zip(self._rooted, spoilt, strict=True):
            if is_spoilt:
                yield from self._each_by_itself(chunk, self._own.chunks[chunk], headers)

    def _contribute(
        self,
        chunk: int,
        handed: HandedChunk,
        factor: float,
        elements: torch.Tensor,
        flags: torch.Tensor,
    ) -> None:
        """Write this member's gradient of a chunk, times a factor: its part of the mean, which no server copies."""
        if not handed.unit or not handed.payload.numel():
            elements.zero_()
            flags.zero_()
            return
        continue_after(handed.made, elements)
        values = handed.payload.view(self._layout.chunks[chunk].dtype)
        if factor == 1.0:
            elements.copy_(values)
        else:
            torch.mul(
                values.to(torch.promote_types(values.dtype, elements.dtype)), factor, out=elements
            )
        slices = self._layout.chunks[chunk].slices
        flags.copy_(torch.tensor([float(piece.entry not in handed.absent) for piece in slices]))

    def _each_by_itself(
        self, chunk: int, handed: HandedChunk, headers: list[_GradientHeader]
    ) -> Program:
        """Push each member's gradient of a chunk by itself, in its own dtype: their sum is not finite."""
        memory, elements, flags = self._sums.of(chunk)
        self._contribute(chunk, handed, 1.0, elements, flags)
        gathered = yield Gather(memory)
        self._push_each(chunk, headers, gathered or [])

    def _push_each(
        self, chunk: int, headers: list[_GradientHeader], parts: list[torch.Tensor]
    ) -> None:
        """Push each member's gradient of a chunk by itself."""
        size = len(self._sums.of(chunk)[1])
        for header, values in zip(headers, parts, strict=True):
            self._pass_on(chunk, [header], header.unit, values[:size], values[size:])

    def _pass_on(
        self,
        chunk: int,
        headers: list[_GradientHeader],
        unit: float,
        elements: torch.Tensor | None,
        flags: torch.Tensor | None,
    ) -> None:
        """Push the sum of some members' gradients of a chunk, in units of `unit`, if the own server holds it."""
        if not self._is_own[chunk]:
            return
        present = [] if flags is None else [count > 0 for count in flags.tolist()]
        slices = self._layout.chunks[chunk].slices
        has_any = elements is not None and any(present) and unit != 0.0
        absent = {s.entry for s, here in zip(slices, present, strict=False) if has_any and not here}
        self._push(
            HostPush(
                self._own.generation,
                self._own.pulled,
                chunk,
                unit,
                math.fsum(header.total for header in headers),
                tuple(header.push for header in headers),
                sorted(absent),
            ),
            elements.view(torch.uint8) if has_any and elements is not None else None,
        )


def _is_finite(elements: torch.Tensor) -> bool:
    """Return whether all elements are finite: the same at all members, which have the same bits."""
    if not elements.dtype.is_floating_point or math.isfinite(sum_of_squares(elements)):
        return True
    return bool(torch.isfinite(elements).all())
