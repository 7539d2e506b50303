"""The router's turns: whoever waits in the middle of its work is not kept from what lies here."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch

from steepest.core.messages.message import Kind, Message, Peer
from steepest.core.messages.permissions import MessageCheck
from steepest.core.transport.channel import TransportEvent
from steepest.core.transport.router import Router
from steepest.core.transport.sockets import WireTransport
from steepest.errors import ProtocolError, ShutdownError
from tests.said import said

ME, OTHER, CLIENT = Peer("worker", 0), Peer("server", 0), Peer("client", 0)


class Silent:
    """A transport to which nothing ever comes; it remembers how long it was asked to wait."""

    def __init__(self) -> None:
        self.timeouts: list[float] = []
        self.coming: list[TransportEvent] = []
        self.closed = False

    def poll(self, timeout: float) -> Sequence[TransportEvent]:
        self.timeouts.append(timeout)
        coming, self.coming = self.coming, []
        return coming

    def pump(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None:
        self.closed = True


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
    router.sender(OTHER)(ME, said(Kind.WEIGHTS))
    router.wait()
    assert (role.count, transport.timeouts) == (1, [0.0])
    router.wait()
    assert transport.timeouts[1] > 0.0, "with nothing here it sleeps"


class Raising(Counting):
    """A role for which no message makes sense, in a way that it was not prepared for."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        raise self.error

    def handle(self, source: Peer, message: Message) -> None:
        raise self.error


class Anybody(MessageCheck):
    def check(self, message: Message) -> None: ...


class Said:
    """A channel that keeps what it is to send."""

    name, peers, pending = "them", (OTHER, CLIENT), 0

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)


@pytest.mark.parametrize(
    "error", [RuntimeError("no memory"), MemoryError(), AssertionError("what"), ProtocolError("no")]
)
def test_whatever_a_message_makes_a_role_raise_is_that_messages_refusal(error: Exception) -> None:
    router, transport, channel = Router(), Silent(), Said()
    router.use(transport)  # type: ignore[arg-type]
    router.admit(Anybody())
    router.host(ME, Raising(error))
    router.attach(channel)  # type: ignore[arg-type]
    for number, source in enumerate((OTHER, CLIENT), 1):
        message = said(Kind.WEIGHTS, None, source, ME, sequence=7)
        transport.coming.append(TransportEvent(channel, message))  # type: ignore[arg-type]
        router.turn(0.0)
        assert router.refused == number
        with pytest.raises(ProtocolError):
            router.destination(channel, message, 1 << 36)  # type: ignore[arg-type]
    (answer,) = channel.sent  # a client waits for one
    assert (answer.kind, answer.body.sequence, answer.target) == (Kind.REFUSED, 7, CLIENT)
    assert (str(error) or "MemoryError") in answer.body.why


@pytest.mark.parametrize("error", [ShutdownError("it ends"), KeyboardInterrupt()])
def test_what_ends_a_process_is_no_refusal(error: BaseException) -> None:
    router, transport, channel = Router(), Silent(), Said()
    router.use(transport)  # type: ignore[arg-type]
    router.admit(Anybody())
    router.host(ME, Raising(error))
    router.attach(channel)  # type: ignore[arg-type]
    message = said(Kind.WEIGHTS, None, OTHER, ME)
    transport.coming.append(TransportEvent(channel, message))  # type: ignore[arg-type]
    with pytest.raises(type(error)):
        router.turn(0.0)


def test_who_waits_for_what_another_thread_has_it_told_does_not_wait_for_others() -> None:
    """Weights that a process group has passed on are delivered by a call of its thread."""
    router, transport, role = Router(), Silent(), Counting()
    router.use(transport)  # type: ignore[arg-type]
    router.host(ME, role)
    router.call(lambda: router.sender(OTHER)(ME, said(Kind.WEIGHTS)))
    router.wait()
    assert (role.count, transport.timeouts) == (1, [0.0])


