"""One server by itself: memory that it lends or that is lent to it, and pushes that come early."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steepest.core.engine.server import Server, ServerMode
from steepest.core.engine.topology import HostMap, Topology
from steepest.core.messages.gradients import CommitOrder, HostPush, Push
from steepest.core.messages.membership import Members, WorkerEnded
from steepest.core.messages.message import (
    COORDINATOR,
    Kind,
    Message,
    Peer,
    PushId,
    aggregator_peer,
    worker_peer,
)
from steepest.core.messages.snapshots import InstallPut, Put, PutState
from steepest.core.messages.users import UserLeft
from steepest.core.tensors.layout import ParameterLayout
from steepest.errors import ProtocolError
from tests.inside import buffers_of

CLIENT = Peer("client", 100)
#: two trainable chunks of 16 bytes each, and a frozen one
LAYOUT = ParameterLayout.plan(
    [("w", (8,), torch.float32, True), ("frozen", (4,), torch.float32, False)], chunk_bytes=16
)
TRAINABLE = [chunk.index for chunk in LAYOUT.chunks if chunk.trainable]


def flat(value: float) -> torch.Tensor:
    """The bytes of a chunk whose elements have one value."""
    return torch.full((4,), value).view(torch.uint8)


class Alone:
    """A server that adds pushes to weights of zero, and readers of what it has lent."""

    def __init__(
        self,
        index: int = 0,
        holders: tuple[int, ...] = (0,),
        hosts: HostMap | None = None,
        **options: Any,
    ) -> None:
        self.sent: list[Message] = []
        self.read: set[int] = set()  # addresses of what is being read
        topology = Topology(LAYOUT, [holders] * len(LAYOUT.chunks), hosts or HostMap.apart(2, 2))
        options = {"mode": ServerMode(stages_each=True, versions_differ=True), **options}
        self.server = Server(
            index,
            topology,
            None,
            LAYOUT.allocate(),
            lambda peer, message: self.sent.append(message),
            lambda view: view.data_ptr() in self.read,
            **options,
        )

    def begin(self, generation: int = 1) -> None:
        """Begins a generation of two workers, at version 0."""
        self.server.handle(COORDINATOR, Members(generation, 0, workers=[0, 1], reload=False).pack())

    def push(
        self, worker: int, sequence: int, chunk: int, payload: torch.Tensor, generation: int = 1
    ) -> None:
        """Pushes a chunk of a gradient that was computed from version 0."""
        push = Push(generation, 0, sequence, 0, chunk, 1.0, 1.0)
        self.server.handle(worker_peer(worker), push.pack(payload))

    def commit(self, version: int, push: PushId) -> None:
        """Commits one push as a version."""
        self.server.handle(
            COORDINATOR, CommitOrder(1, version, rate=1.0, pushes=(push,), readers=()).pack()
        )

    def put(self, sequence: int, value: float) -> None:
        """Puts weights of one value, without having them installed."""
        for chunk in LAYOUT.chunks:
            part = Put(sequence, chunk.index, chunk=chunk.index)
            self.server.handle(CLIENT, part.pack(flat(value)))

    @property
    def weights(self) -> list[torch.Tensor]:
        """Each chunk's, where it lies."""
        return [held.weights for held in self.server.chunks.values()]

    def values(self) -> set[float]:
        """All numbers that occur in its weights."""
        return {float(x) for view in self.weights for x in view.view(torch.float32)}

    def staged(self) -> set[tuple[int, int]]:
        """Worker and number of each push for which the coordinator was sent PUSH_STAGED."""
        reports = [m.body for m in self.sent if m.kind is Kind.PUSH_STAGED]
        return {(staged.worker, staged.sequence) for staged in reports}


# -- weights that are put -----------------------------------------------------------------------

INSTALLS = {
    "between commits": lambda version, put: InstallPut(1, version, install=[put]),
    "with a generation": lambda version, put: Members(
        1 + version, version, workers=[0, 1], reload=False, install=[put]
    ),
}


