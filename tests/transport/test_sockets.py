# ruff: noqa: F811 - fixtures are imported, and named as arguments
"""The wire: one contract over TCP and Unix-domain sockets, and what strangers cannot do to it."""

from __future__ import annotations

import logging
import os
import resource
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from steepest.core.messages.message import COORDINATOR, Kind, worker_peer
from steepest.core.transport import handshake, sockets
from steepest.core.transport.frames import encode
from steepest.errors import AuthenticationError, DeadlineError, PeerLostError, ProtocolError
from tests.limits import limited
from tests.said import heard, said
from tests.socket_ends import (
    FAMILIES,
    GREETING,
    LIMIT,
    MIRROR,
    NONCE,
    RUDE,
    WORKER,
    Node,
    assert_serves,
    bare,
    client,  # noqa: F401 - a fixture
    client_hello,
    connecting_to,
    dial,
    ends,  # noqa: F401 - a fixture
    family,  # noqa: F401 - a fixture
    identity_in,
    message_of,
    node,  # noqa: F401 - a fixture
    receive,
    server,  # noqa: F401 - a fixture
    together,
    until,
)

HELLO = 2 + 5 + 5  # bytes: how many roles are its own, one of its own, one that it means


def test_a_node_meets_its_own_on_a_unix_socket_and_both_ends_know_each_other(ends, family):
    near, far = ends
    assert near._socket.family == far._socket.family == FAMILIES[family]
    assert (near.peers, far.peers) == ((COORDINATOR,), (WORKER,))
    assert (near.name.split()[0], far.name) == ("coordinator", "worker 2")


@pytest.mark.few(2)
def test_messages_arrive_in_order_both_ways_and_payloads_in_the_sinks_memory(ends, server, client):
    sizes = [8 << 20, *[None, 1, 3000, 100_000] * 100]
    for number, size in enumerate(sizes):
        for end in ends:
            end.send(message_of(number, size))
    until(lambda: len(server.messages) == len(client.messages) == len(sizes), server, client)
    for end in (server, client):
        assert [heard(message).sequence for message in end.messages] == list(range(len(sizes)))
        arrived = [message for message in end.messages if message.payload is not None]
        for message, landed in zip(arrived, end.landed, strict=True):
            assert message.payload is landed
            number = heard(message).sequence
            assert torch.equal(landed, message_of(number, sizes[number]).payload)
    assert (
        server.transport.bytes_sent
        == client.transport.bytes_sent
        == sum(size or 0 for size in sizes)
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("pumping", [True, False])
@pytest.mark.parametrize("owned", [True, False])
def test_send_never_blocks_and_what_is_pending_may_be_owned_and_follows(
    ends, server, client, pumping, owned
):
    near, message = ends[0], message_of(1, size=32 << 20)
    near._lender = None  # through the socket, as between hosts
    near.send(message)
    pending = near.pending
    if owned:
        near.own_pending(message.payload)
    assert near.pending == pending > 0
    message.payload.fill_(9)
    if pumping:
        until(lambda: client.transport.pump() or server.messages, server)
    else:
        until(lambda: server.messages, server, client)
    assert near.pending == 0
    assert torch.equal(server.messages[0].payload, message_of(1, size=32 << 20).payload) == owned


def test_the_other_end_of_a_closed_channel_hears_of_it_once(ends, server, client):
    near, far = ends
    near.close()
    near.close()
    near.send(message_of(1))  # goes nowhere
    until(lambda: server.lost, server)
    server.turn()
    assert server.lost == [far]
    assert (far.closed, far.pending, server.transport.refused) == (True, 0, 0)
    client.turn()
    assert client.lost == []


@pytest.mark.few(1)
def test_a_forked_child_has_no_part_in_the_channels_of_its_parent(ends, server, client):
    near, far = ends
    client.transport.lends = near._lender = None  # payloads through the socket
    near.send(message_of(1, size=8 << 20))
    assert near.pending
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        near.flush()
        near.send(message_of(2))
        client.transport.pump()
        client.transport.close()
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    until(lambda: server.messages, server, client)
    near.send(message_of(3))
    far.send(said(Kind.COUNTERS, None, COORDINATOR, WORKER))
    until(lambda: client.messages and len(server.messages) > 1, server, client)
    assert [heard(message).sequence for message in server.messages] == [1, 3]
    assert torch.equal(server.messages[0].payload, message_of(1, size=8 << 20).payload)
    near.close()
    until(lambda: server.lost, server)  # although the child lives
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)


@pytest.mark.parametrize("sending", [False, True])
def test_what_a_peer_sent_arrives_although_it_closed_with_unread_input(
    ends, server, client, sending
):
    near, far = ends
    far.send(message_of(1, 32 << 20 if sending else 10))
    for number in range(3):
        near.send(message_of(number))
    near.close()
    if sending:
        far.send(message_of(2))
    until(lambda: server.lost, server)
    assert [heard(message).sequence for message in server.messages] == [0, 1, 2]
    assert (server.lost, far.pending) == ([far], 0)


def test_wake_ends_a_poll_of_another_thread(node):
    waiting = node(COORDINATOR)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(50):
            future = pool.submit(waiting.transport.poll, LIMIT)
            waiting.transport.wake()
            assert future.result(LIMIT / 2) == []


def test_close_is_idempotent_and_leaves_no_descriptors(family, request):
    identity = identity_in(request)
    before = len(os.listdir("/proc/self/fd"))
    server, client = (
        Node(COORDINATOR, identity=identity),
        Node(WORKER, node="here" if family == "unix" else "elsewhere", identity=identity),
    )
    address = server.transport.listen("127.0.0.1")
    channel = together(lambda: client.transport.connect(address), server)
    until(lambda: server.opened, server)
    channel.send(message_of(1, size=32 << 20))
    with socket.create_connection((address.host, address.port)):
        server.turn()
        for node in (server, client, server, client):
            node.transport.close()
            node.transport.wake()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_short_token_is_no_token():
    with pytest.raises(AuthenticationError):
        sockets.WireTransport(b"short", (), "here", lambda channel, message, size: None)


