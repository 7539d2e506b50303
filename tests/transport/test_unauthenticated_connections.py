# ruff: noqa: F811 - fixtures are imported, and named as arguments
"""Connections without the token: what they cost a listener, and that peers with the token connect beside them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from steepest.core.messages.message import COORDINATOR, Kind, server_peer, worker_peer
from steepest.core.tensors.shared_memory import AVAILABLE, SHARED_FROM, allocate
from steepest.core.transport import sockets
from steepest.core.transport.channel import Address
from steepest.core.transport.handshake import ACCEPTED_AT_ONCE, MOST_ROLES
from steepest.core.transport.sockets import WireTransport
from steepest.core.transport.strangers import LOG_SECONDS, MOST_OPENINGS, OPENING_SECONDS
from steepest.errors import ConfigurationError, PeerLostError, ProtocolError
from steepest.runtime.tls.connections import encryption_with
from steepest.strategies.collectives.shared_memory_reduce import shared_allreduce
from tests.limits import limited
from tests.members import together as members_together
from tests.members import wire_group
from tests.said import heard, said
from tests.socket_ends import (
    GREETING,
    LIMIT,
    TOKEN,
    Node,
    bare,
    certificate,
    dial,
    identity_in,
    node,  # noqa: F401 - a fixture
    opening,
    receive,
    together,
    until,
)
from tests.transport.unauthenticated_connections import UnauthenticatedConnections

WORKER = worker_peer(0)


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(node: Any, clock: Clock, request: pytest.FixtureRequest) -> Node:
    identity = identity_in(request)
    made: Node = node(COORDINATOR, identity=identity)
    made.transport.close()
    made.transport = WireTransport(
        TOKEN, (COORDINATOR,), "here", made.sink, clock=clock, encryption=encryption_with(identity)
    )
    made.address = made.transport.listen("127.0.0.1")  # type: ignore[attr-defined]
    return made


@pytest.fixture(params=["tcp", "unix", "tls"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.long
@pytest.mark.few(1)
def test_ten_thousand_connections_cost_no_step_little_memory_and_a_line_a_minute(
    node: Any, server: Node, family: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps of a worker go on, an honest peer gets in, and what the connections cost is bounded."""
    worker = node(WORKER)
    near = together(lambda: worker.transport.connect(server.address), server)
    until(lambda: server.opened, server)
    payload = torch.ones(SHARED_FROM, dtype=torch.uint8)
    flood = UnauthenticatedConnections(server.address, family)
    began, steps, newcomers = clock.now, 0, 0
    open_before, memory_before = descriptors(), resident_bytes()
    most_open = most_memory = 0
    with limited(1024 - open_before), ThreadPoolExecutor(1) as pool:
        newcomer: Future[Any] | None = None
        while flood.made < 10_000:
            flood.open_more(60)
            clock.now += 1.0
            steps += 1
            near.send(said(Kind.PUSH, payload, WORKER, COORDINATOR, sequence=steps))
            until(lambda: len(server.messages) == steps, server)  # noqa: B023 - at once
            for _ in range(60 // ACCEPTED_AT_ONCE):
                server.turn()
            server.landed.clear()
            if newcomer is None and newcomers < 8:  # each keeps its descriptors
                honest = node(worker_peer(steps), node="elsewhere", identity=server.identity)
                newcomer = pool.submit(honest.transport.connect, server.address, LIMIT)
            elif newcomer is not None and newcomer.done():
                newcomer.result().close()
                newcomer, newcomers = None, newcomers + 1
            most_open, most_memory = (
                max(most_open, descriptors()),
                max(most_memory, resident_bytes()),
            )
        flood.close()
        if newcomer is not None:
            until(newcomer.done, server)
            newcomer.result().close()
    assert [heard(message).sequence for message in server.messages] == list(range(1, steps + 1))
    assert newcomers >= 3
    assert most_memory - memory_before < 40 << 20
    until(lambda: server.transport.refused >= 10_000 - 300, server)
    clock.now += OPENING_SECONDS + LOG_SECONDS
    server.turn()
    server.turn()
    assert server.transport.refused >= flood.made
    assert most_open - open_before < 300 + 60 + MOST_OPENINGS + 20 * (newcomers + 2), (
        "ours, theirs, newcomers'"
    )
    server.transport.close()
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 1 <= len(lines) <= 2 + (clock.now - began) / LOG_SECONDS
    assert (
        sum(
            int(word) for line in lines for word in line.getMessage().split()[1:2] if word.isdigit()
        )
        > 9_000
    )


def test_no_connection_stays_longer_than_its_deadline(
    server: Node, family: str, clock: Clock
) -> None:
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(dial(server.address, family)) for _ in range(5)]
        server.turn()
        for second in range(int(OPENING_SECONDS)):
            for sock in slow:
                sock.send(GREETING[second : second + 1])
            server.turn()
            assert server.transport.refused == 0
            clock.now += 1.0
        server.turn()
        server.turn()
        assert server.transport.refused == 5
        for sock in slow:
            with contextlib.suppress(ConnectionResetError):  # it closed before it had read all
                assert len(receive(sock, 100)) == 43 + 4, (
                    "the greeting, that it may try again, the end"
                )


