"""Formats in which float32 gradients travel between hosts: rounded, largest elements only, factors.

Formats are functions of a chunk, without state; a `GradientCompressor` (see
`steepest.strategies.compression.gradient_compressor`) adds their error of a gradient to the next one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from steepest.core.config.compression import Compression, Int2, Int4, Int8, PowerSGD, TopK
from steepest.core.tensors.codec import Codec, Factors, Packed
from steepest.core.tensors.half_precision import WIRE_DTYPES, narrow, narrow_size
from steepest.core.tensors.layout import Chunk, ParameterLayout, Slice
from steepest.errors import ProtocolError

_BUCKET = 1 << 16  # elements, whose places are 16-bit numbers
_FEW = 1 << 14  # elements; of more, a sample tells which ones may be the largest


class Half(Codec):
    """Half precision: float16 or bfloat16, rounded to the nearest."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = self.elements = dtype

    def size(self, layout: ParameterLayout, chunk: Chunk) -> int | None:
        """Return half of the chunk's bytes."""
        return narrow_size(chunk.dtype, chunk.nbytes, self.dtype)

    def pack(
        self, layout: ParameterLayout, chunk: Chunk, values: Tensor, out: Tensor, factors: Factors
    ) -> bool:
        """Round to the nearest; return False if float16, which ends at 65,504, cannot hold a value."""
        return narrow(values.view(torch.uint8), self.dtype, out)

    def add(self, layout: ParameterLayout, chunk: Chunk, packed: Packed, out: Tensor) -> None:
        """Widen payloads and add them."""
        for payload, factor in packed:
            out.add_(payload.view(self.dtype), alpha=factor)