def test_a_wrong_token_is_refused_and_named_and_never_logged(node, server, family, caplog):
    caplog.set_level(logging.DEBUG)
    wrong = node(
        worker_peer(1),
        "here" if family == "unix" else "elsewhere",
        b"wrong horse battery staple",
        identity=server.identity,
    )
    with pytest.raises(AuthenticationError, match="token"):
        together(lambda: wrong.transport.connect(server.address), server)
    until(lambda: server.transport.refused == 1, server)
    assert server.opened == server.lost == []
    assert_serves(server, node)
    assert "token" in caplog.text
    secrets = ["horse battery staple", b"horse battery staple".hex()]
    if server.identity:
        secrets += server.identity.key.decode().splitlines()[1:-1]
    for secret in secrets:
        assert secret not in caplog.text


@pytest.mark.few(20)
@pytest.mark.parametrize("said", RUDE.values(), ids=RUDE.keys())
@pytest.mark.parametrize("listening", [False, True])
def test_who_does_not_prove_the_token_is_refused_and_harms_nobody(
    said, listening, server, family, node
):
    with dial(server.address, family) as rude:
        if listening:
            said = said.replace(MIRROR, together(lambda: receive(rude, 43), server)[11:])
        rude.sendall(said)
    until(lambda: server.transport.refused == 1, server)
    assert server.opened == server.lost == []
    assert_serves(server, node)


@pytest.mark.parametrize("ending", [encode(message_of(1, size=50)) + bytes(49), b"garbage" * 20])
def test_a_truncated_or_damaged_frame_after_the_handshake_is_refused(ending, ends, server, node):
    near, far = ends
    near._socket.sendall(encode(message_of(3)) + ending)
    near.close()
    until(lambda: server.lost, server)
    assert [heard(message).sequence for message in server.messages] == [3]
    assert (server.transport.refused, server.lost) == (1, [far])
    assert_serves(server, node)


@pytest.mark.parametrize("half", [False, True], ids=["silent", "half"])
def test_silent_connections_are_dropped_at_the_deadline(half, server, family, monkeypatch):
    monkeypatch.setattr(handshake, "OPENING_SECONDS", 0.0)
    said = client_hello() if family == "tls" else GREETING + NONCE
    with dial(server.address, bare(family)) as silent:
        silent.sendall(said[:20] if half else b"")
        until(lambda: server.transport.refused == 1, server)
        # the greeting, that it may try again (which TLS cannot say yet), the end
        assert len(receive(silent, 100)) == (43 if family == "tls" else 43 + 4)


def test_running_out_of_descriptors_drops_the_unproven_and_ends_nothing(server, node):
    with dial(server.address, "tcp"), dial(server.address, "unix"):
        server.turn()  # accepts both
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with dial(server.address, "tcp") as third:
            resource.setrlimit(resource.RLIMIT_NOFILE, (third.fileno() + 1, limits[1]))
            try:
                until(lambda: server.transport.refused, server)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert_serves(server, node)


@pytest.mark.parametrize("ways", ["tcp", "unix"])
def test_connecting_without_a_free_descriptor_ends_at_the_deadline(ways, server, node):
    caller = node(WORKER, ways=ways)
    with limited(0), pytest.raises(DeadlineError, match=r"has no file descriptor left \(raise"):
        caller.transport.connect(server.address, 0.02)
    together(lambda: caller.transport.connect(server.address), server)
    assert server.opened


STRANGE = {
    "HTTP": (b"HTTP/1.1 400 Bad Request\r\n" * 9, ProtocolError),
    "oversized": (GREETING + NONCE + b"\xff\xff\xff\x7f", ProtocolError),
    "a wrong proof": (GREETING + NONCE + struct.pack("<I", 5) + bytes(5 + 32), AuthenticationError),
    "the client's own proof back": (GREETING + NONCE + MIRROR, AuthenticationError),
    "gone at once": (b"", PeerLostError),
    "gone after half a greeting": (GREETING[:5], PeerLostError),
    "gone before the proof": (GREETING + NONCE, PeerLostError),
}


@pytest.mark.parametrize(("said", "error"), STRANGE.values(), ids=STRANGE.keys())
def test_a_listener_that_is_an_impostor_or_goes_away_is_told_apart(said, error, node):
    def script(sock, future) -> None:
        sock.sendall(said.removesuffix(MIRROR))
        if said.endswith(MIRROR):
            sock.sendall(receive(sock, 43 + 4 + HELLO + 32)[43:])
        sock.shutdown(socket.SHUT_WR)
        future.exception(LIMIT)

    assert type(connecting_to(script, node(WORKER))) is error


@pytest.mark.parametrize("said", [b"", GREETING + NONCE], ids=["never", "slowly"])
def test_a_listener_that_answers_never_or_slowly_costs_no_more_than_the_timeout(said, node):
    def drip(sock, future) -> None:
        for byte in said:
            sock.sendall(bytes([byte]))
            wait([future], timeout=0.02)
        future.exception(LIMIT)

    started = time.monotonic()
    assert type(connecting_to(drip, node(WORKER), timeout=0.1)) is DeadlineError
    assert time.monotonic() - started < 2.0


def test_nobody_listening_is_a_lost_peer(server, client):
    server.transport.close()
    with pytest.raises(PeerLostError, match="coordinator"):
        client.transport.connect(server.address)
