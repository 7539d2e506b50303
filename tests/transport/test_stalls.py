"""Nothing that others wait for stays behind: messages leave before this process does something long, and results
of collective operations lie in memory that is there already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from steepest.core.messages.message import Kind, Message, Peer, member_peer
from steepest.core.transport.channel import TransportEvent
from steepest.core.transport.router import Router
from steepest.strategies.collectives.members import MemberCollective
from steepest.strategies.collectives.messages import MemberKind
from steepest.strategies.collectives.shared_memory_reduce import shared_allreduce
from tests.members import together, wire_group
from tests.said import said

ME, OTHER = Peer("worker", 0), Peer("server", 0)
ELEMENTS = 3_000_000


class Gathering:
    """A transport and its only channel: what is sent waits until it is pumped or polled."""

    name = "somebody"
    closed = False

    def __init__(self, *peers: Peer) -> None:
        self.peers = peers
        self.waiting: list[Message] = []
        self.left: list[Message] = []

    @property
    def pending(self) -> int:
        return len(self.waiting)

    def send(self, message: Message) -> None:
        self.waiting.append(message)

    def pump(self) -> None:
        self.left += self.waiting
        self.waiting.clear()

    def poll(self, timeout: float) -> Sequence[TransportEvent]:
        self.pump()
        return []

    def in_use(self, memory: torch.Tensor) -> bool:
        return bool(self.waiting)

    def wake(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def transport() -> Gathering:
    return Gathering(OTHER, member_peer(0))


@pytest.fixture
def router(transport: Gathering) -> Router:
    made = Router()
    made.use(transport)  # type: ignore[arg-type]
    return made


def test_what_was_said_leaves_before_each_call_from_another_thread(
    router: Router, transport: Gathering
) -> None:
    """A call may take long: a user's function, an evaluation."""
    router.attach(transport)
    send, seen = router.sender(ME), []
    for _ in range(3):

        def call() -> None:
            seen.append((len(transport.left), len(transport.waiting)))
            send(OTHER, said(Kind.PUSH))

        router.call(call)
    send(OTHER, said(Kind.PUSH_STAGED))
    router.turn(0.0)
    assert seen == [(1, 0), (2, 0), (3, 0)]
    assert len(transport.left) == 4


def test_a_message_leaves_when_it_is_sent_and_not_when_its_sender_waits(
    router: Router, transport: Gathering
) -> None:
    router.attach(transport)
    member = MemberCollective(1, 3, router, 10.0)
    member.isend(torch.ones(1), 0)
    assert [message.kind for message in transport.left] == [MemberKind.DATA]


def test_what_was_said_leaves_before_a_connection_is_waited_for(
    router: Router, transport: Gathering
) -> None:
    """Whom this member connects to may wait for others, and these for it."""
    seen: list[int] = []

    def connect(other: int, seconds: float) -> Any:
        seen.append(len(transport.waiting))
        return Gathering(member_peer(other))

    router.attach(transport)
    member = MemberCollective(2, 3, router, 10.0, connect)
    member.lend(torch.ones(4, dtype=torch.uint8), 0)
    member.irecv(torch.ones(1), 1)
    assert seen == [0]


def test_an_announcement_leaves_although_nothing_is_waited_for_yet(
    router: Router, transport: Gathering
) -> None:
    member = MemberCollective(1, 2, router, 10.0, lambda other, seconds: transport)  # type: ignore[arg-type,return-value]
    member.irecv(torch.ones(1), 0)
    assert [message.kind for message in transport.left] == [MemberKind.CONNECTED], (
        "who has something for it now sends it"
    )


def test_results_that_nobody_holds_make_room_for_the_next() -> None:
    """Although others have taken the place in the meantime that the C library would give."""

    def work(member: Any) -> list[int]:
        places, others = [], []
        for _ in range(4):
            result = shared_allreduce(torch.ones(ELEMENTS), member)
            assert bool((result == 2).all())
            places.append(result.data_ptr())
            del result
            others.append(torch.empty(ELEMENTS))
        return places

    with contextlib.ExitStack() as closing:
        for places in together(wire_group(closing, 2), work):
            assert len(set(places)) == 1


def test_results_that_somebody_holds_stay_as_they_are() -> None:
    def work(member: Any) -> list[torch.Tensor]:
        kept = [
            shared_allreduce(torch.full((ELEMENTS,), float(step)), member)[5:] for step in range(5)
        ]
        kept.append(shared_allreduce(torch.full((ELEMENTS // 2,), 7.0), member))
        return kept

    with contextlib.ExitStack() as closing:
        for kept in together(wire_group(closing, 2), work):
            assert [float(part.min()) for part in kept] == [float(part.max()) for part in kept]
            assert [float(part[0]) for part in kept] == [0.0, 2.0, 4.0, 6.0, 8.0, 14.0]
