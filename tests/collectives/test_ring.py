"""The ring: equal to torch.distributed's all_reduce, the same bits on all members, no byte too many."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from steepest import ring_allreduce
from steepest.core.data.sampler import even_share
from steepest.errors import ConfigurationError, DeadlineError, PeerLostError
from steepest.strategies.collectives import ring
from steepest.strategies.collectives.protocol import Work
from steepest.testing import InProcessCollective
from tests.members import GROUPS, group_of, pattern, together, torch_groups, wire_group

SIZES = range(1, 9)
LENGTHS = [0, 1, 5, 8, 1003]
SUMMED = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int32,
]
SUMMED += [torch.int64, torch.bool, torch.complex64, torch.complex128]
TORCH_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
TORCH_OPS["product"] = dist.ReduceOp.PRODUCT


@functools.cache
def _groups(size: int) -> list[Any]:
    return torch_groups(size)


def torchs(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """What all_reduce of torch.distributed makes of the members' tensors."""
    made = [tensor.clone() for tensor in tensors]
    options = dist.AllreduceOptions()
    options.reduceOp = TORCH_OPS[op]
    works = [
        group.allreduce([tensor], options)
        for group, tensor in zip(_groups(len(made)), made, strict=True)
    ]
    for work in works:
        work.wait()
    return made[0]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "PIECE_BYTES", 256)


@pytest.fixture(params=list(GROUPS))
def make_group(request: pytest.FixtureRequest) -> Iterator[Any]:
    with group_of(request.param) as make:
        yield make


@pytest.mark.few(2)
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *((size, torch.float32) for size in SIZES),
        *((3, dtype) for dtype in SUMMED[1:]),
        *(pytest.param(5, dtype, marks=pytest.mark.full) for dtype in SUMMED[1:]),
    ],
)
def test_equals_torchs_all_reduce(size: int, dtype: torch.dtype) -> None:
    """Sums of small whole numbers are exact in every dtype, whatever the order."""
    for length in LENGTHS:
        tensors = [pattern(rank, (length,), dtype) for rank in range(size)]
        kept = [tensor.clone() for tensor in tensors]
        for op in TORCH_OPS:
            if dtype.is_complex and op != "sum":
                continue
            found = together(
                InProcessCollective.group(size),
                lambda m, op=op, tensors=tensors: ring_allreduce(tensors[m.rank], m, op),
            )
            wanted = torchs(tensors, op) if length else tensors[0]
            for result in found:
                assert result.dtype is dtype
                torch.testing.assert_close(result, wanted)
                if op != "product":  # products of as many factors are rounded, in whichever order
                    assert torch.equal(result, wanted)
                assert torch.equal(result, found[0])
        assert all(
            torch.equal(tensor, before) for tensor, before in zip(tensors, kept, strict=True)
        )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_over_every_collective(make_group: Any, size: int) -> None:
    """Several pieces of full size, in a shape."""
    tensors = [
        torch.randn(3, 200_001, generator=torch.Generator().manual_seed(rank))
        for rank in range(size)
    ]
    found = together(
        make_group(size), lambda member: ring_allreduce(tensors[member.rank], member, "mean")
    )
    torch.testing.assert_close(found[0], sum(tensors[1:], tensors[0]) / size)
    assert found[0].shape == (3, 200_001)
    assert all(torch.equal(result, found[0]) for result in found)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("length", [0, 1, 5, 1003])
@pytest.mark.parametrize("size", SIZES)
def test_no_byte_too_many_is_sent(size: int, length: int) -> None:
    """Each member sends all slices twice, but for two: 2 (size - 1) / size where slices are even."""
    members = InProcessCollective.group(size)
    together(members, lambda member: ring_allreduce(torch.ones(length), member))
    lengths = [
        end - begin for begin, end in (even_share(length, rank, size) for rank in range(size))
    ]
    for member in members:
        spared = lengths[(member.rank + 1) % size] + lengths[(member.rank + 2) % size]
        assert member.bytes_sent == (4 * (2 * length - spared) if size > 1 else 0)
    assert sum(member.bytes_sent for member in members) == 4 * 2 * (size - 1) * length


