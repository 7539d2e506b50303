"""Waiting in the middle of a step: what ends it, and what other processes' work within it may not touch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from steepest.core.engine.step_waits import (
    AbandonedError,
    BetweenTurns,
    StepAhead,
    StepWaits,
    apart_from_models,
)
from steepest.core.messages.message import COORDINATOR, Kind, Message, Peer
from steepest.core.transport.router import Router
from steepest.errors import PeerLostError, ShutdownError
from tests.inside import replicas_of
from tests.modes import make
from tests.reference import Task, sgd
from tests.said import said

TASK = Task(optimizer=sgd(momentum=0.9))


class Turns:
    """A process' turns within a step, of which each does the next of some things."""

    def __init__(self, *things: Callable[[], None]) -> None:
        self.things = list(things)
        self.begun = 0  # pushes

    def waits(self) -> StepWaits:
        """Return the waits of a step that began before the weights of version 3 were here."""
        nothing = lambda *_: None  # noqa: E731
        between = BetweenTurns(nothing, nothing, nothing, self.receive, self.receive)
        waits = StepWaits(between, lambda: False)
        waits.ahead = StepAhead(3, lambda: not self.things, self.begin_push)
        return waits

    def receive(self) -> None:
        self.things.pop(0)()

    def begin_push(self) -> None:
        self.begun += 1


def test_a_step_that_began_before_its_weights_begins_its_push_when_they_are_here() -> None:
    turns = Turns(*[lambda: None] * 3)
    waits = turns.waits()
    waits.poll()
    assert len(turns.things) == 2
    waits.arrive()
    assert not turns.things
    waits.arrive()  # once more, as where a gradient is pushed again
    assert turns.begun == 1


@pytest.mark.parametrize("ends", ["superseded", "failure", "shutdown", "defect"])
def test_what_ends_the_waiting_goes_through_the_model(ends: str) -> None:
    def end() -> None:
        if ends == "superseded":
            waits.superseded = True
        elif ends == "failure":
            waits.failure = PeerLostError("server 1 is gone")
        else:
            raise ShutdownError("stopped") if ends == "shutdown" else ArithmeticError("a defect")

    turns = Turns(lambda: None, end, lambda: None)
    waits = turns.waits()
    with pytest.raises(AbandonedError):
        waits.arrive()
    assert len(turns.things) == 1
    assert turns.begun == 0
    assert isinstance(waits.defect, ArithmeticError) == (ends == "defect")


def test_a_server_that_works_during_a_pass_is_apart_from_it() -> None:
    """What a pass has set of torch does not reach the updates that are made while it waits."""
    weight = torch.zeros(3)

    def update(row: torch.Tensor) -> torch.Tensor:
        with apart_from_models():
            weight.add_(torch.ones(3))  # in a transformation, torch refuses it
            assert not torch.is_autocast_enabled("cpu")
            assert not torch.is_inference_mode_enabled()
        return row

    with torch.autocast("cpu", torch.bfloat16):
        torch.func.grad(lambda x: update(x).sum())(torch.ones(3))
        torch.func.vmap(update)(torch.ones(2, 3))
    with torch.inference_mode():
        update(torch.ones(3))
    assert weight.tolist() == [3.0] * 3


def test_a_router_that_is_stopped_does_not_wait() -> None:
    router = Router()
    router.stop()
    with pytest.raises(ShutdownError):
        router.wait()


def test_messages_keep_their_order_when_a_role_waits_in_the_middle_of_one() -> None:
    cluster = make("sync", TASK, 2)
    network = cluster.network
    a, b = network.router(), network.router()
    got: list[int] = []

    class Slow:
        def destination(self, message: Message, size: int) -> None:
            return None

        def handle(self, source: Peer, message: Message) -> None:
            got.append(message.body.limit)
            if message.body.limit == 0:
                while len(got) < 3:
                    b.wait()
                got.append(-1)

        def lost(self, peer: Peer, reason: str) -> None:
            """Nobody leaves."""

        def tick(self, now: float) -> None:
            """Time does not matter."""

    b.host(Peer("worker", 9), Slow())
    network.connect(a, (COORDINATOR,), b, (Peer("worker", 9),))
    send = a.sender(COORDINATOR)
    for sequence in range(5):
        send(Peer("worker", 9), said(Kind.GRANT, limit=sequence))
    network.run_until(lambda: len(got) == 6, "all")
    assert got == [0, 1, 2, -1, 3, 4]


def test_what_a_process_has_to_say_leaves_before_its_worker_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the others would wait for as long: new weights of small models and votes are sent together, in the end."""
    cluster = make("allreduce", TASK, 2)
    unsent: set[int] = set()
    computed: list[bool] = []

    def sent(message: Message) -> list[Message]:
        if message.source is not None and message.source.role != "client":
            unsent.add(message.source.index)
        return [message]

    def watched(index: int, compute: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            computed.append(index in unsent)
            return compute(*arguments)

        return run

    cluster.network.filter = sent
    for index, (worker, router) in enumerate(
        zip(cluster.workers, cluster.worker_routers, strict=True)
    ):
        monkeypatch.setattr(router.transport, "pump", functools.partial(unsent.discard, index))
        monkeypatch.setattr(
            replicas_of(worker), "compute", watched(index, replicas_of(worker).compute)
        )
    cluster.step(3)
    assert computed == [False] * 6
