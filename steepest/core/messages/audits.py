"""The part of a worker's report on an audited step: digests of its own gradient, and of another worker's."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from steepest.core.messages.fields import Condition, Count, WorkerIndex


class GradientDigest(NamedTuple):
    """The gradient of one share of the samples, as one process has computed it.

    Chunks are in the order of their numbers.
    """

    batches: Count  # CRC-32 of the samples
    state: Count  # CRC-32 of the buffers, before
    bits: tuple[int, ...]  # CRC-32 of each chunk, with its weights and absent parameters
    sums: tuple[float, ...]  # of the elements of each chunk
    norms: tuple[float, ...]  # 2-norms of each chunk


_OfEachChunk = Annotated[
    GradientDigest,
    Condition(
        "as many bits as sums and norms",
        lambda value, limits: len(value.bits) == len(value.sums) == len(value.norms),
    ),
]


class Audited(NamedTuple):
    """A worker's two gradients of an audited step."""

    # results of equal machines have equal bits; "" if not even repeated results of one machine do
    machine: str
    rounding: float  # the greatest relative difference of a chunk's norm, or sum, that is rounding
    other: WorkerIndex  # the other worker whose samples it has computed
    own: _OfEachChunk
    others: _OfEachChunk
