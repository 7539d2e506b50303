"""Messages as actor calls: in order and exactly once, whatever order Ray runs calls and completes them in."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import ray
import torch

from steepest.errors import DeadlineError, PeerLostError, ProtocolError, ShutdownError
from steepest.messages.message import COORDINATOR, Kind, Message, Peer, server_peer, worker_peer
from steepest.transport.channel import Channel, Event
from steepest.transport.frames import encode
from steepest.transport.ray_calls import (
    CALL_HEAD,
    END,
    HELLO,
    NOTHING,
    SAY,
    Answer,
    Callee,
    CallTransport,
    unpack,
)
from tests.drawn import seeds

ME, OTHER = worker_peer(0), server_peer(0)
SECONDS = 30.0


def sink(channel: Channel, message: Message, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def message(number: int, source: Peer = ME, target: Peer = OTHER, size: int = 0) -> Message:
    payload = torch.full((size,), number % 251, dtype=torch.uint8) if size else None
    return Message(Kind.PUSH, sequence=number, payload=payload, source=source, target=target)


def numbers(events: list[Event]) -> list[int]:
    for event in events:
        if event.message is not None and event.message.payload is not None:
            assert bool((event.message.payload == event.message.sequence % 251).all())
    return [event.message.sequence for event in events if event.message is not None]


def answer(*found: int) -> Answer:
    """Messages of the actor to the caller, after which it has no more."""
    return b"\0" + b"".join(encode(message(number, OTHER, ME)) for number in found), []


def packed(number: int, what: int = SAY, *, key: int = 1, text: bytes = b"") -> bytes:
    """A call as a caller packs it."""
    return CALL_HEAD.pack(key, number, what) + text


def hello(key: int = 1, *peers: Peer) -> bytes:
    return packed(0, HELLO, key=key, text=json.dumps(peers or (ME,)).encode())


class FakeCall:
    """A call that the test runs and completes when it likes."""

    def __init__(self, call: bytes, *payloads: Any) -> None:
        self.call, self.payloads = call, payloads
        self.key, self.number, self.what = CALL_HEAD.unpack_from(call)
        self.result: Future[Answer] = Future()

    def future(self) -> Future[Answer]:
        return self.result

    @property
    def said(self) -> list[int]:
        """The numbers of the messages that it takes along."""
        text = memoryview(self.call)[CALL_HEAD.size :]
        fresh = lambda message, size: torch.empty(size, dtype=torch.uint8)  # noqa: E731
        return [found.sequence for found in unpack(text, self.payloads, fresh)]


class FakeRay:
    """An actor handle; the first call is answered at once, the others are kept in `calls`."""

    def __init__(self) -> None:
        self.exchange = self
        self.calls: list[FakeCall] = []
        self.key = 0
        self.ended = 0

    def remote(self, *arguments: Any) -> FakeCall:
        call = FakeCall(*arguments)
        self.key = call.key
        if call.what == HELLO:
            call.result.set_result(NOTHING)
        elif call.what == END:
            self.ended += 1
        else:
            self.calls.append(call)
        return call

    def connected(self, transport: CallTransport, pause: float = 0.0) -> Any:
        return transport.connect(Callee((OTHER,), self, pause))


def greeted(callee: CallTransport, key: int = 1) -> Any:
    """The callee's new channel to a caller."""
    found = callee.answer(hello(key), ())
    events = callee.poll(0)
    assert events[-1][1:] == (None, "opened")
    assert found.result(0) == NOTHING
    return events[-1].channel


# -- the caller's end --------------------------------------------------------------------------------


def test_answers_are_taken_in_the_order_of_the_calls() -> None:
    actor, transport = FakeRay(), CallTransport(sink, (ME,))
    channel = actor.connected(transport)
    for number in range(2):
        channel.send(message(number))
        transport.poll(0)
    assert [call.number for call in actor.calls] == [1, 2]
    actor.calls[1].result.set_result(answer(4))
    assert transport.poll(0) == []
    actor.calls[0].result.set_result(answer(1, 2, 3))
    assert numbers(transport.poll(0)) == [1, 2, 3, 4]


def test_a_call_is_always_in_flight_and_few_are() -> None:
    actor, transport = FakeRay(), CallTransport(sink, (ME,))
    channel = actor.connected(transport)
    transport.poll(0)
    assert len(actor.calls) == 1, "to listen"
    transport.poll(0)
    assert len(actor.calls) == 1
    for number in range(20):
        channel.send(message(number))
        transport.pump()
    assert len(actor.calls) == 2
    actor.calls[1].result.set_result(NOTHING)  # pump need not wait for poll
    transport.pump()
    assert [call.said for call in actor.calls] == [[], [0], list(range(1, 20))]


