"""Servers that take over chunks from those before them go on as if all had been put there by the driver."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from steepest.core.messages.message import worker_peer
from steepest.runtime.chunk_transfer import RetainedChunks
from steepest.testing import InProcessCluster
from tests.modes import hand_over, make, mode, trained, worker_weights
from tests.pairs import grid
from tests.reference import Task, same_bits, samples, sgd

OPTIMIZERS = {
    "momentum": sgd(momentum=0.9),
    "adam": lambda module: torch.optim.Adam(module.parameters(), lr=0.01),
}


def successor(
    before: InProcessCluster, name: str, task: Task, workers: int, servers: int
) -> InProcessCluster:
    """Another job of the same model, whose weights are others so far."""
    after = make(name, task, workers, servers=servers)
    assert after.job.description.layout.chunks == before.job.description.layout.chunks
    return after


def install(before: InProcessCluster, after: InProcessCluster, *, everything: bool = False) -> None:
    snapshot = before.snapshot("state" if everything else "standing")
    step = snapshot.version // before.job.versions_per_step
    weights, records = (snapshot.weights, snapshot.records) if everything else (None, [])
    position = after.wait(
        after.client.install(step * after.job.versions_per_step, weights, records),
        "the installation",
    )
    plan = after.job.plan(step)
    for worker in after.workers:
        taken = worker.at_version(
            position.generation, position.version, lambda each: each.use_plan(plan, 0)
        )
        after.wait(taken, f"the plan of {worker_peer(0)}")


#: workers before and after, servers before and after
SIZES = [((3, 2), (2, 2)), ((2, 3), (2, 2)), ((3, 3), (1, 3)), ((2, 2), (3, 1)), ((1, 2), (1, 2))]


@pytest.mark.few(2)
@grid(
    lambda name, size, _: (
        name != "copies" or not any(1 in pair for pair in size)
    ),  # one server has no copies
    name=["sync", "copies", "allreduce", "async", "ssp-2"],
    size=SIZES,
    optimizer=OPTIMIZERS,
)
def test_to_the_bit_what_the_driver_would_have_put_there(
    name: str, size: tuple[tuple[int, int], tuple[int, int]], optimizer: str
) -> None:
    workers, servers = size
    task = Task(optimizer=OPTIMIZERS[optimizer], data=samples(23))
    before = make(name, task, workers[0], servers=servers[0])
    trained(before, 5)
    weights = before.weights()
    put = successor(before, name, task, workers[1], servers[1])
    install(before, put, everything=True)
    carried = successor(before, name, task, workers[1], servers[1])
    assert not same_bits(carried.weights(), weights)
    hand_over(before, carried)
    install(before, carried)
    assert same_bits(carried.weights(), weights)
    for other in (put, carried):
        trained(other, 4)
    assert same_bits(carried.weights(), put.weights())
    assert not same_bits(carried.weights(), weights)
    first, *others = worker_weights(carried, carried.coordinator.version)
    assert all(torch.equal(first, other) for other in others)


def test_servers_in_the_same_process_use_the_same_memory_and_none_of_it_stays_behind() -> None:
    task = Task(optimizer=OPTIMIZERS["momentum"], data=samples(23))
    before = make("sync", task, 3)
    trained(before, 3)
    server = before.servers[0]
    kept, nbytes = RetainedChunks([server]), before.job.description.layout.nbytes
    room = kept.vector(nbytes)
    assert room.data_ptr() == server.vector.data_ptr()
    assert (
        room.data_ptr()
        <= next(iter(server.chunks.values())).weights.data_ptr()
        < room.data_ptr() + nbytes
    )
    assert kept.vector(nbytes + 1).numel() == nbytes + 1
    given = kept.give(server.chunks)
    assert {chunk: state.weights.nbytes for chunk, state in given.items()} == {
        chunk: held.chunk.nbytes for chunk, held in server.chunks.items()
    }
    assert sum(len(state.records) for state in given.values()) == sum(
        len(held.chunk.slices) for held in server.chunks.values() if held.chunk.trainable
    )
    gone = weakref.ref(next(iter(server.chunks.values())))
    del server, given, before, kept
    gc.collect()
    assert gone() is None


def test_chunks_are_cut_alike_whatever_the_number_of_servers() -> None:
    """On which it rests that whole chunks change hands."""
    task = Task(optimizer=OPTIMIZERS["momentum"])
    for name in ("sync", "allreduce"):
        cut = [make(name, task, workers, servers=servers).job.description.layout.chunks
               for workers in (1, 2, 3) for servers in (1, 2, 3)]  # fmt: skip
        assert all(chunks == cut[0] for chunks in cut)
        assert mode(name, 2) != mode(name, 3) or name == "allreduce"