def test_unauthenticated_connections_take_no_place_of_a_peer_at_another_address(
    server: Node,
) -> None:
    host, port = server.address.host, server.address.port
    with contextlib.ExitStack() as stack:
        honest = stack.enter_context(
            socket.create_connection((host, port), LIMIT, source_address=("127.0.0.2", 0))
        )
        greeting = together(lambda: receive(honest, 43), server)
        for _ in range(10 * MOST_OPENINGS):
            stack.enter_context(dial(server.address, "tcp"))
            server.turn()
        assert server.transport.refused >= 9 * MOST_OPENINGS
        honest.sendall(opening(greeting[len(GREETING) :]))
        until(lambda: server.opened, server)


def hear_nobody(server: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_hear", "_shake"):
        monkeypatch.setattr(server.transport._openings, name, lambda opening: None)


@pytest.mark.few(2)
def test_a_peer_that_loses_its_place_to_an_unauthenticated_connection_tries_again(
    server: Node, node: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time nobody hears it, because its place goes to others as soon as it is let in."""
    honest = node(
        WORKER, node="here" if family == "unix" else "elsewhere", identity=server.identity
    )
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        for _ in range(MOST_OPENINGS):
            stack.enter_context(dial(server.address, bare(family)))
            server.turn()
        hear_nobody(server, monkeypatch)
        connecting = pool.submit(honest.transport.connect, server.address, LIMIT)
        until(lambda: server.transport.refused > 0, server)
        for _ in range(20 * MOST_OPENINGS):
            stack.enter_context(dial(server.address, bare(family)))
            server.turn()
        monkeypatch.undo()
        until(connecting.done, server)
        assert connecting.result().peers == (COORDINATOR,)


def test_a_peer_that_is_too_slow_tries_again(
    server: Node, node: Any, family: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = node(
        WORKER, node="here" if family == "unix" else "elsewhere", identity=server.identity
    )
    openings = server.transport._openings
    hear_nobody(server, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(honest.transport.connect, server.address, LIMIT)
        until(lambda: len(openings._open) == 1, server)
        clock.now += OPENING_SECONDS
        until(lambda: server.transport.refused == 1, server)
        monkeypatch.undo()
        until(connecting.done, server)
        assert connecting.result().peers == (COORDINATOR,)


def test_without_a_descriptor_who_comes_is_turned_away_and_the_listener_is_quiet(
    server: Node, node: Any, family: str
) -> None:
    honest = node(
        WORKER, node="here" if family == "unix" else "elsewhere", identity=server.identity
    )
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with dial(server.address, bare(family)) as stranger, limited(0):
            until(lambda: server.transport.refused == 1, server)
            assert receive(stranger, 100)[: len(GREETING) - 1] == GREETING[:-1]
            assert server.transport.poll(0.0) == []
            assert server.transport.refused == 1
            connecting = pool.submit(honest.transport.connect, server.address, LIMIT)
            server.turn()
        until(connecting.done, server)
        assert connecting.result().peers == (COORDINATOR,)
        until(lambda: server.opened, server)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_other_users_of_the_host_are_not_heard(server: Node) -> None:
    os.seteuid(65534)
    try:
        stranger = dial(server.address, "unix")
    finally:
        os.seteuid(0)
    with stranger:
        until(lambda: server.transport.refused == 1, server)
        assert stranger.recv(100) == b""


def test_refusals_are_one_line_a_minute_and_none_is_forgotten(
    server: Node, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(number: int) -> None:
        for _ in range(number):
            with dial(server.address, "tcp") as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 5)
            before = server.transport.refused
            until(lambda: server.transport.refused == before + 1, server)  # noqa: B023 - at once

    refuse(1)
    assert len(caplog.records) == 1
    refuse(20)
    assert len(caplog.records) == 1
    clock.now += LOG_SECONDS
    server.turn()
    assert len(caplog.records) == 2
    assert "refused 20 connections" in caplog.records[1].getMessage()
    assert "127.0.0.1" in caplog.records[1].getMessage()
    refuse(3)
    server.transport.close()
    assert "refused 3 connections" in caplog.records[2].getMessage()


# -- whom a connection leads to ----------------------------------------------------------------------


def test_who_answers_is_who_was_meant(server: Node, node: Any, family: str) -> None:
    """An address that is out of date: neither end takes the other for somebody else."""
    caller = node(
        WORKER, node="here" if family == "unix" else "elsewhere", identity=server.identity
    )
    old = server.address._replace(peers=(server_peer(3), worker_peer(9)))
    with pytest.raises(
        ProtocolError, match=r"server 3 \+ worker 9 was meant, but coordinator answers"
    ):
        together(lambda: caller.transport.connect(old), server)
    until(lambda: server.transport.refused == 1, server)
    assert server.opened == []
    together(lambda: caller.transport.connect(server.address._replace(peers=())), server)
    until(lambda: server.opened, server)


def test_a_process_with_more_roles_than_any_has_is_refused(server: Node, node: Any) -> None:
    caller = node(WORKER, node="elsewhere", identity=server.identity).transport
    caller.peers = tuple(map(worker_peer, range(MOST_ROLES + 1)))
    with pytest.raises(PeerLostError, match="cannot connect"):
        together(lambda: caller.connect(server.address), server)
    assert server.transport.refused == 1
    caller.peers = caller.peers[:-1]
    channel = together(lambda: caller.connect(server.address), server)
    assert channel.peers == (COORDINATOR,)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("tls", [False, True])
def test_over_ipv6(node: Any, tls: bool) -> None:
    mine = certificate() if tls else None
    server = node(COORDINATOR, identity=mine)
    client = node(WORKER, node="elsewhere", identity=mine)
    address = server.transport.listen("::1")
    near = together(lambda: client.transport.connect(address), server)
    assert f"[::1]:{address.port}" in near.name
    payload = torch.arange(100_000) % 251
    near.send(said(Kind.PUSH, payload.to(torch.uint8), WORKER, COORDINATOR))
    until(lambda: server.messages, server, client)
    assert torch.equal(server.messages[0].payload, payload.to(torch.uint8))
    with socket.create_connection((address.host, address.port)) as stranger:
        stranger.sendall(bytes(100))
        until(lambda: server.transport.refused == 1, server)


@pytest.mark.parametrize("host", ["192.0.2.7", "2001:db8::7", "not an address"])
def test_an_address_that_is_not_this_hosts_is_refused(node: Any, host: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{host}'"):
        node(COORDINATOR).transport.listen(host)


# -- one node, two network namespaces ------------------------------------------------------------------


def elsewhere(address: Address) -> Address:
    """The same where nobody is seen on Unix-domain sockets."""
    return address._replace(unix="\0steepest-in-another-namespace")


@pytest.mark.skipif(not AVAILABLE, reason="memfd is Linux'")
def test_where_unix_sockets_do_not_reach_tcp_does_and_nothing_is_lent(
    server: Node, node: Any
) -> None:
    client = node(WORKER)
    near = together(lambda: client.transport.connect(elsewhere(server.address)), server)
    memory = allocate(SHARED_FROM).fill_(5)
    near.send(said(Kind.PUSH, memory, WORKER, COORDINATOR))
    until(lambda: server.messages, server, client)
    memory.fill_(9)
    assert bool((server.messages[0].payload == 5).all())
    server.transport.close()
    with pytest.raises(PeerLostError, match="cannot connect to coordinator"):
        client.transport.connect(elsewhere(server.address))


@pytest.mark.skipif(not AVAILABLE, reason="memfd is Linux'")
def test_members_of_one_node_reduce_over_tcp_where_nothing_can_be_lent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str, deadline: float) -> socket.socket:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    def work(member: Any) -> list[float]:
        sums = [
            shared_allreduce(torch.full((700_000,), float(step + member.rank)), member)
            for step in range(4)
        ]
        return [float(part.min()) for part in sums] + [float(part.max()) for part in sums]

    monkeypatch.setattr(sockets, "_dial_unix", refuse)
    with contextlib.ExitStack() as closing:
        members = wire_group(closing, 2)
        assert members[0].one_host
        assert members_together(members, work) == [[1.0, 3.0, 5.0, 7.0] * 2] * 2


@pytest.mark.skipif(not AVAILABLE, reason="memfd is Linux'")
@pytest.mark.parametrize("ways", ["unix", "shared"])
def test_a_way_that_is_forced_is_not_left(node: Any, ways: str) -> None:
    server, client = node(COORDINATOR, ways=ways), node(WORKER, ways=ways)
    address = server.transport.listen("127.0.0.1")
    with pytest.raises(
        PeerLostError,
        match=f'another network namespace .* transport="{ways}" .* give "wire" or "tcp"',
    ):
        client.transport.connect(elsewhere(address))
