"""What a server and a worker do in the middle of a message, told as it happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steepest.engine.server import Server
from steepest.engine.server_chunk import ServerChunk
from steepest.engine.worker import Worker
from steepest.messages.message import WHOLE, Kind, Message, Peer
from steepest.testing.faults import Clock, Moment

#: Told of a step, a moment in it, and what has happened by then.
Told = Callable[[int, Moment, str], None]


def watch_applying(server: Server, reached: Told) -> None:
    """Has a server tell when half of its chunks are updated to the next version ("apply"), and the others are not."""
    chunks = [held for held in server._chunks.values() if held.chunk.trainable]
    updated: dict[int, list[int]] = {}  # to the version that is being made

    def watch(held: ServerChunk) -> None:
        apply = held.apply

        def applied(*arguments: Any) -> None:
            apply(*arguments)
            if server.version not in updated:
                updated.clear()
            now = updated.setdefault(server.version, [])
            now.append(held.chunk.index)
            if len(now) == (len(chunks) + 1) // 2:
                others = sorted({other.chunk.index for other in chunks} - {*now})
                reached(server.version - 1, "apply", f"chunks {sorted(now)} are updated, {others} are not")

        held.apply = applied  # type: ignore[method-assign, assignment]

    for held in chunks:
        watch(held)


def watch_server(server: Server, reached: Told) -> None:
    """Has a server tell of that, of each chunk of a gradient that has come ("push"), and of weights that leave."""
    handle, send = server.handle, server._send

    def handled(source: Peer, message: Message) -> None:
        step = server.version
        handle(source, message)
        if message.kind is Kind.PUSH:
            reached(step, "push", f"chunk {message.chunk} has come from {source}")

    def sent(target: Peer, message: Message) -> None:
        send(target, message)
        if message.kind is Kind.WEIGHTS and target.role != "client":
            reached(message.version, "pull", f"chunk {message.chunk} has left for {target}")

    watch_applying(server, reached)
    server.handle = handled  # type: ignore[method-assign]
    server._send = sent


def watch_worker(worker: Worker, clock: Clock, reached: Told) -> None:
    """Has a worker tell of each chunk of weights that has come while it computes nothing ("pull")."""
    receive = worker._exchange.receive

    def received(source: Peer, message: Message) -> tuple[int, int] | None:
        complete = receive(source, message)
        if message.kind is Kind.WEIGHTS and message.chunk != WHOLE and not clock.computing:
            rest = "others are not" if complete is None else "all are"
            reached(clock.step, "pull", f"chunk {message.chunk} of version {message.version} is here, {rest}")
        return complete

    worker._exchange.receive = received  # type: ignore[method-assign]
