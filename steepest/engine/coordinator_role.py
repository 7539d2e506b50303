"""A coordinator in a process: messages in, messages out."""

from __future__ import annotations

import time
from collections.abc import Callable

from steepest.errors import ProtocolError
from steepest.messages.message import Kind, Message, Peer, Send
from steepest.protocol.commit_state import Outgoing
from steepest.protocol.coordinator import Coordinator


class CoordinatorRole:
    """Sends what a coordinator decides.

    Args:
        coordinator: decides.
        send: how to send.
        flush: makes what was sent leave at once: servers elsewhere begin to apply before the one
            here does.
        pause: seconds for which the results of short steps wait for each other, while more steps
            are to come: waking the client for each would take processor time from the workers.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        send: Send,
        flush: Callable[[], None] = lambda: None,
        pause: float = 0.0,
    ) -> None:
        self.coordinator = coordinator
        self._send = send
        self._flush = flush
        self._pause = pause
        self._told = 0.0  # when a client was last told of a step
        self._results: list[tuple[Peer, Message]] = []  # of which it will be told

    def handle(self, source: Peer, message: Message) -> None:
        """Acts on one message."""
        self._carry_out(self.coordinator.handle(source, message))
        if message.kind is Kind.LOGGED and self._results:
            self._tell()

    def destination(self, message: Message, size: int) -> None:
        """No coordinator takes payloads."""
        raise ProtocolError(f"{message.kind.name} with {size} bytes of payload for the coordinator")

    def lost(self, peer: Peer, reason: str) -> None:
        """A peer's channel closed."""
        self._carry_out(self.coordinator.lost(peer, reason))

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._tell()
        self._carry_out(self.coordinator.tick(now))

    def _carry_out(self, decisions: Outgoing) -> None:
        commits = 0
        for peer, message in decisions:
            if message.kind is Kind.COMMIT:
                commits += 1
            elif commits > 1:
                self._flush()
                commits = 0
            if peer.role != "client":
                self._send(peer, message)
                continue
            self._results.append((peer, message))
            more = message.kind is Kind.RESULT and self.coordinator.version < self.coordinator.limit
            if not more or time.monotonic() - self._told >= self._pause:
                self._tell()
        if commits > 1:
            self._flush()

    def _tell(self) -> None:
        """In order, with what waited before it."""
        self._told = time.monotonic()
        while self._results:
            peer, message = self._results[0]
            if message.kind is Kind.RESULT and message.version > self.coordinator.logged:
                return  # until another process has heard of it
            del self._results[0]
            self._send(peer, message)
