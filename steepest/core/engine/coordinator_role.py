"""The coordinator's role in a process: it receives messages, and sends what the coordinator decides."""

from __future__ import annotations

from collections.abc import Callable

from steepest.core.messages.message import Kind, Message, Peer, Send
from steepest.core.protocol.commit_state import Outgoing
from steepest.core.protocol.coordinator import Coordinator
from steepest.core.status import Status
from steepest.core.system import system
from steepest.errors import ProtocolError

#: Messages that come in every step: the results of earlier steps need not be made before them.
_OF_STEPS = (Kind.REPORT, Kind.PUSHED, Kind.VERSION_STAGED, Kind.PUSH_STAGED, Kind.LOGGED)


class CoordinatorRole:
    """The role that sends what a coordinator decides.

    Args:
        coordinator: decides.
        send: sends as the coordinator.
        flush: has sent messages leave at once, so that servers in other processes begin to apply a
            commit before the server of this one does; if they have nothing to apply, their orders
            leave with the weights.
        pause: seconds for which results of short steps wait for each other while more steps are to
            come: waking the client for each would take processor time from the workers.
        when_idle: has a function called as soon as the process has nothing else to do.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        send: Send,
        flush: Callable[[], None] = lambda: None,
        pause: float = 0.0,
        when_idle: Callable[[Callable[[], None]], None] = lambda function: function(),
    ) -> None:
        self._now = system().now
        self.coordinator = coordinator
        self._when_idle = when_idle
        self._send = send
        self._flush = flush
        self._pause = pause
        self._sent_at = 0.0  # when a client was last sent results
        self._results: list[tuple[Peer, Message]] = []  # that wait to be sent to clients

    def handle(self, source: Peer, message: Message) -> None:
        """Act on one message, and send what is decided.

        Results of steps are made together when they are due and no message waits, which takes a third of the time.
        """
        version = self.coordinator.version
        if message.kind not in _OF_STEPS:
            self._carry_out(self.coordinator.settle())
        self._carry_out(self.coordinator.decide(source, message))
        if self.coordinator.version != version and self._results_are_due():
            self._when_idle(self._settle)
        if message.kind is Kind.LOGGED and self._results:
            self._send_results()

    def destination(self, message: Message, size: int) -> None:
        """Refuse a payload by ProtocolError: no message to the coordinator has one."""
        raise ProtocolError(f"{message.kind.name} with {size} bytes of payload for the coordinator")

    def lost(self, peer: Peer, reason: str) -> None:
        """Have the coordinator decide what the loss of a peer means, and send that."""
        self._carry_out(self.coordinator.lost(peer, reason))

    def tick(self, now: float) -> None:
        """Send the results that waited, and what is decided as deadlines have passed."""
        self._carry_out(self.coordinator.tick(now))
        self._send_results()

    def doing(self) -> Status:
        """Return what the coordinator waits for; seconds are those at the last `tick`."""
        return self.coordinator.doing()

    def _results_are_due(self) -> bool:
        """Return whether results leave now, rather than with those of the steps after them."""
        more = self.coordinator.version < self.coordinator.limit
        return not more or self._now() - self._sent_at >= self._pause

    def _settle(self) -> None:
        self._carry_out(self.coordinator.settle())
        self._send_results()

    def _carry_out(self, decisions: Outgoing) -> None:
        """Send the messages of a decision; those for clients may wait for later ones."""
        commits = 0
        for peer, message in decisions:
            if message.kind is Kind.SNAPSHOT:
                self._send_results()  # first, so that a job that goes back to the snapshot has them
            if message.kind is Kind.COMMIT:
                commits += peer.index in self.coordinator.holding
            elif commits > 1:
                self._flush()
                commits = 0
            if peer.role != "client":
                self._send(peer, message)
                continue
            is_result = message.kind is Kind.RESULT
            # a DIFFERENCE comes before the result of its own step; before other messages all results are due
            if not is_result and message.kind is not Kind.DIFFERENCE:
                self._results += self.coordinator.settle()
            self._results.append((peer, message))
            if not is_result or self._results_are_due():
                self._send_results()
        if commits > 1:
            self._flush()

    def _send_results(self) -> None:
        """Send clients' waiting messages in order, up to the first result whose commit no other server knows yet."""
        if self._results:
            self._sent_at = self._now()
        while self._results:
            peer, message = self._results[0]
            if message.kind is Kind.RESULT and message.body.version > self.coordinator.logged:
                return
            del self._results[0]
            self._send(peer, message)