def test_a_caller_may_pause_after_an_answer() -> None:
    actor, transport = FakeRay(), CallTransport(sink, (ME,))
    channel = actor.connected(transport, pause=3600)
    transport.poll(0)
    actor.calls[0].result.set_result(NOTHING)
    transport.poll(0)
    assert len(actor.calls) == 2, "no answer, no pause"
    actor.calls[1].result.set_result(answer(1))
    assert numbers(transport.poll(0)) == [1]
    transport.poll(0)
    assert len(actor.calls) == 2
    channel.send(message(1))
    transport.poll(0)
    assert len(actor.calls) == 3


def test_much_leaves_in_the_middle_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[Any] = []
    monkeypatch.setattr(ray, "put", lambda data: stored.append(data.copy()) or len(stored))
    actor, transport = FakeRay(), CallTransport(sink, (ME,))
    channel = actor.connected(transport)
    channel.send(message(1, size=1 << 20))
    assert actor.calls[0].payloads == (1,)
    weights = torch.zeros(1 << 20, dtype=torch.uint8)
    for version, worker in ((1, 0), (1, 1), (2, 0)):
        for kind in (Kind.WEIGHTS, Kind.STATE):
            channel.send(
                Message(
                    kind, version=version, payload=weights, source=ME, target=worker_peer(worker)
                )
            )
        weights += 1
    assert [int(data[0]) for data in stored] == [1, 0, 0, 1, 2, 2], (
        "weights for several workers are stored once"
    )


def test_a_completed_call_ends_poll() -> None:
    actor, transport = FakeRay(), CallTransport(sink, (ME,))
    actor.connected(transport)
    transport.poll(0)
    call = actor.calls[0]
    thread = threading.Thread(target=lambda: call.result.set_result(answer(7)))
    thread.start()
    assert numbers(transport.poll(SECONDS)) == [7]
    thread.join()
    transport.wake()
    assert transport.poll(SECONDS) == []


def test_an_error_closes_the_channel_once() -> None:
    actor, transport = FakeRay(), CallTransport(sink, (ME,))
    channel = actor.connected(transport)
    for number in range(3):
        channel.send(message(number))
        transport.poll(0)
    actor.calls[0].result.set_result(answer(1))
    for call in actor.calls[1:]:
        call.result.set_exception(ray.exceptions.RayActorError(error_msg="it died\nlong ago"))
    events = transport.poll(0)
    assert numbers(events[:1]) == [1]
    assert events[1:] == [Event(channel, None, "it died long ago")]
    channel.send(message(3))
    assert transport.poll(0) == []
    assert len(actor.calls) == 3


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (None, "a header that is cut off"),
        (3, "PUSH without its payload of 3 bytes"),
        (200_000, "PUSH without its payload of 200000 bytes"),
    ],
)
def test_an_answer_that_makes_no_sense_closes_the_channel(size: int | None, reason: str) -> None:
    actor, transport = FakeRay(), CallTransport(sink, (ME,))
    channel = actor.connected(transport)
    transport.poll(0)
    text, _ = answer(1)
    if size is None:
        text = text[:-1]
    else:
        text += encode(message(1, OTHER, ME, size))
    actor.calls[0].result.set_result((text, []))
    (event,) = transport.poll(0)
    assert event[:2] == (channel, None)
    assert event.reason == f"refused: {reason}"
    assert (transport.refused, actor.ended) == (1, 1)


def test_who_does_not_answer_is_not_connected() -> None:
    class Silent(FakeRay):
        def remote(self, *arguments: Any) -> FakeCall:
            self.calls.append(FakeCall(*arguments))
            return self.calls[-1]

    class Dead(Silent):
        def remote(self, *arguments: Any) -> FakeCall:
            super().remote(*arguments).result.set_exception(
                ray.exceptions.RayActorError(error_msg="gone")
            )
            return self.calls[-1]

    transport, silent = CallTransport(sink, (ME,)), Silent()
    with pytest.raises(DeadlineError, match=r"server 0 did not answer a call within 0\.01 s"):
        transport.connect(Callee((OTHER,), silent), 0.01)
    assert silent.calls[-1].what == END, "it is told, should it still live"
    with pytest.raises(PeerLostError, match="cannot call server 0: gone"):
        transport.connect(Callee((OTHER,), Dead()))
    assert transport.poll(0) == []


# -- the callee's end --------------------------------------------------------------------------------