@pytest.mark.parametrize("install", INSTALLS.values(), ids=INSTALLS)
def test_weights_that_are_put_leave_those_that_are_being_read_as_they_are(install: Any) -> None:
    job = Alone()
    job.begin()
    lent = job.weights
    job.read = {view.data_ptr() for view in lent}
    job.put(1, 7.0)
    job.server.handle(COORDINATOR, install(1, ("client", 100, 1)).pack())
    assert job.values() == {7.0}
    assert all(not view.any() for view in lent)
    job.read.clear()
    now = [view.data_ptr() for view in job.weights]
    job.put(2, 9.0)
    job.server.handle(COORDINATOR, install(2, ("client", 100, 2)).pack())
    assert job.values() == {9.0}
    assert [view.data_ptr() for view in job.weights] == now, "no one reads them: written in place"
    assert all(not view.any() for view in lent)


def test_weights_that_must_stay_in_place_are_copied_for_slow_readers_before_others_are_put() -> (
    None
):
    saved: dict[int, set[float]] = {}

    def own_pending(view: torch.Tensor) -> None:
        saved[view.data_ptr()] = {float(x) for x in view.view(torch.float32)}

    job = Alone(own_pending=own_pending)
    job.begin()
    where = [view.data_ptr() for view in job.weights]
    job.put(1, 7.0)
    assert not saved
    job.server.handle(COORDINATOR, InstallPut(1, 1, install=[("client", 100, 1)]).pack())
    assert saved == {address: {0.0} for address in where}
    assert [view.data_ptr() for view in job.weights] == where
    assert job.values() == {7.0}


# -- gradients that are lent --------------------------------------------------------------------


