# ruff: noqa: F811 - fixtures are imported, and named as arguments
"""Shared memory between two processes of one host: payloads that are lent where they lie."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import socket
import sys
from collections import deque
from multiprocessing.connection import Connection
from types import FrameType

import pytest
import torch

from steepest.core.messages.message import COORDINATOR, Kind, Message, worker_peer
from steepest.core.tensors import shared_memory
from steepest.core.tensors.allocator import Recycler
from steepest.core.tensors.memory import address_of
from steepest.core.tensors.shared_memory import (
    BOARD_BYTES,
    NOTICE,
    SHARED_FROM,
    Reusable,
    Segment,
    allocate,
    segment_of,
)
from steepest.core.transport.frames import FrameReader, encode
from steepest.errors import ProtocolError
from tests.processes import Child
from tests.random_examples import seeds
from tests.said import heard, said
from tests.socket_ends import (
    Node,
    client,  # noqa: F401 - a fixture
    ends,  # noqa: F401 - a fixture
    node,  # noqa: F401 - a fixture
    server,  # noqa: F401 - a fixture
    until,
)

pytestmark = pytest.mark.skipif(not shared_memory.AVAILABLE, reason="memfd is Linux'")
WORKER = worker_peer(0)


@pytest.fixture
def family() -> str:
    return "unix"


@pytest.fixture
def leaving(server: Node) -> Node:
    """A server that leaves payloads where they lie."""
    server.place = lambda message, size: message.payload
    return server


def data_of(size: int, start: int = 0) -> torch.Tensor:
    return (torch.arange(start, start + size) % 251).to(torch.uint8)


def lendable(size: int) -> torch.Tensor:
    memory = allocate(size)
    memory.copy_(data_of(size))
    return memory


def message_of(payload: torch.Tensor, sequence: int = 1) -> Message:
    return said(Kind.PUSH, payload, WORKER, COORDINATOR, sequence=sequence)


def open_descriptors() -> int:
    """Of shared memory; other threads of this process open and close theirs."""
    gc.collect()
    return len([fd for fd in os.listdir("/proc/self/fd") if _is_ours(f"/proc/self/fd/{fd}")])


def mapped() -> int:
    """Mappings of shared memory in this process; other tests may have left some."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        return sum("memfd:steepest" in line for line in maps)


def _is_ours(path: str) -> bool:
    try:
        return "memfd:steepest" in os.readlink(path)
    except OSError:  # closed meanwhile: the one of listdir itself, say
        return False


def test_memory_goes_with_its_last_view() -> None:
    before = open_descriptors()
    memory = allocate(SHARED_FROM)
    part = memory[100:200]
    assert segment_of(part) is segment_of(memory) is not None
    assert segment_of(torch.empty(10)) is None
    del memory
    assert segment_of(part) is not None
    del part
    assert open_descriptors() == before
    assert segment_of(allocate(SHARED_FROM - 1)) is None, "what is small goes through the socket"


def test_a_segment_is_found_while_other_threads_make_some() -> None:
    """A segment is made, as by another thread, before each line of Python that the look-up runs."""
    mine, made = allocate(SHARED_FROM), []

    def meanwhile(frame: FrameType, event: str, argument: object) -> object:
        sys.settrace(None)
        made.append(allocate(SHARED_FROM))
        sys.settrace(meanwhile)
        return meanwhile

    traced = sys.gettrace()
    sys.settrace(meanwhile)
    try:
        found = segment_of(mine)
    finally:
        sys.settrace(traced)
    assert found is not None
    assert found.address == mine.data_ptr()
    assert len(made) > 5


def test_a_lent_payload_is_read_where_it_lies_until_the_reader_lets_go(
    ends: tuple[object, object], leaving: Node, client: Node
) -> None:
    memory = lendable(1 << 20)
    part = memory[4096 : 4096 + SHARED_FROM]
    ends[0].send(message_of(part))
    until(lambda: leaving.messages, client, leaving)
    assert torch.equal(leaving.messages[0].payload, part)
    part[0] = 99
    assert leaving.messages[0].payload[0] == 99, "it is the same memory"
    assert client.transport.in_use(part)
    assert not client.transport.in_use(memory)
    view = leaving.messages.pop().payload.view(torch.float64)
    assert client.transport.in_use(part), "a view is left"
    del view
    assert not client.transport.in_use(part)


def test_lent_memory_that_its_owner_lets_go_of_stays_for_the_reader(
    ends: tuple[object, object], leaving: Node, client: Node
) -> None:
    message = message_of(lendable(1 << 20))
    address = message.payload.data_ptr()
    ends[0].send(message)
    until(lambda: leaving.messages, client, leaving)
    del message
    client.turn()  # now it knows that the reader could map it
    gc.collect()
    assert address not in shared_memory._segments, "this end holds nothing"
    assert torch.equal(leaving.messages[0].payload, data_of(1 << 20))


