"""The Collective contract, over every implementation that there is, for one, two and three members."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from steepest.core.tensors.shared_memory import AVAILABLE, allocate
from steepest.errors import ConfigurationError, DeadlineError, PeerLostError
from steepest.strategies.collectives.protocol import Collective
from tests.members import GROUPS, MakeGroup, Member, group_of, pattern, together

SIZES = [1, 2, 3]


@pytest.fixture(params=list(GROUPS))
def make_group(request: pytest.FixtureRequest) -> Iterator[MakeGroup]:
    with group_of(request.param) as make:
        yield make


@pytest.fixture
def over_wire() -> Iterator[MakeGroup]:
    with group_of("unix") as make:
        yield make


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_gives_the_roots_vector(make_group: Any, size: int) -> None:
    members = make_group(size)
    for root in range(size):
        found = together(
            members,
            lambda member, root=root: member.broadcast(torch.full((3,), float(member.rank)), root),
        )
        assert all(torch.equal(vector, torch.full((3,), float(root))) for vector in found)


@pytest.mark.parametrize("size", SIZES)
def test_nobody_leaves_a_barrier_before_all_have_come(make_group: Any, size: int) -> None:
    come: list[int] = []

    def do(member: Collective) -> int:
        for number in range(3):
            come.append(number)
            member.barrier()
            assert come.count(number) == size
            member.barrier()
        return member.rank

    assert together(make_group(size), do) == list(range(size))


SHAPES = [
    ((), torch.float32),
    ((3,), torch.int16),
    ((2, 0), torch.float64),
    ((50, 700), torch.float32),
]
SHAPES += [
    ((5, 2), torch.bfloat16),
    ((4,), torch.bool),
    ((2, 2), torch.complex64),
    ((1 << 20,), torch.uint8),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("size", SIZES)
def test_messages_of_any_shape_and_dtype_arrive_in_order(make_group: Any, size: int) -> None:
    """All are sent before the first is awaited; one lies in memory that is lent."""

    def do(member: Collective) -> None:
        others = [other for other in range(size) if other != member.rank]
        sent = []
        for number, (shape, dtype) in enumerate(SHAPES):
            tensor = pattern(member.rank + number, shape, dtype)
            if number == 3:
                shared = allocate(tensor.nbytes).view(dtype).view(shape)
                tensor = shared.copy_(tensor)
            sent += [(tensor, tensor.clone(), member.isend(tensor, other)) for other in others]
        for other in others:
            received = [torch.empty(shape, dtype=dtype) for shape, dtype in SHAPES]
            works = [member.irecv(tensor, other) for tensor in received]
            for number, (work, tensor) in enumerate(zip(works, received, strict=True)):
                work.wait()
                assert torch.equal(tensor, pattern(other + number, *SHAPES[number]))
        for tensor, before, work in sent:
            work.wait()
            assert torch.equal(tensor, before)
        for tensor, _, _ in sent:
            tensor.zero_()  # it is this member's own again
        member.barrier()

    together(make_group(size), do)


def test_what_cannot_be_a_message_is_refused(make_group: Any) -> None:
    member = make_group(2)[1]
    for other in (1, 2, -1):
        with pytest.raises(ConfigurationError, match=f"with member {other}: 0 is another"):
            member.isend(torch.zeros(1), other)
    for tensor in (torch.zeros(4, 4).t(), torch.zeros(4)[::2], torch.zeros(2, device="meta")):
        with pytest.raises(ConfigurationError, match=r"use \.cpu\(\) and \.contiguous\(\)"):
            member.irecv(tensor, 0)


def test_a_message_of_another_size_is_refused(over_wire: Any) -> None:
    def do(member: Collective) -> None:
        if member.rank:
            member.isend(torch.zeros(3), 0).wait()
        else:
            words = r"member 1 sent a message of float32 \(3,\) where member 0 awaits a message of float32 \(2,\)"
            with pytest.raises(ConfigurationError, match=words):
                member.irecv(torch.zeros(2), 1).wait()

    together(over_wire(2), do)


@pytest.mark.parametrize("operation", ["barrier", "exchange", "irecv"])
def test_a_member_that_does_not_come_is_named_at_the_deadline(
    make_group: Any, operation: str
) -> None:
    first, _second = make_group(2, deadline=0.05)
    vector = torch.arange(3.0)
    with pytest.raises(DeadlineError, match="member 0 waited 0.05 s in vain for .* member 1"):
        {
            "barrier": first.barrier,
            "exchange": lambda: first.exchange({1: vector}, {1: torch.empty(3)}),
            "irecv": lambda: first.irecv(torch.empty(3), 1).wait(),
        }[operation]()
    assert torch.equal(vector, torch.arange(3.0))


def test_abort_ends_a_wait(make_group: Any) -> None:
    first, second = make_group(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.barrier)
        second.abort("worker 1 died")
        said = "worker 1 died|member 1 is gone"  # torch's carries no reason
        with pytest.raises(PeerLostError, match=said):
            waiting.result(10)
    with pytest.raises(PeerLostError, match="worker 1 died"):
        second.barrier()


def test_a_lost_member_ends_every_wait_also_for_others(over_wire: Any) -> None:
    """Member 0 awaits member 1, who awaits member 2, who goes."""

    def do(member: Member) -> str:
        if member.rank == 2:
            member.exchange({}, {0: torch.zeros(1), 1: torch.zeros(1)})
            member.transport.close()
            return ""
        member.isend(torch.zeros(1), 2).wait()
        with pytest.raises(PeerLostError) as found:
            member.irecv(torch.zeros(1), member.rank + 1).wait()
        return str(found.value)

    assert ["member 2 is gone" in said for said in together(over_wire(3), do)] == [
        True,
        True,
        False,
    ]


def test_calls_are_kept_apart(over_wire: Any) -> None:
    """What one call left behind is not taken for what the next one sends; what comes early is kept."""

    def do(member: Member) -> float:
        received = torch.zeros(1)
        for number in (1, 2):
            with member.call(number):
                if member.rank:
                    for value in (1.0, 2.0, 3.0)[: 3 if number == 1 else 1]:
                        member.isend(torch.full((1,), value * 10**number), 0).wait()
                else:
                    member.irecv(received, 1).wait()
        return float(received)

    assert together(over_wire(2), do)[0] == 100.0


def test_an_abandoned_call_ends_and_the_next_one_works(over_wire: Any) -> None:
    def do(member: Member) -> None:
        if member.rank == 0:
            with member.call(1):
                member.router.call(lambda: member.abandon(1, "worker 1 raised"))
                with pytest.raises(PeerLostError, match="worker 1 raised"):
                    member.barrier()
            member.abandon(2, "worker 1 raised early")
            with member.call(2), pytest.raises(PeerLostError, match="raised early"):
                member.barrier()
        with member.call(3):
            member.barrier()

    together(over_wire(2), do)


def test_a_new_generation_ends_what_the_one_before_began(over_wire: Any) -> None:
    members = over_wire(2)

    def do(member: Member) -> float:
        received = torch.zeros(1)
        if member.rank == 0:
            member.router.call(lambda: setattr(member, "generation", 1))
            with pytest.raises(PeerLostError, match="a new generation has begun"):
                member.irecv(received, 1).wait()
            member.irecv(received, 1).wait()
        else:
            member.isend(torch.ones(1), 0)
            member.generation = 1
            member.isend(torch.full((1,), 2.0), 0).wait()
        member.barrier()
        return float(received)

    assert together(members, do)[0] == 2.0


@pytest.mark.skipif(not AVAILABLE, reason="memory is lent on Linux")
def test_memory_is_lent_where_it_lies(over_wire: Any) -> None:
    def do(member: Member) -> None:
        if member.rank:
            memory = allocate(1 << 16)
            member.lend(memory, 0)
            member.barrier()
            memory.fill_(7)
            member.barrier()
        else:
            borrowed = member.borrow(1 << 16, 1).bytes()
            assert int(borrowed.max()) == 0
            member.barrier()
            member.barrier()
            assert int(borrowed.min()) == 7

    together(over_wire(2), do)
