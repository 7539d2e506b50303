"""The wire: one contract over TCP and Unix-domain sockets, and what strangers cannot do to it."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import resource
import socket
import ssl
import struct
import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import pytest
import torch

from steepest.errors import AuthenticationError, DeadlineError, PeerLostError, ProtocolError
from steepest.messages.message import COORDINATOR, Kind, Message, Peer, worker_peer
from steepest.tensors.memory import as_tensor
from steepest.transport import handshake, sockets
from steepest.transport.certificates import JobCertificate, make_certificate
from steepest.transport.channel import Address, Channel
from steepest.transport.frames import encode
from steepest.transport.tls import Identity, Tls
from tests.limits import limited

TOKEN = b"correct horse battery staple"
WORKER = worker_peer(2)
GREETING = b"steepest/1\n"
NONCE = bytes(range(32))
HELLO = 2 + 5 + 5  # bytes: how many roles are its own, one of its own, one that it means
MIRROR = b"M" * 32  # stands for what the other end sent: its nonce, its proof
FAMILIES = {"tcp": socket.AF_INET, "unix": socket.AF_UNIX, "tls": socket.AF_INET}
LIMIT = 15.0  # seconds until a test gives up


@cache
def certificate() -> JobCertificate:
    """That of the job that the tests under TLS are about."""
    return make_certificate()


class Node:
    """A transport, what it saw, and the memory that payloads landed in."""

    alive: list[Node] = []

    def __init__(
        self,
        peer: Peer,
        node: str = "here",
        token: bytes = TOKEN,
        ways: str = "wire",
        identity: Identity | None = None,
    ) -> None:
        self.alive.append(self)
        self.messages, self.opened, self.lost, self.landed = [], [], [], []
        self.place = None  # instead of fresh memory, where a payload goes
        self.identity = identity
        self.transport = sockets.WireTransport(
            token, (peer,), node, self.sink, ways, identity=identity
        )

    def sink(self, channel: Channel, message: Message, size: int) -> torch.Tensor | None:
        if self.place is not None:
            message.payload = None if message.payload is None else as_tensor(message.payload)
            return self.place(message, size)
        self.landed.append(torch.empty(size, dtype=torch.uint8))
        return self.landed[-1]

    def turn(self) -> None:
        for channel, message, reason in self.transport.poll(0.01):
            seen = self.messages if message else self.opened if reason == "opened" else self.lost
            seen.append(message or channel)


def until(condition, *nodes: Node) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        for node in Node.alive:
            node.transport.pump()  # small messages wait for company
        for node in nodes:
            node.turn()


def together(work, *nodes: Node):
    """Runs something that blocks in a thread, while these nodes are served here."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        until(future.done, *nodes)
        return future.result()


@pytest.fixture
def node():
    """Makes nodes, and closes them afterwards."""
    made: list[Node] = []
    yield lambda *args, **kwargs: made.append(Node(*args, **kwargs)) or made[-1]
    Node.alive.clear()
    for each in made:
        each.transport.close()


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return request.param


def identity_in(request: pytest.FixtureRequest) -> JobCertificate | None:
    """The certificate of all nodes of a test; none unless it is about TLS."""
    asked = "family" in request.fixturenames and request.getfixturevalue("family") == "tls"
    return certificate() if asked else None


@pytest.fixture
def server(node, request):
    made = node(COORDINATOR, identity=identity_in(request))
    made.address = made.transport.listen("127.0.0.1")
    return made


@pytest.fixture
def client(node, family, request):
    place = "here" if family == "unix" else "elsewhere"
    return node(WORKER, node=place, identity=identity_in(request))


@pytest.fixture
def ends(server, client):
    """Both ends of one channel: the worker's, the coordinator's."""
    near = together(lambda: client.transport.connect(server.address), server)
    until(lambda: server.opened, server)
    return near, server.opened[-1]


def message_of(sequence: int, size: int | None = None) -> Message:
    payload = None if size is None else torch.full((size,), sequence % 251, dtype=torch.uint8)
    return Message(Kind.PUSH, sequence=sequence, payload=payload, source=WORKER, target=COORDINATOR)


def assert_serves(server: Node, make) -> None:
    """The listener still welcomes a peer that knows the token, and hears it."""
    good = make(worker_peer(7), node="elsewhere", identity=server.identity)
    together(lambda: good.transport.connect(server.address), server).send(message_of(77, size=10))
    until(lambda: 77 in [message.sequence for message in server.messages], server)