def test_calls_are_taken_in_order_and_only_the_newest_is_held() -> None:
    actor, caller, callee = FakeRay(), CallTransport(sink, (ME,)), CallTransport(sink, (OTHER,))
    channel = actor.connected(caller)
    back = greeted(callee, actor.key)
    assert (back.peers, back.name) == ((ME,), "worker 0")
    for number in (1, 2):
        channel.send(message(number, size=number))
        caller.poll(0)
    second, first = (callee.answer(actor.calls[i].call, actor.calls[i].payloads) for i in (1, 0))
    assert numbers(callee.poll(0)) == [1, 2]
    assert first.result(0) == NOTHING
    assert not second.done()
    back.send(message(8, OTHER, ME))
    back.send(message(9, OTHER, ME))
    callee.poll(0)
    for call, found in zip(actor.calls, (first, second), strict=True):
        call.result.set_result(found.result(0))
    assert numbers(caller.poll(0)) == [8, 9]


def test_a_long_turn_says_what_it_has_and_that_more_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor, caller, callee = FakeRay(), CallTransport(sink, (ME,)), CallTransport(sink, (OTHER,))
    actor.connected(caller, pause=3600)
    back = greeted(callee, actor.key)
    caller.poll(0)
    found = callee.answer(actor.calls[0].call, ())
    back.send(message(1, OTHER, ME))
    monkeypatch.setattr("steepest.transport.ray_calls._GATHER_SECONDS", 3600)
    callee.pump()
    assert not found.done()
    monkeypatch.setattr("steepest.transport.ray_calls._GATHER_SECONDS", 0)
    callee.pump()
    actor.calls[0].result.set_result(found.result(0))
    assert numbers(caller.poll(0)) == [1]
    caller.poll(0)
    assert len(actor.calls) == 2, "no pause"
    back.send(message(2, OTHER, ME))
    found = callee.answer(actor.calls[1].call, ())
    callee.pump()
    actor.calls[1].result.set_result(found.result(0))
    assert numbers(caller.poll(0)) == [2], "the turn need not end for that"


def test_a_call_is_not_held_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steepest.transport.ray_calls._HOLD_SECONDS", -1)
    callee = CallTransport(sink, (OTHER,))
    greeted(callee)
    found = callee.answer(packed(1), ())
    callee.poll(0)
    callee.poll(0)
    assert found.result(0) == NOTHING


def test_the_first_call_returns_when_the_router_knows_the_caller() -> None:
    callee = CallTransport(sink, (OTHER,))
    found = callee.answer(hello(), ())
    assert not found.done()
    (event,) = callee.poll(0)
    assert (event.message, event.reason) == (None, "opened")
    assert found.result(0) == NOTHING


def test_a_caller_that_leaves_or_comes_again() -> None:
    callee = CallTransport(sink, (OTHER,))
    first = greeted(callee)
    callee.answer(packed(2, END), ())  # leaves; one call is still on its way
    assert callee.poll(0) == []
    found = callee.answer(packed(1), ())
    assert callee.poll(0) == [Event(first, None, "channel closed")]
    assert found.result(0) == NOTHING
    second = greeted(callee)
    callee.answer(hello(2, ME, COORDINATOR), ())
    callee.answer(hello(3, ME), ())
    events = callee.poll(0)
    assert events[0] == Event(second, None, "it has connected anew")
    assert events[1][1:] == (None, "opened")
    assert events[2] == Event(events[1].channel, None, "it has connected anew")
    assert events[3][1:] == (None, "opened")
    left = [callee.answer(packed(1), ()), callee.answer(packed(2, END), ())]
    callee.poll(0)
    for found in left:
        with pytest.raises(PeerLostError, match="it has closed this channel"):
            found.result(0)


def test_nonsense_closes_the_channel_and_the_caller_is_told() -> None:
    def refuse(channel: Channel, message: Message, size: int) -> torch.Tensor:
        raise ProtocolError("not for me")

    callee = CallTransport(refuse, (OTHER,))
    back = greeted(callee)
    found = callee.answer(packed(1, text=encode(message(1, size=3)) + bytes(3)), ())
    assert callee.poll(0) == [Event(back, None, "refused: not for me")]
    assert "refused: not for me" in str(found.exception(0))
    assert callee.refused == 1


def test_close_ends_every_call() -> None:
    callee = CallTransport(sink, (OTHER,))
    greeted(callee)
    held = callee.answer(packed(1), ())
    callee.poll(0)
    new = callee.answer(hello(2, worker_peer(1)), ())
    callee.close()
    assert isinstance(held.exception(0), PeerLostError)
    assert isinstance(new.exception(0), ShutdownError)
    assert isinstance(callee.answer(packed(2), ()).exception(0), ShutdownError)
    actor, transport = FakeRay(), CallTransport(sink, (ME,))
    channel = actor.connected(transport)
    transport.close()
    transport.close()
    channel.send(message(1))
    assert (transport.poll(0), actor.calls, actor.ended) == ([], [], 1)


