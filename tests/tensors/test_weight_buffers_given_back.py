"""Memory for weights that somebody reads is given back when nobody has for a while."""

from __future__ import annotations

import os

import pytest
import torch

from steepest.core.engine.outgoing_weights import WeightBuffers
from steepest.core.engine.server import Server, ServerMode
from steepest.core.engine.topology import HostMap, Topology
from steepest.core.messages.gradients import CommitOrder, Push
from steepest.core.messages.membership import Members
from steepest.core.messages.message import COORDINATOR, PushId, worker_peer
from steepest.core.tensors.layout import ParameterLayout
from steepest.core.tensors.shared_memory import (
    AVAILABLE,
    SHARED_FROM,
    allocate,
    give_pages_back,
    segment_of,
)
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.testing import InProcessCluster, linear_model_creator
from tests.inside import weight_buffers_held

COMMITS = 16
shared = pytest.mark.skipif(not AVAILABLE, reason="this platform lends no memory")


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steepest.core.engine.outgoing_weights.COMMITS", COMMITS)


def pages(memory: torch.Tensor) -> int:
    """Bytes that shared memory takes, in whichever process."""
    segment = segment_of(memory)
    assert segment is not None
    return os.fstat(segment.descriptor).st_blocks * 512


class Reading:
    """One server of two chunks that adds what one worker pushes, and readers that take their time."""

    def __init__(self, elements: int) -> None:
        self.layout = ParameterLayout.plan(
            [("w", (elements,), torch.float32, True)], chunk_bytes=elements * 2
        )
        self.read: set[int] = set()  # by address
        self.server = Server(
            0,
            Topology(self.layout, [[0]] * len(self.layout.chunks), HostMap.apart(1, 1)),
            None,
            allocate(self.layout.nbytes),
            lambda peer, message: None,
            lambda view: view.data_ptr() in self.read,
            mode=ServerMode(stages_each=True, versions_differ=True),
        )
        self.commits = 0
        self.server.handle(COORDINATOR, Members(1, 0, workers=[0], reload=False).pack())

    def commit(self, times: int = 1) -> None:
        """Adds one to every weight."""
        for _ in range(times):
            self.commits += 1
            for chunk in self.layout.chunks:
                ones = torch.ones(chunk.nbytes // 4).view(torch.uint8)
                push = Push(1, 0, self.commits, self.commits - 1, chunk.index, 1.0, 1.0)
                self.server.handle(worker_peer(0), push.pack(ones))
            commit = CommitOrder(1, self.commits, 1.0, (PushId(0, 0, self.commits),), ())
            self.server.handle(COORDINATOR, commit.pack())
            values = torch.cat(
                [held.weights.view(torch.float32) for held in self.server.chunks.values()]
            )
            assert torch.equal(values, torch.full_like(values, self.commits))

    def lend(self) -> None:
        """Somebody reads all weights from now on."""
        self.read |= {held.weights.data_ptr() for held in self.server.chunks.values()}


@pytest.mark.parametrize("elements", [64, SHARED_FROM], ids=["plain memory", "shared memory"])
def test_rooms_are_given_back_when_readers_are_gone(elements: int) -> None:
    job = Reading(elements)
    for rooms in (1, 2, 3, 4):
        assert weight_buffers_held(job.server) == rooms
        job.lend()
        job.commit()
    assert weight_buffers_held(job.server) == 5
    job.commit(COMMITS - 5)  # in place, in the last room
    assert weight_buffers_held(job.server) == 5
    job.read.clear()
    job.commit(2 * COMMITS)
    assert weight_buffers_held(job.server) == 1
    job.lend()
    job.commit()
    assert weight_buffers_held(job.server) == 2  # and it can be had again


def test_what_is_read_stays_as_long_as_it_is() -> None:
    job = Reading(64)
    job.lend()
    old = [held.weights for held in job.server.chunks.values()]
    for _ in range(3 * COMMITS):
        job.commit()
        assert weight_buffers_held(job.server) == 2
        assert all((view.view(torch.float32) == 0).all() for view in old)
    job.read.clear()
    job.commit(2 * COMMITS)
    assert weight_buffers_held(job.server) == 1


def test_what_is_needed_now_and_then_is_not_made_anew_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in an asynchronous job, whose readers come and go."""
    made = []
    monkeypatch.setattr(
        "steepest.core.engine.outgoing_weights.allocate",
        lambda nbytes: made.append(nbytes) or allocate(nbytes),
    )
    job = Reading(64)
    for step in range(5 * COMMITS):
        if step % 3 == 0:
            job.read.clear()
        job.lend()
        job.commit()
    assert len(made) <= 3
    assert weight_buffers_held(job.server) == len(made) + 1


@shared
def test_a_room_that_is_given_back_takes_no_memory() -> None:
    read: set[int] = set()
    rooms = WeightBuffers(
        SHARED_FROM * 4, lambda view: view.data_ptr() in read, allocate(SHARED_FROM * 4)
    )
    read.add(rooms.free(0, 100).data_ptr())
    second = rooms.free(0, SHARED_FROM * 4)
    second.fill_(7)
    assert pages(second) == SHARED_FROM * 4
    read.clear()
    rooms.shrink([], [(0, 100)])  # it was needed since the last time
    assert pages(second) == SHARED_FROM * 4
    rooms.shrink([], [(0, 100)])
    assert (pages(second), rooms.held) == (0, 1)
    rooms.shrink([], [(0, 100)])
    read.add(rooms.free(0, 100).data_ptr())
    assert rooms.free(0, 100).data_ptr() == second.data_ptr()  # readers have it mapped already
    assert (second == 0).all()


@shared
def test_only_whole_segments_of_this_process_can_be_given_back() -> None:
    memory = allocate(SHARED_FROM)
    memory.fill_(1)
    assert not give_pages_back(torch.ones(SHARED_FROM, dtype=torch.uint8))
    assert not give_pages_back(memory[:100])
    assert (memory == 1).all()
    assert give_pages_back(memory)
    assert (memory == 0).all()


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("wire_dtype", [None, "bf16"])
def test_a_job_goes_on_as_before(wire_dtype: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever rooms are looked at: the same bits."""

    def train() -> InProcessCluster:
        strategy = ParameterServerStrategy(mode="async", num_servers=2, wire_dtype=wire_dtype)
        cluster = InProcessCluster(
            linear_model_creator(), num_workers=3, strategy=strategy, shuffle=4
        )
        cluster.step(40)
        return cluster

    expected = train()
    monkeypatch.setattr("steepest.core.engine.outgoing_weights.COMMITS", 3)
    found = train()
    assert all(
        torch.equal(value, expected.weights()[name]) for name, value in found.weights().items()
    )
    assert sum(weight_buffers_held(s) for s in found.servers) <= sum(
        weight_buffers_held(s) for s in expected.servers
    )
