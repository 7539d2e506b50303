"""Both ends of connections over TCP, TLS and Unix-domain sockets, and what a peer without the token sends."""

from __future__ import annotations

import contextlib
import hmac
import socket
import ssl
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch

import steepest.core.messages.permissions  # noqa: F401 - frames may be of all kinds
from steepest.core.messages.message import COORDINATOR, Kind, Message, Peer, worker_peer
from steepest.core.tensors.memory import as_tensor
from steepest.core.transport import handshake, sockets
from steepest.core.transport.channel import Address, Channel
from steepest.runtime.tls.certificates import JobCertificate, make_certificate
from steepest.runtime.tls.connections import Identity, Tls, encryption_with
from tests.said import heard, said

TOKEN = b"correct horse battery staple"
WORKER = worker_peer(2)
GREETING = b"steepest/1\n"
NONCE = bytes(range(32))
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
            token, (peer,), node, self.sink, ways, encryption=encryption_with(identity)
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
    return said(Kind.PUSH, payload, WORKER, COORDINATOR, sequence=sequence)


def assert_serves(server: Node, make) -> None:
    """The listener still welcomes a peer that knows the token, and hears it."""
    good = make(worker_peer(7), node="elsewhere", identity=server.identity)
    together(lambda: good.transport.connect(server.address), server).send(message_of(77, size=10))
    until(lambda: 77 in [heard(message).sequence for message in server.messages], server)


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