@seeds(30)
def test_both_ways_in_order_exactly_once_in_any_order_of_calls(seed: int) -> None:
    luck = random.Random(seed)
    actor, caller, callee = FakeRay(), CallTransport(sink, (ME,)), CallTransport(sink, (OTHER,))
    there = actor.connected(caller)
    back = greeted(callee, actor.key)
    sent, found = [0, 0], ([], [])  # by direction
    running: list[tuple[FakeCall, Future[Answer]]] = []

    def send(direction: int) -> None:
        source, target = ((ME, OTHER), (OTHER, ME))[direction]
        (there, back)[direction].send(message(sent[direction], source, target, luck.choice((0, 5))))
        sent[direction] += 1

    def run() -> None:
        if actor.calls:
            call = actor.calls.pop(luck.randrange(len(actor.calls)))
            running.append((call, callee.answer(call.call, call.payloads)))

    def complete() -> None:
        over = [entry for entry in running if entry[1].done()]
        if over:
            call, answer = luck.choice(over)
            running.remove((call, answer))
            call.result.set_result(answer.result())

    actions = [
        lambda: send(0),
        lambda: send(1),
        lambda: found[1].extend(numbers(caller.poll(0))),
        lambda: found[0].extend(numbers(callee.poll(0))),
        lambda: caller.pump(),
        lambda: callee.pump(),
        run,
        complete,
        complete,
    ]
    for _ in range(200):
        luck.choice(actions)()
        luck.choice(actions)()
    while len(found[0]) < sent[0] or len(found[1]) < sent[1]:
        luck.choice(actions[2:])()
    assert found == (list(range(sent[0])), list(range(sent[1])))


# -- over Ray ----------------------------------------------------------------------------------------


class Talker:
    """An actor that sends everything back, and speaks by itself when a message asks for it."""

    def __init__(self) -> None:
        self.transport = CallTransport(sink, (OTHER,))
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        while True:
            for channel, heard, _ in self.transport.poll(SECONDS):
                if heard is not None:
                    heard.source, heard.target = heard.target, heard.source
                    channel.send(heard)

    def exchange(self, call: bytes, *payloads: Any) -> Answer:
        return self.transport.answer(call, payloads).result()


def talk(actor: Any, index: int, count: int) -> list[int]:
    """Has `count` messages of many sizes sent back; runs in any process."""
    luck = random.Random(index)
    me = worker_peer(index)
    transport = CallTransport(sink, (me,))
    channel = transport.connect(Callee((OTHER,), actor), SECONDS)
    found: list[int] = []
    for number in range(count):
        channel.send(message(number, me, OTHER, luck.choice((0, 1, 99_999, 100_000, 3_000_000))))
        if luck.random() < 0.7:
            transport.pump()
        if luck.random() < 0.2:
            found += numbers(transport.poll(0))
    while len(found) < count:
        found += numbers(transport.poll(SECONDS))
    transport.close()
    return found


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
class TestOverRay:
    def test_messages_of_any_size_from_the_driver_a_task_and_an_actor(self) -> None:
        @ray.remote(num_cpus=0)
        class Another:
            def talk(self, actor: Any, index: int, count: int) -> list[int]:
                return talk(actor, index, count)

        actor = ray.remote(Talker).options(num_cpus=0, max_concurrency=8).remote()
        another = Another.remote()
        refs = [
            ray.remote(talk).options(num_cpus=0).remote(actor, 1, 100),
            another.talk.remote(actor, 2, 100),
        ]
        assert talk(actor, 0, 100) == list(range(100))
        assert ray.get(refs, timeout=SECONDS) == [list(range(100))] * 2
        ray.kill(actor)

    def test_the_death_of_an_actor_closes_the_channel(self) -> None:
        actor = ray.remote(Talker).options(num_cpus=0, max_concurrency=8).remote()
        transport = CallTransport(sink, (ME,))
        channel = transport.connect(Callee((OTHER,), actor), SECONDS)
        channel.send(message(3))
        assert numbers(transport.poll(SECONDS)) == [3]
        transport.poll(0)
        ray.kill(actor)
        (event,) = transport.poll(SECONDS)
        assert event[:2] == (channel, None)
        assert "actor" in event.reason
        with pytest.raises(PeerLostError):
            transport.connect(Callee((OTHER,), actor), SECONDS)