def test_a_node_meets_its_own_on_a_unix_socket_and_both_ends_know_each_other(ends, family):
    near, far = ends
    assert near._socket.family == far._socket.family == FAMILIES[family]
    assert (near.peers, far.peers) == ((COORDINATOR,), (WORKER,))
    assert (near.name.split()[0], far.name) == ("coordinator", "worker 2")


def test_messages_arrive_in_order_both_ways_and_payloads_in_the_sinks_memory(ends, server, client):
    sizes = [8 << 20, *[None, 1, 3000, 100_000] * 100]
    for number, size in enumerate(sizes):
        for end in ends:
            end.send(message_of(number, size))
    until(lambda: len(server.messages) == len(client.messages) == len(sizes), server, client)
    for node in (server, client):
        assert [message.sequence for message in node.messages] == list(range(len(sizes)))
        arrived = [message for message in node.messages if message.payload is not None]
        for message, landed in zip(arrived, node.landed, strict=True):
            assert message.payload is landed
            assert torch.equal(
                landed, message_of(message.sequence, sizes[message.sequence]).payload
            )
    assert (
        server.transport.bytes_sent
        == client.transport.bytes_sent
        == sum(size or 0 for size in sizes)
    )


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
    far.send(Message(Kind.COUNTERS, source=COORDINATOR, target=WORKER))
    until(lambda: client.messages and len(server.messages) > 1, server, client)
    assert [message.sequence for message in server.messages] == [1, 3]
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
    assert [message.sequence for message in server.messages] == [0, 1, 2]
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


def dial(address: Address, family: str) -> socket.socket:
    sock = socket.socket(FAMILIES[family])
    sock.settimeout(LIMIT)
    sock.connect(address.unix if family == "unix" else (address.host, address.port))
    if family == "tls":  # a stranger who has come by the certificate, but not by the token
        deadline = time.monotonic() + LIMIT
        return together(lambda: handshake.secure(sock, Tls(certificate()), deadline), *Node.alive)
    return sock


def bare(family: str) -> str:
    """The family of the socket itself, for those who do not speak TLS."""
    return "tcp" if family == "tls" else family


def client_hello() -> bytes:
    """The first words of a TLS client that has no certificate."""
    context, out = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    context.check_hostname = False
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


def receive(sock: socket.socket, size: int) -> bytes:
    """That many bytes, or fewer at the end of the stream."""
    received = b""
    with contextlib.suppress(ConnectionResetError):  # it closed before it had read all
        while len(received) < size and (part := sock.recv(size - len(received))):
            received += part
    return received


def opening(theirs: bytes, key: bytes = TOKEN) -> bytes:
    """What a connecting worker 0 says to a listener with that nonce; the proof written down again."""
    hello = struct.pack("<HBi", 1, 2, 0)
    proof = hmac.digest(key, b"\0".join((b"connect", theirs, NONCE, hello)), "sha256")
    return GREETING + NONCE + struct.pack("<I", len(hello)) + hello + proof


RUDE = {
    "garbage": b"\x00\xff" * 300,
    "HTTP": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
    "silence": b"",
    "half a greeting": GREETING[:5],
    "half a handshake": GREETING + NONCE[:9],
    "all but the proof": opening(NONCE)[:-1],
    "oversized hello": GREETING + NONCE + b"\xff\xff\xff\xff" + bytes(100),
    "a replayed handshake": opening(NONCE),
    "its own nonce back": opening(MIRROR)[:-32] + MIRROR,
    "its own nonce back as ours": GREETING + MIRROR + struct.pack("<I", 5) + bytes(5) + MIRROR,
}


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
    assert [message.sequence for message in server.messages] == [3]
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


def connecting_to(script, client: Node, timeout: float = LIMIT) -> BaseException | None:
    """What connecting raises when the listener does this to the socket, given the future of `connect`."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(LIMIT)
        address = Address("elsewhere", *listener.getsockname(), "", (COORDINATOR,))
        future = pool.submit(client.transport.connect, address, timeout)
        with listener.accept()[0] as sock, contextlib.suppress(OSError):  # the client may go first
            sock.settimeout(LIMIT)
            script(sock, future)
        return future.exception(LIMIT)


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