class BlockInt8(Codec):
    """Blocks of elements as int8, each with one float32 by which they are multiplied.

    The scales come first. Block-wise quantization as in Dettmers et al. 2022 (arXiv:2110.02861), to
    evenly spaced values.

    Args:
        block: elements of a block.
    """

    lossy = True

    def __init__(self, block: int) -> None:
        self._block = block

    def size(self, layout: ParameterLayout, chunk: Chunk) -> int | None:
        """Return a byte for each element, and four for each block."""
        count = chunk.nbytes // 4
        return _if_less(chunk, count + 4 * -(-count // self._block))

    def _parts(
        self, flat: Tensor, scales: Tensor
    ) -> Iterator[tuple[slice, tuple[int, int], Tensor]]:
        """Yield the place of the full blocks, their shape and scales; then the same for the last block."""
        full = flat.numel() // self._block
        if full:
            yield slice(0, full * self._block), (full, self._block), scales[:full, None]
        if rest := flat.numel() - full * self._block:
            yield slice(full * self._block, None), (1, rest), scales[full:, None]

    def _views(self, packed: Tensor, count: int) -> tuple[Tensor, Tensor]:
        border = 4 * -(-count // self._block)
        return packed[:border].view(torch.float32), packed[border:].view(torch.int8)

    def pack(
        self, layout: ParameterLayout, chunk: Chunk, values: Tensor, out: Tensor, factors: Factors
    ) -> bool:
        """Round to the nearest of 255 values, evenly spaced up to a block's greatest magnitude."""
        scales, rounded = self._views(out, values.numel())
        for where, shape, scale in self._parts(values, scales):
            block = values[where].view(shape)
            low, high = torch.aminmax(block, dim=1, keepdim=True)
            scale.copy_(torch.maximum(high, low.neg_())).div_(127)
            levels = block.div(scale.clamp(min=torch.finfo(torch.float32).tiny)).round_()
            rounded[where].view(shape).copy_(levels)
            block.addcmul_(levels, scale.expand(shape), value=-1)
        return True

    def add(self, layout: ParameterLayout, chunk: Chunk, packed: Packed, out: Tensor) -> None:
        """Multiply by the scales and add."""
        for payload, factor in packed:
            scales, rounded = self._views(payload, out.numel())
            for where, shape, scale in self._parts(out, scales):
                out[where].view(shape).add_(rounded[where].view(shape) * (scale * factor))


class BlockInt4(BlockInt8):
    """Blocks of integers from -7 to 7, two in a byte, each with a float32 scale; scales come first."""

    _bits = 4

    def size(self, layout: ParameterLayout, chunk: Chunk) -> int | None:
        """Return `_bits` bits for each element, and four bytes for each block."""
        count = chunk.nbytes // 4
        return _if_less(chunk, -(-count * self._bits // 8) + 4 * -(-count // self._block))

    def _parts_of(self, packed: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the scales, and the bytes of all elements."""
        border = 4 * -(-count // self._block)
        return packed[:border].view(torch.float32), packed[border:]

    def _round(self, block: Tensor, scale: Tensor) -> Tensor:
        """Return the levels nearest to the elements of blocks, in units of their scales, which are written."""
        low, high = torch.aminmax(block, dim=1, keepdim=True)
        scale.copy_(torch.maximum(high, low.neg_())).div_(7)
        return block.div(scale.clamp(min=torch.finfo(torch.float32).tiny)).round_()

    def _codes(self, levels: Tensor) -> Tensor:
        """Return numbers of `_bits` bits that stand for levels."""
        return levels + 7

    def _levels(self, codes: Tensor) -> Tensor:
        """Return the levels (float32) that numbers stand for."""
        return codes.to(torch.float32).sub_(7)

    def pack(
        self, layout: ParameterLayout, chunk: Chunk, values: Tensor, out: Tensor, factors: Factors
    ) -> bool:
        """Round each element to the nearest level of its block."""
        count, each = values.numel(), 8 // self._bits
        scales, packed = self._parts_of(out, count)
        codes = torch.zeros(packed.numel() * each, dtype=torch.uint8)
        for where, shape, scale in self._parts(values, scales):
            block = values[where].view(shape)
            levels = self._round(block, scale)
            codes[:count][where].view(shape).copy_(self._codes(levels))
            block.addcmul_(levels, scale.expand(shape), value=-1)
        columns = codes.view(-1, each)
        packed.zero_()
        for place in range(each):
            packed.bitwise_or_(columns[:, place].bitwise_left_shift(place * self._bits))
        return True

    def add(self, layout: ParameterLayout, chunk: Chunk, packed: Packed, out: Tensor) -> None:
        """Multiply by the scales and add."""
        count, each = out.numel(), 8 // self._bits
        for payload, factor in packed:
            scales, packed_levels = self._parts_of(payload, count)
            columns = [
                packed_levels.bitwise_right_shift(place * self._bits).bitwise_and_(
                    (1 << self._bits) - 1
                )
                for place in range(each)
            ]
            levels = self._levels(torch.stack(columns, dim=1).view(-1)[:count])
            for where, shape, scale in self._parts(out, scales):
                out[where].view(shape).add_(levels[where].view(shape) * (scale * factor))


class BlockInt2(BlockInt4):
    """Blocks of elements as -3, -1, 1 or 3, four in a byte, each block with one float32; scales come first.

    An element is one of the outer two if it is larger than the root of the block's mean square, and
    the scale is that of least squares for these choices, so that the error of any block is smaller
    than the block.
    """

    _bits = 2

    def _round(self, block: Tensor, scale: Tensor) -> Tensor:
        """Return -3, -1, 1 or 3 for each element, and write the scale with the least error."""
        size = block.abs()
        greatest = size.amax(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
        relative = block / greatest  # squares of what is very small or large are none
        border = relative.square().mean(dim=1, keepdim=True).sqrt_()
        levels = torch.where(relative.abs() > border, 3.0, 1.0).copysign_(block)
        best = (relative * levels).sum(dim=1, keepdim=True)
        scale.copy_(best.div_(levels.square().sum(dim=1, keepdim=True)).mul_(greatest))
        return levels

    def _codes(self, levels: Tensor) -> Tensor:
        """Return 0 to 3 for -3 to 3."""
        return (levels + 3).div_(2)

    def _levels(self, codes: Tensor) -> Tensor:
        """Return -3, -1, 1 or 3 for 0 to 3."""
        return codes.to(torch.float32).mul_(2).sub_(3)


class Largest(Codec):
    """The elements of greatest magnitude, in 4 bytes each.

    First a scale (float32), the number of elements in each bucket of 65,536 (int32), then their
    places in it (16 bits) and their values divided by the scale (float16). The idea is that of Aji
    and Heafield 2017 (arXiv:1704.05021), error feedback included; only those above a threshold
    estimated from a sample are sorted, as in Lin et al. 2018 (arXiv:1712.01887), but the choice is
    exact.

    Args:
        ratio: share of the elements that travel.
    """

    lossy = True

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def _counts(self, chunk: Chunk) -> tuple[int, int, int]:
        """Return the number of elements, of those that travel, and of buckets."""
        count = chunk.nbytes // 4
        return count, math.ceil(count * self._ratio), -(-count // _BUCKET)

    def size(self, layout: ParameterLayout, chunk: Chunk) -> int | None:
        """Return four bytes for each element that travels, and a little more."""
        _, chosen, buckets = self._counts(chunk)
        return _if_less(chunk, 4 + 4 * buckets + 4 * chosen)

    def check(self, layout: ParameterLayout, chunk: Chunk, payload: Tensor) -> None:
        """Raise ProtocolError unless the right number of places is named, all inside the chunk."""
        count, chosen, _ = self._counts(chunk)
        _, counts, places, _ = self._views(payload, chunk)
        if int(counts.min()) < 0 or int(counts.sum(dtype=torch.int64)) != chosen:
            raise ProtocolError(
                f"chunk {chunk.index}: {chosen} elements should come, {counts.tolist()} are named"
            )
        last = places[chosen - int(counts[-1]) :]  # in the last bucket, which may be a short one
        at = (len(counts) - 1) * _BUCKET + (int(last.max()) + _BUCKET // 2 if last.numel() else 0)
        if at >= count:
            raise ProtocolError(f"element {at} of chunk {chunk.index}, which has {count}")

    def _views(self, packed: Tensor, chunk: Chunk) -> list[Tensor]:
        _, chosen, buckets = self._counts(chunk)
        kinds = [
            (4, torch.float32),
            (4 * buckets, torch.int32),
            (2 * chosen, torch.int16),
            (2 * chosen, torch.float16),
        ]
        at = list(accumulate((nbytes for nbytes, _ in kinds), initial=0))
        return [
            packed[begin:end].view(dtype)
            for (begin, end), (_, dtype) in zip(pairwise(at), kinds, strict=True)
        ]

    def pack(
        self, layout: ParameterLayout, chunk: Chunk, values: Tensor, out: Tensor, factors: Factors
    ) -> bool:
        """Write the largest elements; the error includes their rounding."""
        _, chosen, buckets = self._counts(chunk)
        scale, counts, places, halves = self._views(out, chunk)
        indices = largest(values, chosen)
        picked = values[indices]
        greatest = picked.abs().max()
        scale.copy_(greatest)
        counts.copy_(torch.bincount(indices >> 16, minlength=buckets))
        places.copy_((indices & (_BUCKET - 1)).to(torch.int32).sub_(_BUCKET // 2))
        halves.copy_(picked / greatest.clamp(min=torch.finfo(torch.float32).tiny))
        values[indices] = picked.addcmul_(halves.float(), greatest.expand(chosen), value=-1)
        return True

    def add(self, layout: ParameterLayout, chunk: Chunk, packed: Packed, out: Tensor) -> None:
        """Add values to the places that are named."""
        _, chosen, buckets = self._counts(chunk)
        for payload, factor in packed:
            scale, counts, places, halves = self._views(payload, chunk)
            bucket = torch.arange(buckets).repeat_interleave(counts.long(), output_size=chosen)
            indices = bucket.mul_(_BUCKET).add_(places).add_(_BUCKET // 2)
            out.index_add_(0, indices, halves.float().mul_(float(scale) * factor))


def largest(values: Tensor, count: int) -> Tensor:
    """Return the ascending places (int64) of the `count` greatest magnitudes of float32 values (n,)."""
    sizes = values.abs()
    total = sizes.numel()
    if total > _FEW and count < total // 8:
        step = max(total // _FEW, 1)
        sample = sizes[::step]
        expected = count / step
        few = min(math.ceil(expected + 4 * math.sqrt(expected) + 4), sample.numel())
        least = float(sample.topk(few, sorted=False).values.min())
        # NumPy is ten times as fast here as torch.
        candidates = torch.from_numpy(np.flatnonzero(sizes.numpy() >= np.float32(least)))
        if candidates.numel() >= count:  # else the sample was not like the whole
            chosen = sizes[candidates].topk(count, sorted=False).indices
            return candidates[chosen].sort().values
    return sizes.topk(count, sorted=False).indices.sort().values


class LowRank(Codec):
    """Tensors of two or more dimensions as products P Q' of rank r, as in PowerSGD.

    One power iteration for each gradient, from the factor Q of the one before: P = orthogonalized M
    Q, then Q = M' P (Vogels et al. 2019, arXiv:1905.13727). There the workers' P and Q are averaged
    in two rounds; here each worker's product travels by itself in one, and the products are added
    up. Everything else travels as it is. A chunk has to hold whole tensors.

    Args:
        rank: of the products.
    """

    lossy = True

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def _pieces(
        self, layout: ParameterLayout, chunk: Chunk
    ) -> Iterator[tuple[Slice, slice, tuple[int, int, int]]]:
        """Yield each slice, its place in the chunk, and (rows, columns, rank); rank 0: sent as it is."""
        for piece in chunk.slices:
            entry = layout.entries[piece.entry]
            begin = (entry.offset - chunk.start) // 4 + piece.start
            count = piece.stop - piece.start
            rows = entry.shape[0] if count == entry.numel and len(entry.shape) > 1 else 1
            columns = count // rows
            rank = min(self._rank, rows, columns)
            pays = (rows + columns) * rank < count
            yield piece, slice(begin, begin + count), (rows, columns, rank if pays else 0)

    def size(self, layout: ParameterLayout, chunk: Chunk) -> int | None:
        """Return four bytes for each element of the factors, and for each element that is not factored."""
        pieces = [shape for _, _, shape in self._pieces(layout, chunk)]
        return _if_less(chunk, sum(4 * _numbers(*shape) for shape in pieces))

    def pack(
        self, layout: ParameterLayout, chunk: Chunk, values: Tensor, out: Tensor, factors: Factors
    ) -> bool:
        """Write the factors after one power iteration, and the tensors that are not factored."""
        at = 0
        for piece, where, (rows, columns, rank) in self._pieces(layout, chunk):
            mine = out.view(torch.float32)[at : at + _numbers(rows, columns, rank)]
            at += mine.numel()
            if not rank:
                mine.copy_(values[where])
                values[where] = 0.0
                continue
            matrix = values[where].view(rows, columns)
            before = _directions(factors.get(piece.entry), rank, columns, piece.entry)
            # Both transposed, which is faster.
            p, q = mine[: rows * rank].view(rank, rows), mine[rows * rank :].view(rank, columns)
            p.copy_(torch.linalg.qr((before @ matrix.T).T).Q.T)
            torch.mm(p, matrix, out=q)
            matrix.addmm_(p.T, q, alpha=-1)
            factors[piece.entry] = q.clone()
        return True

    def add(self, layout: ParameterLayout, chunk: Chunk, packed: Packed, out: Tensor) -> None:
        """Add all products of a tensor at once."""
        at = 0
        flat = [(payload.view(torch.float32), factor) for payload, factor in packed]
        for _, where, (rows, columns, rank) in self._pieces(layout, chunk):
            border, end = at + rows * rank, at + _numbers(rows, columns, rank)
            if rank:
                left = [payload[at:border].view(rank, rows) * factor for payload, factor in flat]
                right = [payload[border:end].view(rank, columns) for payload, _ in flat]
                out[where].view(rows, columns).addmm_(torch.cat(left).T, torch.cat(right))
            else:
                for payload, factor in flat:
                    out[where].add_(payload[at:end], alpha=factor)
            at = end


def _directions(factor: Tensor | None, rank: int, columns: int, seed: int) -> Tensor:
    """Return the directions (rank, columns) from which a power iteration continues, of nonzero lengths."""
    drawn = torch.randn(rank, columns, generator=torch.Generator().manual_seed(seed))
    if factor is None or factor.shape != drawn.shape:
        return drawn
    # If a gradient of zeros has left no direction, a random one replaces it: otherwise all later parts would be zero.
    # The largest element becomes 1, so that small gradients do not vanish in products.
    length = factor.abs().amax(dim=1, keepdim=True)
    return torch.where(length > 0, factor / length, drawn)


def _numbers(rows: int, columns: int, rank: int) -> int:
    return (rows + columns) * rank if rank else rows * columns


def _if_less(chunk: Chunk, size: int) -> int | None:
    return size if chunk.dtype is torch.float32 and size < chunk.nbytes else None


def make_codec(choice: str | Compression | None) -> Codec | None:
    """Return the format that a user chose; None if gradients travel unchanged."""
    if choice is None or isinstance(choice, str):
        return None if choice is None else Half(WIRE_DTYPES[choice])
    if isinstance(choice, TopK):
        return Largest(choice.ratio)
    if isinstance(choice, PowerSGD):
        return LowRank(choice.rank)
    kinds = {Int8: BlockInt8, Int4: BlockInt4, Int2: BlockInt2}
    return kinds[type(choice)](choice.block)
