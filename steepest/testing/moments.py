"""Wrappers by which servers and workers report moments within a message, for scripted faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steepest.core.engine.chunk_store import GradientStore
from steepest.core.engine.exchange import Arrived
from steepest.core.engine.server import Server
from steepest.core.engine.worker import Worker
from steepest.core.messages.gradients import Weights
from steepest.core.messages.message import Kind, Message, Peer
from steepest.testing.faults import Clock, Moment

#: Called with a step, a moment in it, and what has happened by then, in words.
Report = Callable[[int, Moment, str], None]


def watch_applying(server: Server, reached: Report) -> None:
    """Have `reached` called, with step, moment and chunks in words, when half a server is updated ("apply")."""
    chunks = [*server.gradient_stores.values()]
    updated: dict[int, list[int]] = {}  # to the version that is being made

    def watch(held: GradientStore) -> None:
        apply = held.apply

        def applied(*arguments: Any) -> None:
            apply(*arguments)
            if server.version not in updated:
                updated.clear()
            now = updated.setdefault(server.version, [])
            now.append(held.chunk.index)
            if len(now) == (len(chunks) + 1) // 2:
                others = sorted({other.chunk.index for other in chunks} - {*now})
                reached(
                    server.version - 1,
                    "apply",
                    f"chunks {sorted(now)} are updated, {others} are not",
                )

        held.apply = applied  # type: ignore[method-assign, assignment]

    for held in chunks:
        watch(held)


def watch_server(server: Server, reached: Report) -> None:
    """Have `reached` called with the step, the moment, and the chunk and its peer, in words, of a server's steps.

    Moments are "apply" (see `watch_applying`), each chunk of a gradient that arrives ("push"), and each chunk of
    weights that leaves ("pull").
    """
    handle, send = server.handle, server._weights._send

    def handled(source: Peer, message: Message) -> None:
        step = server.version
        handle(source, message)
        if message.kind in (Kind.PUSH, Kind.HOST_PUSH):
            reached(step, "push", f"chunk {message.body.chunk} has come from {source}")

    def sent(target: Peer, message: Message) -> None:
        send(target, message)
        if message.kind is Kind.WEIGHTS and target.role != "client":
            weights: Weights = message.body
            reached(weights.version, "pull", f"chunk {weights.chunk} has left for {target}")

    watch_applying(server, reached)
    server.handle = handled  # type: ignore[method-assign]
    server._weights._send = sent


def watch_worker(worker: Worker, clock: Clock, reached: Report) -> None:
    """Have `reached` called for each chunk of weights that comes while a worker computes nothing ("pull").

    It is called with the step, the moment, and the chunk and its version, in words.
    """
    receive = worker._exchange.receive

    def received(source: Peer, message: Message) -> Arrived:
        arrived = receive(source, message)
        if message.kind is Kind.WEIGHTS and not clock.computing:
            rest = "others are not" if arrived.complete is None else "all are"
            reached(
                clock.step,
                "pull",
                f"chunk {message.body.chunk} of version {message.body.version} is here, {rest}",
            )
        return arrived

    worker._exchange.receive = received  # type: ignore[method-assign]
