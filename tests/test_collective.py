"""The Collective contract, over every implementation that there is, for one, two and three members."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from steepest.comm.collective import Collective
from steepest.errors import DeadlineError, PeerLostError
from steepest.sampler import even_share
from steepest.testing import InProcessCollective

GROUPS: list[Callable[[int], list[Any]]] = [InProcessCollective.group]


@pytest.fixture(params=GROUPS, ids=["in-process"])
def make_group(request: pytest.FixtureRequest) -> Callable[[int], list[Collective]]:
    return request.param  # type: ignore[no-any-return]


def together(members: list[Collective], do: Callable[[Collective], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(do, members))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_reduce_scatter_then_all_gather_is_the_sum(make_group: Any, size: int, length: int, dtype: torch.dtype) -> None:
    vectors = [(torch.arange(length) * (rank + 1)).to(dtype) for rank in range(size)]
    kept = [vector.clone() for vector in vectors]

    def do(member: Collective) -> tuple[torch.Tensor, torch.Tensor]:
        part = member.reduce_scatter(vectors[member.rank])
        return part, member.all_gather(part, length)

    total = sum(vectors[1:], vectors[0])
    for rank, (part, whole) in enumerate(together(make_group(size), do)):
        begin, end = even_share(length, rank, size)
        assert torch.equal(part, total[begin:end])
        assert torch.equal(whole, total)
    assert all(torch.equal(vector, before) for vector, before in zip(vectors, kept, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_broadcast_gives_the_roots_vector(make_group: Any, size: int) -> None:
    for root in range(size):
        found = together(
            make_group(size), lambda member, root=root: member.broadcast(torch.full((3,), float(member.rank)), root)
        )
        assert all(torch.equal(vector, torch.full((3,), float(root))) for vector in found)


def test_a_member_that_does_not_come_is_named_at_the_deadline() -> None:
    first, _ = InProcessCollective.group(2, deadline=0.05)
    with pytest.raises(DeadlineError, match="members 1"):
        first.barrier()


def test_abort_ends_a_wait(make_group: Any) -> None:
    first, second = make_group(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.barrier)
        second.abort("worker 1 died")
        with pytest.raises(PeerLostError, match="worker 1 died"):
            waiting.result(10)
