# ruff: noqa: F811 - fixtures are imported, and named as arguments
"""Shared memory between two processes of one host: the ring alone, and behind a channel."""

from __future__ import annotations

import fcntl
import os
import socket

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steepest.comm import shared
from steepest.comm.frame import FrameReader, encode
from steepest.comm.message import COORDINATOR, Kind, Message, worker_peer
from steepest.comm.shared import PIECE_BYTES, RING_BYTES, SHARED_FROM, RingReader, RingWriter
from steepest.errors import ProtocolError
from tests.test_wire import Node, client, ends, node, server, until  # noqa: F401 - fixtures

pytestmark = pytest.mark.skipif(not shared.AVAILABLE, reason="memfd and eventfd are Linux'")
WORKER = worker_peer(0)


@pytest.fixture
def family() -> str:
    return "unix"


def pair() -> tuple[RingWriter, RingReader]:
    writer = RingWriter()
    return writer, RingReader([os.dup(descriptor) for descriptor in writer.descriptors])


def data_of(size: int, start: int = 0) -> torch.Tensor:
    return (torch.arange(start, start + size) % 251).to(torch.uint8)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@given(sizes=st.lists(st.integers(1, 3 * PIECE_BYTES), min_size=1, max_size=8), lag=st.integers(1, 9))
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_what_is_written_is_read_in_order_however_far_the_reader_lags(sizes: list[int], lag: int) -> None:
    writer, reader = pair()
    everything = data_of(sum(sizes))
    got = torch.empty_like(everything)
    pieces: list[int] = []
    at = taken = 0
    view, target = everything.numpy().data, got.numpy().data

    def take() -> None:
        nonlocal taken
        count = pieces.pop(0)
        reader.read(count, target[taken:])
        taken += count

    for size in sizes:
        end = at + size
        while at < end:
            count = writer.write(view[at:end])
            at += count
            pieces += [count] if count else []
            if not count or len(pieces) > lag:
                take()
    while pieces:
        take()
    writer.close()
    reader.close()
    assert torch.equal(got, everything)


def test_a_full_ring_takes_nothing_until_the_reader_has_read() -> None:
    writer, reader = pair()
    data = data_of(RING_BYTES + 10).numpy().data
    counts = []
    while count := writer.write(data[sum(counts) :]):
        counts.append(count)
    assert sum(counts) == RING_BYTES
    assert writer.write(data[:1]) == 0
    reader.read(counts[0], None)
    assert writer.write(data[RING_BYTES:]) == 10
    writer.close()
    reader.close()


@pytest.mark.parametrize("count", [0, PIECE_BYTES + 1, 2**31])
def test_a_piece_that_no_writer_makes_is_refused(count: int) -> None:
    writer, reader = pair()
    with pytest.raises(ProtocolError, match="out of place"):
        reader.read(count, None)
    writer.close()
    reader.close()


def test_memory_that_could_be_pulled_away_or_is_no_ring_is_refused() -> None:
    unsealed = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, RING_BYTES)
    with pytest.raises(ProtocolError):
        RingReader([unsealed, os.eventfd(0)])
    small = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(small, 4096)
    fcntl.fcntl(small, 1033, 6)
    with pytest.raises(ProtocolError):
        RingReader([small, os.eventfd(0)])
    with pytest.raises(ProtocolError):
        RingReader([os.open("/dev/null", os.O_RDONLY), os.eventfd(0)])


def message_of(sequence: int, size: int) -> Message:
    return Message(Kind.PUSH, sequence=sequence, payload=data_of(size, sequence), source=WORKER, target=COORDINATOR)


@pytest.mark.parametrize(
    "sizes", [[SHARED_FROM], [SHARED_FROM - 1, SHARED_FROM, 10, 3 * RING_BYTES + 7, 0, PIECE_BYTES]]
)
def test_payloads_arrive_through_shared_memory_whole_and_in_order(
    ends: tuple[object, object],
    server: Node,
    client: Node,
    sizes: list[int],
) -> None:
    near = ends[0]
    for sequence, size in enumerate(sizes):
        near.send(message_of(sequence, size))
    until(lambda: len(server.messages) == len(sizes), client, server)
    for sequence, (message, size) in enumerate(zip(server.messages, sizes, strict=True)):
        assert message.sequence == sequence
        assert (message.payload is None and size == 0) or torch.equal(message.payload, data_of(size, sequence))
    assert near._ring_out is not None
    assert near.pending == 0


def test_both_directions_may_be_full_at_once(
    ends: tuple[object, object],
    server: Node,
    client: Node,
) -> None:
    near, far = ends
    for sequence in range(4):
        near.send(message_of(sequence, RING_BYTES))
        back = message_of(sequence, RING_BYTES)
        back.source, back.target = COORDINATOR, WORKER
        far.send(back)
    until(lambda: len(server.messages) == 4 and len(client.messages) == 4, client, server)
    assert all(torch.equal(m.payload, data_of(RING_BYTES, m.sequence)) for m in server.messages + client.messages)


def test_what_waits_for_room_may_be_owned_and_its_memory_change(
    ends: tuple[object, object],
    server: Node,
    client: Node,
) -> None:
    near = ends[0]
    message = message_of(1, 3 * RING_BYTES)
    near.send(message)
    near.own_pending(message.payload)
    message.payload.zero_()
    until(lambda: server.messages, client, server)
    assert torch.equal(server.messages[0].payload, data_of(3 * RING_BYTES, 1))


def test_a_closed_channel_leaves_no_descriptor_and_no_mapping(
    ends: tuple[object, object],
    server: Node,
    client: Node,
) -> None:
    before = open_descriptors()
    near = ends[0]
    near.send(message_of(1, 2 * RING_BYTES))
    until(lambda: server.messages, client, server)
    assert open_descriptors() > before
    near.close()
    until(lambda: server.lost, server)
    assert open_descriptors() == before - 2
    with open("/proc/self/maps") as maps:
        assert "memfd:steepest" not in maps.read()


def test_a_shared_payload_over_a_stream_without_a_ring_is_refused() -> None:
    near, far = socket.socketpair()
    near.sendall(encode(message_of(1, SHARED_FROM), shared=True) + b"\1\0\0\0")
    reader = FrameReader(far.recv_into, lambda message, size: torch.empty(size, dtype=torch.uint8))
    far.setblocking(False)
    with pytest.raises(ProtocolError, match="shared memory"):
        reader.read()
    near.close()
    far.close()


def test_a_peer_that_announces_shared_memory_and_passes_none_is_refused(
    ends: tuple[object, object],
    server: Node,
    client: Node,
) -> None:
    near = ends[0]
    near._append(memoryview(encode(message_of(1, SHARED_FROM), shared=True) + b"\1\0\0\0"))
    near.flush()
    until(lambda: server.lost, server)
    assert server.transport.refused == 1


def test_room_and_the_end_of_a_channel_may_come_at_once(
    ends: tuple[object, object], server: Node, client: Node
) -> None:
    near, far = ends
    near.send(message_of(1, 2 * RING_BYTES))
    until(lambda: near in client.transport._waiting, client)
    go_on = client.transport._selector.get_key(near._ring_out.room).data
    far.close()  # the reader has made room, and is gone: both are seen in one look
    until(lambda: client.lost, client)
    go_on()
    assert not client.transport._waiting