def test_the_wire_counts_the_same_bytes() -> None:
    with contextlib.ExitStack() as closing:
        members = wire_group(closing, 3, apart=True)
        together(members, lambda member: ring_allreduce(torch.ones(300_000), member))
        for member in members:
            assert member.transport.bytes_sent == 4 * 2 * 2 * 100_000


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_half_precision_halves_the_bytes_and_agrees_to_the_bit(
    size: int, name: str, dtype: torch.dtype
) -> None:
    tensors = [
        torch.randn(6400, generator=torch.Generator().manual_seed(rank)) for rank in range(size)
    ]
    members = InProcessCollective.group(size)
    found = together(
        members, lambda member: ring_allreduce(tensors[member.rank], member, wire_dtype=name)
    )
    exact = sum(tensors[1:], tensors[0])
    assert all(torch.equal(result, found[0]) for result in found)
    torch.testing.assert_close(found[0], exact, rtol=0, atol=size * 8 * torch.finfo(dtype).eps)
    if size > 1:
        assert torch.equal(found[0].to(dtype).float(), found[0])  # the finished sum was rounded
        pieces = (
            2
            * (size - 1)
            * sum(-(-(e - b) // 64) for b, e in (even_share(6400, r, size) for r in range(size)))
        )
        assert (
            sum(member.bytes_sent for member in members) == 2 * 2 * (size - 1) * 6400 + 4 * pieces
        )


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("size", [2, 3])
def test_what_does_not_fit_into_half_precision_is_scaled(size: int, name: str) -> None:
    values = torch.tensor([65504.0, 1e5, -3e30, 2.0**20, 0.0, float("inf"), float("nan"), 4e9])
    found = together(
        InProcessCollective.group(size), lambda m: ring_allreduce(values, m, wire_dtype=name)
    )
    for result in found:
        torch.testing.assert_close(result[:5], values[:5] * size, rtol=1e-2, atol=3e30 / 2**24)
        assert torch.equal(result.isinf(), values.isinf())
        assert torch.equal(result.isnan(), values.isnan())


def test_other_dtypes_travel_as_they_are_whatever_the_wire_dtype() -> None:
    tensor = torch.full((3,), 1e300, dtype=torch.float64)
    found = together(
        InProcessCollective.group(2), lambda m: ring_allreduce(tensor, m, "mean", wire_dtype="fp16")
    )
    assert torch.equal(found[1], tensor)


@pytest.mark.parametrize(
    ("tensor", "options", "said"),
    [
        (torch.ones(2), {"op": "median"}, 'op="median": give one of sum, mean, min, max, product'),
        (torch.ones(2, dtype=torch.int64), {"op": "mean"}, "give a floating-point tensor"),
        (torch.ones(2, dtype=torch.complex64), {"op": "max"}, "no order"),
        (torch.ones(2), {"wire_dtype": "fp8"}, "give fp16, bf16 or None"),
        (torch.ones(2, device="meta"), {}, "on the CPU"),
    ],
)
def test_what_cannot_be_reduced_is_refused(
    tensor: torch.Tensor, options: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ring_allreduce(tensor, InProcessCollective.group(2)[0], **options)


def test_a_strided_tensor_with_a_gradient_is_taken_and_left_alone() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    found = together(InProcessCollective.group(2), lambda member: ring_allreduce(tensor, member))
    assert torch.equal(found[0], tensor.detach() * 2)
    assert not found[0].requires_grad


@pytest.mark.few(2)
def test_a_member_that_stops_in_the_middle_is_named_and_inputs_are_intact(make_group: Any) -> None:
    tensors = [torch.full((2_000_000,), float(rank)) for rank in range(3)]

    def do(member: Any) -> None:
        if member.rank == 1:
            sending, sent = member.isend, itertools.count()

            def stop(tensor: torch.Tensor, to: int) -> Work:
                if next(sent) == 4:
                    member.abort("it is told to stop")
                return sending(tensor, to)

            member.isend = stop
        with pytest.raises((DeadlineError, PeerLostError), match="member|told to stop"):
            ring_allreduce(tensors[member.rank], member)

    together(make_group(3, deadline=0.5), do)
    assert all(bool((tensor == rank).all()) for rank, tensor in enumerate(tensors))