@pytest.mark.parametrize("received", [False, True], ids=["lent", "received"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_push_is_copied_where_another_server_sends_its_worker_the_weights(
    index: int, received: bool
) -> None:
    """Its next gradient lies in the same memory, maybe before this server has applied this one."""
    job = Alone(index, holders=(0, 1))
    job.begin()
    for sequence in (1, 2):
        lent = []
        for chunk in TRAINABLE:
            payload = flat(float(sequence))
            if received:  # over a network, into memory of the server
                message = Push(1, 0, sequence, 0, chunk, 1.0, 1.0).pack()
                own = job.server.destination(message, payload.numel())
                assert own is not None
                payload = own.copy_(payload)
            else:
                lent.append(payload)
            job.push(0, sequence, chunk, payload)
        for payload in lent if index == 1 else ():
            payload.copy_(flat(-1.0))
        job.commit(sequence, PushId(0, 0, sequence))
    expected = {chunk: 3.0 if chunk in TRAINABLE else 0.0 for chunk in job.server.chunks}
    for chunk, held in job.server.chunks.items():
        assert set(held.weights.view(torch.float32).tolist()) == {expected[chunk]}
    assert buffers_of(job.server) == int(received or index == 1), "copied once, if at all"


def test_pushes_that_all_wait_for_each_other_are_never_copied() -> None:
    """No worker has new weights before every server has reduced its gradient."""
    job = Alone(1, holders=(0, 1), mode=ServerMode())
    job.begin()
    for chunk in TRAINABLE:
        for worker in (0, 1):
            job.push(worker, 1, chunk, flat(1.0))
    assert [m.kind for m in job.sent] == [Kind.VERSION_STAGED]
    assert buffers_of(job.server) == 0


# -- generations and lives that are over, and decisions that others must know --------------------


def test_a_copy_of_a_beginning_voids_nothing() -> None:
    job = Alone()
    for generation in (1, 2):
        job.begin(generation)
    job.push(0, 1, TRAINABLE[0], flat(1.0), generation=2)
    for generation in (1, 2):
        job.begin(generation)
    job.push(0, 1, TRAINABLE[1], flat(1.0), generation=2)
    assert job.server.generation == 2
    assert job.staged() == {(0, 1)}


def test_of_a_life_that_is_over_nothing_stays_and_nothing_is_taken() -> None:
    job = Alone()
    job.begin()
    for worker in (0, 1):
        job.push(worker, 1, TRAINABLE[0], flat(1.0))
    over = WorkerEnded(1, 0, worker=1, life=0, pushes=())
    job.server.handle(COORDINATOR, over.pack())
    held = job.server.gradient_stores[TRAINABLE[0]]
    assert [*held.staged] == [PushId(0, 0, 1)]
    for sequence in (1, 2):  # the rest of that push, and another one
        job.push(1, sequence, TRAINABLE[1], flat(1.0))
    assert job.server.refused == 2
    job.push(0, 1, TRAINABLE[1], flat(1.0))
    assert job.staged() == {(0, 1)}
    successor = Push(1, 1, 1, 0, TRAINABLE[0], 1.0, 1.0)
    job.server.handle(worker_peer(1), successor.pack(flat(1.0)))
    assert PushId(1, 1, 1) in held.staged


def test_of_a_user_that_left_what_had_not_arrived_whole_is_dropped_and_the_coordinator_knows() -> (
    None
):
    job = Alone(mode=ServerMode(stages_each=True, versions_differ=True, open_to_all=True))
    job.begin()
    for user in (1, 100):
        job.push(user, 1, TRAINABLE[0], flat(1.0))
    job.server.lost(CLIENT, "reset")  # of the same number as a user
    held = job.server.gradient_stores[TRAINABLE[0]]
    assert (len(held.staged), job.sent) == (2, [])
    job.server.lost(worker_peer(1), "reset")
    assert [*held.staged] == [PushId(100, 0, 1)]
    assert [message.body for message in job.sent] == [UserLeft(1)]


@pytest.mark.parametrize(
    ("index", "holders", "logged"),
    [(1, (0, 1), 2), (0, (0, 1), 0), (2, (1, 2), 0), (1, (1,), 0)],
)
def test_the_second_server_alone_says_what_it_knows_and_only_if_chunks_have_copies(
    index: int, holders: tuple[int, ...], logged: int
) -> None:
    """A server beside the coordinator would die with it; a third one would say the same again."""
    job = Alone(index, holders, HostMap.apart(2, 3))
    job.begin()
    for chunk in TRAINABLE:
        job.push(0, 1, chunk, flat(1.0))
    job.commit(1, PushId(0, 0, 1))
    job.put(1, 7.0)
    job.server.handle(COORDINATOR, InstallPut(1, 2, install=[("client", 100, 1)]).pack())
    assert job.server.version == 2
    assert sum(m.kind is Kind.LOGGED for m in job.sent) == logged


def test_states_that_are_put_have_room_for_any_optimizer_but_not_for_everything() -> None:
    job = Alone()
    part = {"name": "w", "key": "x", "start": 0, "stop": 4, "plain": False, "dtype": "uint8"}

    def arriving(size: int, sequence: int = 1) -> torch.Tensor | None:
        put = PutState(sequence, 0, shape=[size], number=1, **part)
        return job.server.destination(put.pack(), size)

    with pytest.raises(ProtocolError, match=r"68719476736 bytes beside 0 .* server 0 takes 107374"):
        arriving(1 << 36)
    held = arriving(1 << 29)
    assert held is not None
    for sequence in (1, 2):  # virtual memory alone: nothing is written to it
        value = torch.empty(1 << 29, dtype=torch.uint8)
        weights = Put(sequence, 0, chunk=0)
        job.server.handle(CLIENT, weights.pack(value))
    with pytest.raises(ProtocolError, match="8192 bytes beside 1073741824 of states"):
        arriving(8192, 3)
    job.server.lost(CLIENT, "reset")
    assert arriving(8192, 1) is not None, "states of a client that is gone make room"


# -- pushes that come too early -----------------------------------------------------------------


def test_early_pushes_are_kept_for_two_steps_and_copies_of_each_worker() -> None:
    job = Alone()
    for worker in (0, 1):
        for sequence in range(1, 5):  # four times the chunks of a step
            for chunk in TRAINABLE:
                job.push(worker, sequence, chunk, flat(1.0))
    assert job.server.refused == 0
    oldest = f"chunk {TRAINABLE[0]} at generation 1 and version 0, is dropped"
    with pytest.raises(ProtocolError, match=oldest):
        job.push(1, 5, TRAINABLE[0], flat(1.0))
    assert job.server.refused == 1
    with pytest.raises(ProtocolError, match=f"chunk {TRAINABLE[1]} at generation 1"):
        job.push(1, 5, TRAINABLE[1], flat(1.0))
    assert job.server.refused == 2
    assert not job.staged()
    job.begin()
    assert job.staged() == {(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4), (1, 5)}
    for sequence in range(6, 14):  # those that were early once count no more
        job.push(1, sequence, TRAINABLE[0], flat(1.0), generation=2)
    assert job.server.refused == 2


def test_an_early_push_that_is_refused_when_its_turn_comes_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Alone()
    for worker in (7, 1):  # the first is no member
        job.push(worker, 1, TRAINABLE[0], flat(1.0))
    job.begin()
    assert [*job.server.gradient_stores[TRAINABLE[0]].staged] == [PushId(1, 0, 1)]
    assert "refused PUSH from worker 7" in caplog.text
    assert "worker 7 is no member" in caplog.text


def test_the_memory_of_an_early_push_that_is_dropped_is_used_again() -> None:
    job, size = Alone(), flat(0.0).numel()
    first = Push(1, 0, 1, 0, TRAINABLE[0], 1.0, 1.0).pack()
    memory = job.server.destination(first, size)
    assert memory is not None
    job.push(0, 1, TRAINABLE[0], memory)
    for sequence in range(2, 9):
        job.push(0, sequence, TRAINABLE[0], flat(1.0))
    other = job.server.destination(first, size)
    assert other is not None
    assert other.data_ptr() != memory.data_ptr()
    with pytest.raises(ProtocolError, match="dropped"):
        job.push(0, 9, TRAINABLE[0], other)
    again = job.server.destination(first, size)
    assert again is not None
    assert again.data_ptr() == memory.data_ptr()


def test_of_a_worker_that_is_lost_no_early_push_stays() -> None:
    job, size = Alone(), flat(0.0).numel()
    memory = job.server.destination(Push(1, 0, 1, 0, TRAINABLE[0], 1.0, 1.0).pack(), size)
    assert memory is not None
    job.push(0, 1, TRAINABLE[0], memory)
    for worker in (0, 1):
        for chunk in TRAINABLE[worker == 0 :]:
            job.push(worker, 1, chunk, flat(1.0))
    job.server.lost(worker_peer(0), "reset")
    again = job.server.destination(Push(1, 0, 1, 0, TRAINABLE[0], 1.0, 1.0).pack(), size)
    assert again is not None
    assert again.data_ptr() == memory.data_ptr(), "its memory is used again"
    job.begin()
    assert job.staged() == {(1, 1)}


def test_an_aggregator_may_be_as_early_as_all_of_its_workers() -> None:
    hosts = HostMap(workers=(0, 0), servers=(0, 1), gathers=True)
    job = Alone(1, (1,), hosts, mode=ServerMode())

    def push(number: int) -> None:
        pushes = (PushId(0, 0, number), PushId(1, 0, number))
        early = HostPush(1, 0, TRAINABLE[0], 1.0, 2.0, pushes)
        job.server.handle(aggregator_peer(0), early.pack(flat(1.0)))

    for number in range(1, 17):  # twice as many as of one worker
        push(number)
    assert job.server.refused == 0
    with pytest.raises(ProtocolError, match="more than two steps"):
        push(17)
