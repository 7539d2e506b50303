"""Collective operations for users: each against torch.distributed's counterpart; in shared memory too."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from steepest import collectives
from steepest.core.tensors.shared_memory import AVAILABLE
from steepest.errors import ConfigurationError, DeadlineError, PeerLostError
from steepest.strategies.collectives import shared_memory_reduce
from tests.inside import weight_buffers_of
from tests.members import Member, group_of, pattern, together, torch_groups, wire_group

SIZES = [1, 2, 3]
SHAPE = (3, 5)


def given(rank: int, number: int = 0) -> torch.Tensor:
    """What a member gives: whole numbers, so that sums are exact."""
    return pattern(rank + 5 * number, SHAPE, torch.float32)


@functools.cache
def _groups(size: int) -> list[Any]:
    return torch_groups(size)


def torchs(size: int, do: Callable[[Any, int], Any]) -> list[Any]:
    """What each member gets from a process group of torch.distributed."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda group: do(group, group.rank()), _groups(size)))


def ours(make_group: Any, size: int, do: Callable[[int], Any]) -> list[Any]:
    """What each member gets from `steepest.strategies.collectives.operations`."""

    def within(member: Any) -> Any:
        with collectives.using(member):
            assert (collectives.rank(), collectives.size()) == (member.rank, size)
            found = do(member.rank)
            collectives.barrier()
            return found

    return together(make_group(size), within)


def alike(a: Any, b: Any) -> bool:
    """Whether two results are the same tensors, or None."""
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return a is b is None if a is None or b is None else torch.equal(a, b)


@pytest.fixture(params=["in-process", "unix", "tcp", "torch"])
def make_group(request: pytest.FixtureRequest) -> Iterator[Any]:
    with group_of(request.param) as make:
        yield make


@pytest.mark.parametrize("size", SIZES)
def test_broadcast(make_group: Any, size: int) -> None:
    def do(group: Any, rank: int) -> torch.Tensor:
        tensor, options = given(rank), dist.BroadcastOptions()
        options.rootRank = size - 1
        group.broadcast([tensor], options).wait()
        return tensor

    found = ours(make_group, size, lambda rank: collectives.broadcast(given(rank), src=size - 1))
    assert alike(found, torchs(size, do))


OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


@pytest.mark.few(20)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_and_reduce(make_group: Any, size: int, op: str) -> None:
    def do(group: Any, rank: int) -> list[Any]:
        whole, one = given(rank), given(rank, 1)
        options, to_one = dist.AllreduceOptions(), dist.ReduceOptions()
        options.reduceOp = to_one.reduceOp = OPS[op]
        to_one.rootRank = 0
        group.allreduce([whole], options).wait()
        group.reduce([one], to_one).wait()
        return [whole, one if rank == 0 else None]

    found = ours(
        make_group,
        size,
        lambda rank: [
            collectives.all_reduce(given(rank), op),
            collectives.reduce(given(rank, 1), 0, op),
        ],
    )
    assert alike(found, torchs(size, do))


@pytest.mark.few(6)
@pytest.mark.parametrize("size", SIZES)
def test_means(make_group: Any, size: int) -> None:
    wanted = sum(given(rank) for rank in range(size)) / size
    found = ours(
        make_group,
        size,
        lambda rank: [
            collectives.all_reduce(given(rank), "mean"),
            collectives.reduce(given(rank), size - 1, "mean"),
        ],
    )
    for whole, one in found:
        torch.testing.assert_close(whole, wanted)
        assert torch.equal(whole, found[0][0])
        assert one is None or torch.allclose(one, wanted)


@pytest.mark.parametrize("size", SIZES)
def test_scatter_and_gather(make_group: Any, size: int) -> None:
    def do(group: Any, rank: int) -> list[Any]:
        own, parts = torch.empty(SHAPE), [torch.empty(SHAPE) for _ in range(size)]
        out, back = dist.ScatterOptions(), dist.GatherOptions()
        out.rootRank = back.rootRank = size - 1
        group.scatter(
            [own], [[given(i) for i in range(size)]] if rank == size - 1 else [], out
        ).wait()
        group.gather([parts] if rank == size - 1 else [], [given(rank, 1)], back).wait()
        return [own, parts if rank == size - 1 else None]

    def mine(rank: int) -> list[Any]:
        tensors = [given(i) for i in range(size)] if rank == size - 1 else None
        own = collectives.scatter(torch.empty(SHAPE), tensors, src=size - 1)
        return [own, collectives.gather(given(rank, 1), dst=size - 1)]

    assert alike(ours(make_group, size, mine), torchs(size, do))