@pytest.mark.long
def test_memory_to_be_used_again_is_not_before_the_reader_has_returned_it(
    ends: tuple[object, object], leaving: Node, client: Node
) -> None:
    recycler = Recycler(Reusable(), least=SHARED_FROM, most=100, rounded=True)
    addresses = set()

    def send(value: int) -> None:
        payload = recycler.empty(SHARED_FROM + value)
        payload[:] = value
        addresses.add(address_of(payload))
        ends[0].send(message_of(payload))

    many = 2 * shared_memory._MANY_KEPT
    for value in range(many):
        send(value)
    until(lambda: len(leaving.messages) == many, client, leaving)
    assert len(addresses) == many
    for value, message in enumerate(leaving.messages):
        assert (message.payload == value).all(), "it is not written to while it is read"
    leaving.messages.clear()
    for value in range(10 * many):
        send(value % 100)
        until(lambda: leaving.messages, client, leaving)
        leaving.messages.clear()
    assert len(addresses) < 4 * many, "what has come back is used again"


@pytest.mark.filterwarnings(
    "ignore:.*fork:DeprecationWarning"
)  # Python 3.12 warns where threads are about
def test_a_forked_child_gives_nothing_back(
    ends: tuple[object, object], leaving: Node, client: Node
) -> None:
    memory = lendable(SHARED_FROM)
    ends[0].send(message_of(memory))
    until(lambda: leaving.messages, client, leaving)
    if (child := os.fork()) == 0:
        leaving.messages.clear()
        os._exit(0)
    os.waitpid(child, 0)
    assert client.transport.in_use(memory)


def test_memory_that_nobody_can_map_is_copied_once_and_may_change_at_once(
    ends: tuple[object, object], leaving: Node, client: Node
) -> None:
    payload = data_of(SHARED_FROM)
    ends[0].send(message_of(payload))
    payload.zero_()
    until(lambda: leaving.messages, client, leaving)
    assert torch.equal(leaving.messages[0].payload, data_of(SHARED_FROM))
    assert not client.transport.in_use(payload)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_reader_with_a_place_of_its_own_has_it_copied_there(
    ends: tuple[object, object], server: Node, client: Node, wanted: bool
) -> None:
    target = torch.zeros(SHARED_FROM, dtype=torch.uint8)
    server.place = lambda message, size: target if wanted else None
    memory = lendable(SHARED_FROM)
    ends[0].send(message_of(memory))
    until(lambda: server.messages, client, server)
    assert server.messages[0].payload is (target if wanted else None)
    assert torch.equal(target, memory) is wanted
    assert not client.transport.in_use(memory), "it is given back at once"


@pytest.mark.long
@seeds(1)
def test_sizes_of_all_kinds_both_ways_arrive_whole_and_in_order_however_they_are_given_back(
    ends: tuple[object, object], leaving: Node, client: Node, seed: int
) -> None:
    client.place = lambda message, size: message.payload
    chance = random.Random(seed)
    memory = lendable(4 << 20)
    expected: dict[Node, list[torch.Tensor]] = {leaving: [], client: []}
    held = []
    for sequence in range(120):
        near, reader, back = chance.choice([(ends[0], leaving, False), (ends[1], client, True)])
        size = chance.choice([SHARED_FROM, SHARED_FROM + 7, 1 << 20])
        start = chance.randrange((4 << 20) - size)
        payload = memory[start : start + size] if chance.random() < 0.5 else data_of(size, sequence)
        message = message_of(payload, sequence)
        if back:
            message.source, message.target = COORDINATOR, WORKER
        near.send(message)
        expected[reader].append(payload)
        until(lambda reader=reader: reader.messages, client, leaving)
        held.append(reader.messages.pop())
        assert heard(held[-1]).sequence == sequence
        assert torch.equal(held[-1].payload, payload)
        chance.shuffle(held)
        del held[chance.randrange(1, 20) :]
    held.clear()
    assert not client.transport.in_use(memory)
    assert not client.transport.lending._lent or not client.transport._events


def test_room_for_copies_is_used_again(
    ends: tuple[object, object], leaving: Node, client: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "REGION_BYTES", 2 * SHARED_FROM)
    for sequence in range(5):
        for _ in range(3):
            ends[0].send(message_of(data_of(SHARED_FROM, sequence)))
        until(lambda: len(leaving.messages) == 3, client, leaving)
        assert all(
            torch.equal(message.payload, data_of(SHARED_FROM, sequence))
            for message in leaving.messages
        )
        leaving.messages.clear()
        assert len(client.transport.lending._outbox) == 2, "two regions of two payloads"


