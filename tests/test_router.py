"""The router's turns: whoever waits in the middle of its work is not kept from what lies here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from steepest.messages.message import Kind, Message, Peer
from steepest.transport.channel import Event
from steepest.transport.router import Router

ME, OTHER = Peer("worker", 0), Peer("server", 0)


class Silent:
    """A transport to which nothing ever comes; it remembers how long it was asked to wait."""

    def __init__(self) -> None:
        self.timeouts: list[float] = []

    def poll(self, timeout: float) -> Sequence[Event]:
        self.timeouts.append(timeout)
        return []


class Counting:
    """A role that counts what it is given."""

    def __init__(self) -> None:
        self.count = 0

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        return None

    def handle(self, source: Peer, message: Message) -> None:
        self.count += 1

    def lost(self, peer: Peer, reason: str) -> None: ...

    def tick(self, now: float) -> None: ...


def test_who_waits_for_a_message_of_its_own_process_does_not_wait_for_others() -> None:
    router, transport, role = Router(), Silent(), Counting()
    router.use(transport)  # type: ignore[arg-type]
    router.host(ME, role)
    router.sender(OTHER)(ME, Message(Kind.WEIGHTS))
    router.wait()
    assert (role.count, transport.timeouts) == (1, [0.0])
    router.wait()
    assert transport.timeouts[1] > 0.0, "with nothing here it sleeps"


class Endless(Counting):
    """A role that has each message followed by another one, as long as a limit is not reached."""

    def __init__(self, router: Router, limit: int) -> None:
        super().__init__()
        self._send, self._limit = router.sender(ME), limit

    def handle(self, source: Peer, message: Message) -> None:
        super().handle(source, message)
        if self.count < self._limit:
            self._send(ME, Message(Kind.WEIGHTS))


def test_others_are_heard_while_the_roles_of_one_process_talk_without_end() -> None:
    """A worker alone in its process with its server computes step after step until somebody says stop."""
    router, transport = Router(), Silent()
    role = Endless(router, limit=1_000_000)
    router.use(transport)  # type: ignore[arg-type]
    router.host(ME, role)
    router.sender(OTHER)(ME, Message(Kind.WEIGHTS))
    for _ in range(3):
        router.turn(1.0)
    assert role.count < 1_000_000
    assert transport.timeouts == [0.0, 0.0, 0.0]
