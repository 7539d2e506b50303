"""The part of a worker's report on an audited step: digests of its own gradient, and of another worker's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from steepest.core.messages.fields import MOST, Field


class GradientDigest(NamedTuple):
    """The gradient of one share of the samples, as one process has computed it.

    Chunks are in the order of their numbers.
    """

    batches: int  # CRC-32 of the samples
    state: int  # CRC-32 of the buffers, before
    bits: Sequence[int]  # CRC-32 of each chunk, with its weights and absent parameters
    sums: Sequence[float]  # of the elements of each chunk
    norms: Sequence[float]  # 2-norms of each chunk


class Audited(NamedTuple):
    """A worker's two gradients of an audited step."""

    # results of equal machines have equal bits; "" if not even repeated results of one machine do
    machine: str
    rounding: float  # the greatest relative difference of a chunk's norm, or sum, that is rounding
    other: int  # the other worker whose samples it has computed
    own: GradientDigest
    others: GradientDigest


def _fits_digest(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == len(GradientDigest._fields)
        and all(type(part) is int and 0 <= part < MOST for part in value[:2])
        and all(isinstance(part, (list, tuple)) for part in value[2:])
        and len({len(part) for part in value[2:]}) == 1
        and {*map(type, value[2])} <= {int}
        and {*map(type, value[3]), *map(type, value[4])} <= {float}
    )


def _read(value: Sequence[Any]) -> Audited:
    machine, rounding, other, own, others = value
    digests = [GradientDigest(*each[:2], *map(tuple, each[2:])) for each in (own, others)]
    return Audited(machine, rounding, other, *digests)


AUDITED = Field(
    "a text, a number, the index of a worker and two digests",
    lambda value, limits: (
        isinstance(value, (list, tuple))
        and len(value) == len(Audited._fields)
        and isinstance(value[0], str)
        and isinstance(value[1], float)
        and type(value[2]) is int
        and 0 <= value[2] < limits.workers
        and all(map(_fits_digest, value[3:]))
    ),
    _read,
)