class Endless(Counting):
    """A role that has each message followed by another one, as long as a limit is not reached."""

    def __init__(self, router: Router, limit: int) -> None:
        super().__init__()
        self._send, self._limit = router.sender(ME), limit

    def handle(self, source: Peer, message: Message) -> None:
        super().handle(source, message)
        if self.count < self._limit:
            self._send(ME, said(Kind.WEIGHTS))


def test_others_are_heard_while_the_roles_of_one_process_talk_without_end() -> None:
    """A worker alone in its process with its server computes step after step until somebody says stop."""
    router, transport = Router(), Silent()
    role = Endless(router, limit=1_000_000)
    router.use(transport)  # type: ignore[arg-type]
    router.host(ME, role)
    router.sender(OTHER)(ME, said(Kind.WEIGHTS))
    for _ in range(3):
        router.turn(1.0)
    assert role.count < 1_000_000
    assert transport.timeouts == [0.0, 0.0, 0.0]


def test_what_waits_for_the_process_to_be_idle_is_called_before_it_sleeps() -> None:
    router, transport, role = Router(), Silent(), Counting()
    router.use(transport)  # type: ignore[arg-type]
    router.host(ME, role)
    happened: list[str] = []
    router.sender(OTHER)(ME, said(Kind.WEIGHTS))
    router.when_idle(lambda: happened.append(f"idle after {role.count}"))
    router.turn(1.0)
    assert happened == ["idle after 1"]
    assert transport.timeouts == [0.0, 1.0], "it looks once more before it sleeps"
    router.turn(1.0)
    assert happened == ["idle after 1"], "once"


def test_messages_that_have_come_go_before_what_waits_for_idleness() -> None:
    class Busy(Silent):
        def poll(self, timeout: float) -> Sequence[TransportEvent]:
            super().poll(timeout)
            waiting, self.waiting = self.waiting, []
            return waiting

        def __init__(self) -> None:
            super().__init__()
            self.waiting: list[TransportEvent] = []

    router, transport = Router(), Busy()
    router.use(transport)  # type: ignore[arg-type]
    happened: list[str] = []

    class Channel:
        name, peers, closed, pending = "server 0", (OTHER,), False, 0

    transport.waiting = [TransportEvent(Channel(), None, "opened")]  # type: ignore[arg-type]
    router.when_idle(lambda: happened.append("idle"))
    router.turn(1.0)
    assert router.channel(OTHER) is not None
    assert happened == []
    router.turn(1.0)
    assert happened == ["idle"]


def test_before_a_long_computation_nothing_is_left_to_wait() -> None:
    router = Router()
    happened: list[str] = []
    router.when_idle(lambda: router.when_idle(lambda: happened.append("second")))
    router.finish()
    assert happened == ["second"]


def test_a_forked_child_is_told_at_once_that_it_has_no_connections() -> None:
    router = Router()
    router.use(WireTransport(bytes(32), (ME,), "here", router.destination))
    router.start("router")
    child = os.fork()
    if not child:
        try:
            for refused in (lambda: router.call(lambda: 1).result(5), router.wait):
                with pytest.raises(ShutdownError, match="forked"):
                    refused()
        except BaseException:  # noqa: BLE001 - the parent looks at the status
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert router.call(lambda: 2).result(5) == 2
    router.stop()


def test_a_transport_that_is_replaced_is_closed() -> None:
    router, first, second = Router(), Silent(), Silent()
    router.use(first)  # type: ignore[arg-type]
    router.use(second)  # type: ignore[arg-type]
    router.use(second)  # type: ignore[arg-type]
    assert (first.closed, second.closed) == (True, False)


def test_transports_in_turn_leave_no_descriptors() -> None:
    router, before = Router(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        router.use(WireTransport(bytes(32), (ME,), "here", router.destination))
    router.clear()
    assert len(os.listdir("/proc/self/fd")) == before