@pytest.mark.parametrize("limit", ["OUTBOX_BYTES", "board"])
def test_when_too_much_is_lent_payloads_go_through_the_socket(
    ends: tuple[object, object],
    leaving: Node,
    client: Node,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
) -> None:
    near = ends[0]
    if limit == "board":
        while len(near._lender._free) > 1:
            near._lender._free.pop()
    else:
        monkeypatch.setattr(shared_memory, "OUTBOX_BYTES", shared_memory.REGION_BYTES)
        monkeypatch.setattr(shared_memory, "REGION_BYTES", SHARED_FROM)
        monkeypatch.setattr(shared_memory, "OUTBOX_BYTES", SHARED_FROM)
    own = [torch.empty(SHARED_FROM, dtype=torch.uint8) for _ in range(3)]
    leaving.place = lambda message, size: own.pop() if message.payload is None else message.payload
    for sequence in range(3):
        near.send(message_of(data_of(SHARED_FROM, sequence), sequence))
    until(lambda: len(leaving.messages) == 3, client, leaving)
    assert [heard(message).sequence for message in leaving.messages] == [0, 1, 2]
    for sequence, message in enumerate(leaving.messages):
        assert torch.equal(message.payload, data_of(SHARED_FROM, sequence))
    assert len(own) == 1, "one was lent, two were sent"


@pytest.mark.long
def test_a_closed_channel_takes_back_what_it_lent_and_leaves_nothing_behind(
    ends: tuple[object, object], leaving: Node, client: Node
) -> None:
    before = mapped()
    memory = lendable(SHARED_FROM)
    ends[0].send(message_of(memory))
    ends[0].send(message_of(data_of(SHARED_FROM)))
    until(lambda: len(leaving.messages) == 2, client, leaving)
    assert mapped() > before
    ends[0].close()
    until(lambda: leaving.lost, leaving)
    assert not client.transport.in_use(memory)
    assert torch.equal(leaving.messages[0].payload, memory), (
        "the reader's mapping stays as long as it is needed"
    )
    leaving.messages.clear()
    leaving.lost.clear()
    leaving.opened.clear()
    client.transport.close()
    del memory
    assert mapped() <= before


def hold(ready: Connection, address: object) -> None:
    """A reader in another process: takes one payload where it lies, and never lets go."""
    client = Node(WORKER)
    client.place = lambda message, size: message.payload
    client.transport.connect(address)
    until(lambda: client.messages, client)
    ready.send(float(client.messages[0].payload[7]))
    ready.recv()


@pytest.mark.long
def test_a_reader_that_is_killed_gives_everything_back(server: Node) -> None:
    """kill -9 in the middle of a loan: the memory may change again, and nothing of it is left in the system."""
    reader = Child(hold, server.address)
    memory = lendable(1 << 20)
    until(lambda: server.opened, server)
    before = open_descriptors()
    message = message_of(memory)
    message.source, message.target = COORDINATOR, WORKER
    server.opened[-1].send(message)
    until(reader.pipe.poll, server)
    assert reader.hear() == 7.0
    assert server.transport.in_use(memory)
    reader.kill()
    until(lambda: server.lost, server)
    assert not server.transport.in_use(memory)
    server.opened.clear()
    server.lost.clear()
    assert open_descriptors() <= before
    assert not [name for name in os.listdir("/dev/shm") if "steepest" in name]


def sealed(size: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, 1033, 6)
    return descriptor


def test_memory_that_could_be_pulled_away_or_is_none_is_refused() -> None:
    before = open_descriptors()
    unsealed = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    for descriptor in (unsealed, sealed(0), os.open("/dev/null", os.O_RDONLY)):
        with pytest.raises(ProtocolError, match="shared memory of a peer"):
            Segment.attach(descriptor)
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("notice", "size"),
    [
        ((1, 0, 0), 8),
        ((0, BOARD_BYTES, 0), 8),
        ((0, 0, 4089), 8),
        ((0, 0, 0), 4097),
        ((0, 0, 0), 0),
    ],
)
def test_a_notice_that_no_lender_gives_is_refused(notice: tuple[int, int, int], size: int) -> None:
    with pytest.raises(ProtocolError, match="shared memory"):
        shared_memory.Borrower().borrow(
            NOTICE.pack(*notice), size, deque([sealed(BOARD_BYTES), sealed(4096)])
        )


def test_a_lent_payload_over_a_stream_without_shared_memory_is_refused() -> None:
    near, far = socket.socketpair()
    near.sendall(encode(message_of(data_of(SHARED_FROM)), NOTICE.pack(0, 0, 0)))
    reader = FrameReader(far.recv_into, lambda message, size: torch.empty(size, dtype=torch.uint8))
    far.setblocking(False)
    with pytest.raises(ProtocolError, match="shared memory"):
        reader.read()
    near.close()
    far.close()


def test_a_peer_that_announces_shared_memory_and_passes_none_is_refused(
    ends: tuple[object, object], server: Node, client: Node
) -> None:
    near = ends[0]
    near._append(memoryview(encode(message_of(data_of(SHARED_FROM)), NOTICE.pack(0, 0, 0))))
    near.flush()
    until(lambda: server.lost, server)
    assert server.transport.refused == 1