@pytest.mark.few(19)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", SIZES)
def test_all_gather_and_reduce_scatter(make_group: Any, size: int, op: str) -> None:
    """Gloo scatters sums only by way of all_reduce: so does this."""

    def do(group: Any, rank: int) -> list[Any]:
        parts = [torch.empty(SHAPE) for _ in range(size)]
        group.allgather([parts], [given(rank)]).wait()
        reduced, options = (
            torch.stack([given(rank, i) for i in range(size)]),
            dist.AllreduceOptions(),
        )
        options.reduceOp = OPS[op]
        group.allreduce([reduced], options).wait()
        return [parts, reduced[rank]]

    def mine(rank: int) -> list[Any]:
        tensors = [given(rank, i) for i in range(size)]
        return [collectives.all_gather(given(rank)), collectives.reduce_scatter(tensors, op)]

    assert alike(ours(make_group, size, mine), torchs(size, do))


@pytest.mark.parametrize("size", [2, 3])
def test_send_and_recv(make_group: Any, size: int) -> None:
    """Around in a circle, both ways: as torch.distributed's send and recv would leave them."""

    def do(group: Any, rank: int) -> list[torch.Tensor]:
        found = [torch.empty(SHAPE), torch.empty(SHAPE)]
        works = [
            group.recv([found[0]], (rank - 1) % size, 0),
            group.send([given(rank)], (rank + 1) % size, 0),
        ]
        works += [
            group.recv([found[1]], (rank + 1) % size, 1),
            group.send([given(rank, 1)], (rank - 1) % size, 1),
        ]
        for work in works:
            work.wait()
        return found

    def mine(rank: int) -> list[torch.Tensor]:
        coming = collectives.irecv(torch.empty(SHAPE), (rank - 1) % size)
        leaving = collectives.isend(given(rank), (rank + 1) % size)
        found = coming.wait()
        leaving.wait()
        if rank == 0:
            collectives.send(given(rank, 1), size - 1)
        back = collectives.recv(torch.empty(SHAPE), (rank + 1) % size)
        if rank:
            collectives.send(given(rank, 1), rank - 1)
        return [found, back]

    assert alike(ours(make_group, size, mine), torchs(size, do))


def test_without_a_collective_it_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="within collectives.using"):
        collectives.all_reduce(torch.ones(2))
    with (
        collectives.using("it is a Tuesday"),
        pytest.raises(ConfigurationError, match="it is a Tuesday"),
    ):
        collectives.rank()


def test_bad_arguments_are_refused_before_anything_is_sent(make_group: Any) -> None:
    with collectives.using(make_group(2)[0]):
        for call in (
            lambda: collectives.gather(torch.ones(1), 2),
            lambda: collectives.broadcast(torch.ones(1), -1),
        ):
            with pytest.raises(ConfigurationError, match="give one of 0 to 1"):
                call()
        with pytest.raises(ConfigurationError, match="3 tensors for 2 members"):
            collectives.scatter(torch.ones(1), [torch.ones(1)] * 3)
        for reduce in (collectives.all_reduce, lambda t, op: collectives.reduce(t, 0, op)):
            with pytest.raises(ConfigurationError, match='op="median"'):
                reduce(torch.ones(1), "median")


def _float_or_int(rank: int) -> torch.Tensor:
    return torch.ones(4) if rank else torch.ones(4, dtype=torch.int32)


def _half(rank: int) -> torch.Tensor:
    return torch.ones(4, dtype=torch.bfloat16 if rank else torch.float16)


#: What members of other ranks than 0 do otherwise, though their messages have as many bytes; and what is told.
DISAGREEING: dict[str, tuple[Callable[[int], Any], str]] = {
    "dtypes of all_reduce": (
        lambda rank: collectives.all_reduce(_float_or_int(rank)),
        r"all_reduce\(op='sum'\) of int32 \(4,\)",
    ),
    "dtypes of broadcast": (
        lambda rank: collectives.broadcast(_half(rank), 0),
        r"broadcast\(src=0\) of float16 \(4,\)",
    ),
    "dtypes of all_gather": (
        lambda rank: collectives.all_gather(_float_or_int(rank)),
        r"all_gather\(\) of int32 \(4,\)",
    ),
    "dtypes of messages": (
        lambda rank: (
            collectives.recv(_half(0), 1) if rank == 0 else collectives.send(_half(rank), 0)
        ),
        r"member 1 sent a message of bfloat16 \(4,\) where member 0 awaits a message of float16",
    ),
    "shapes": (
        lambda rank: collectives.all_reduce(torch.ones(4) if rank else torch.ones(2, 2)),
        r"of float32 \(2, 2\)",
    ),
    "reductions": (
        lambda rank: collectives.all_reduce(torch.ones(4), "mean" if rank else "sum"),
        r"all_reduce\(op='sum'\)",
    ),
    "roots": (
        lambda rank: [
            collectives.broadcast(torch.ones(4), 1 if rank else 0),
            collectives.all_gather(torch.ones(4)),
        ],
        r"sent broadcast\(src=[01]\) of float32 \(4,\) where member [0-2] awaits all_gather\(\)",
    ),
    "operations": (
        lambda rank: (
            collectives.all_gather(torch.ones(4))
            if rank
            else collectives.reduce_scatter([torch.ones(4)] * collectives.size())
        ),
        r"reduce_scatter\(op='sum'\)",
    ),
}


@pytest.mark.few(16)
@pytest.mark.parametrize("kind", ["in-process", "unix", "tcp"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("what", DISAGREEING)
def test_members_that_disagree_are_both_named(what: str, size: int, kind: str) -> None:
    do, words = DISAGREEING[what]
    told: list[str] = []

    def within(member: Any) -> None:
        with collectives.using(member):
            try:
                collectives.all_gather(torch.ones(1))  # who has left answers no handshake
                do(member.rank)
                collectives.barrier()
            except ConfigurationError as error:
                told.append(str(error))
                member.abort("a member has refused")
            except PeerLostError:
                pass

    if what == "dtypes of messages" and size > 2:
        pytest.skip("it is of two members")
    with group_of(kind) as make:
        together(make(size, 10.0), within)
    assert any("sent" in each and "where member" in each for each in told)
    assert any(re.search(words, each) for each in told), told


# -- in shared memory --------------------------------------------------------------------------


@pytest.fixture
def host() -> Iterator[Any]:
    """Makes members of one host."""
    with contextlib.ExitStack() as closing:
        yield functools.partial(wire_group, closing)


needs_memory = pytest.mark.skipif(not AVAILABLE, reason="memory is lent on Linux")


@pytest.mark.few(2)
@needs_memory
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_in_shared_memory_the_sum_is_formed_in_the_order_of_ranks(
    host: Any, size: int, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger and smaller ones by turns, in the same memory; few enough bytes to go through the socket, too."""
    monkeypatch.setattr(shared_memory_reduce, "PIECE_BYTES", 1 << 16)
    lengths = [1, 7, 400_001, 70_000, 4, 1_000_003, 150_000, 70_001]
    tensors = [
        [
            torch.randn(length, generator=torch.Generator().manual_seed(rank + 9 * length))
            for length in lengths
        ]
        for rank in range(size)
    ]
    kept = [[tensor.clone() for tensor in each] for each in tensors]

    def do(member: Member) -> list[torch.Tensor]:
        with collectives.using(member):
            return [collectives.all_reduce(tensor, op) for tensor in tensors[member.rank]]

    found = together(host(size), do)
    for index in range(len(lengths)):
        total = tensors[0][index].clone()
        for rank in range(1, size):
            total = (
                torch.maximum(total, tensors[rank][index])
                if op == "max"
                else total + tensors[rank][index]
            )
        total = total / size if op == "mean" else total
        assert all(torch.equal(each[index], total) for each in found)
    assert all(alike(a, b) for a, b in zip(tensors, kept, strict=True))


@needs_memory
def test_in_shared_memory_only_notices_pass_through_the_socket(host: Any) -> None:
    members = host(2)
    sizes: list[list[int]] = [[], []]
    for member in members:
        sending = member.transport.lending.copy
        member.transport.lending.copy = lambda p, rank=member.rank, do=sending: (
            sizes[rank].append(1) or do(p)
        )

    def do(member: Member) -> int:
        with collectives.using(member):
            for _ in range(3):
                assert bool((collectives.all_reduce(torch.ones(2_000_000)) == 2).all())
        return weight_buffers_of(member)

    assert together(members, do) == [2, 2]
    assert sizes == [[], []]  # nothing was copied into an outbox


@needs_memory
def test_a_failed_one_leaves_inputs_and_memory_that_others_may_be_reading(host: Any) -> None:
    tensor = torch.ones(500_000)

    def do(member: Member) -> bool:
        with collectives.using(member):
            collectives.all_reduce(tensor)
            if member.rank:
                with pytest.raises(PeerLostError, match="enough"):
                    member.until(lambda: False, "an end", 0)
                return True
            with pytest.raises(DeadlineError, match="member 1"):
                collectives.all_reduce(tensor)
            member.abort("enough")
            return not weight_buffers_of(member)

    members = host(2, 20.0)
    members[0].deadline = 0.2
    assert together(members, do) == [True, True]
    assert bool((tensor == 1).all())
