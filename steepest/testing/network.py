"""Processes of one thread and the channels between them, on virtual time."""

from __future__ import annotations

import ctypes
import logging
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from steepest.core.messages.message import Kind, Message, Peer
from steepest.core.messages.schema import encode_body
from steepest.core.tensors.memory import Bytes, Memory, address_of, clone, copy_bytes
from steepest.core.transport.channel import TransportEvent
from steepest.core.transport.router import Router
from steepest.errors import DeadlineError, ProtocolError, ShutdownError

log = logging.getLogger(__name__)


class _SimulatedLoan:
    """A payload that another process reads where it lies; the loan ends when the last view of it is collected."""

    def __init__(self, payload: Memory, lent: Counter[int]) -> None:
        self._payload, self._lent = payload, lent
        self._address = address_of(payload)  # which may import: an interpreter that ends cannot
        lent[self._address] += 1

    def __del__(self) -> None:
        self._lent[self._address] -= 1


class Link:
    """One end of an in-process channel; payloads are copied as by a wire, or lent."""

    def __init__(
        self, network: Network, name: str, peers: tuple[Peer, ...], far: InProcessTransport
    ) -> None:
        self.name = name
        self.peers = peers
        self.pending = 0
        self.closed = False  # whether this end is closed
        # the round until which nothing comes to this end; messages wait, in order
        self.held_until = 0.0
        # whether messages to this end are lost from now on, although neither end is told
        self.severed = False
        self._network = network
        self._far = far
        self.other: Link | None = None  # the other end

    def send(self, message: Message) -> None:
        """Deliver a copy of a message to the other end's process; MessageTooLargeError: as a wire would."""
        if self.closed:
            return
        encode_body(message)
        assert self.other is not None
        copy = replace(message)
        if message.payload is not None:
            copy.payload = (
                self._lent(message.payload)
                if message.kind in self._network.lends
                else clone(message.payload)
            )
        self._network.deliver(self._far, self.other, copy)

    def _lent(self, payload: Memory) -> Bytes:
        assert self.other is not None
        memory: Any = (ctypes.c_uint8 * payload.nbytes).from_address(address_of(payload))
        memory.loan = _SimulatedLoan(payload, self.other._far.lent)
        return np.frombuffer(memory, dtype=np.uint8)

    def own_pending(self, memory: Memory) -> None:
        """Do nothing: nothing is pending, `send` copies or lends."""

    def drop_arriving(self, memory: Memory) -> None:
        """Do nothing: payloads arrive in whole."""

    def close(self) -> None:
        """Close both ends; the other process sees it."""
        for end, owner in ((self, None), (self.other, self._far)):
            if end is not None and not end.closed:
                end.closed = True
                if owner is not None:
                    owner.inbox.append((end, None))


class InProcessTransport:
    """A `Transport` whose channels lead to other routers of the same thread."""

    encrypts = False

    def __init__(self, router: Router) -> None:
        self.listens_at: str | None = None
        self.router = router
        self.refused = 0
        self.inbox: deque[tuple[Link, Message | None]] = deque()
        self.lent: Counter[int] = Counter()  # readers of this process' memory, by address
        self.random: random.Random | None = None  # chooses the channel of the next message
        self.speed = 1.0  # the share of its turns that the process takes
        self.every = 1  # the process takes a turn in one of so many rounds
        self.hung_until = 0.0  # the round until which the process takes no turns and sends nothing
        # Messages that the process would have sent while it hung.
        self.unsent: list[tuple[InProcessTransport, Link, Message]] = []
        self.links: list[Link] = []  # this process' end of each of its channels

    @property
    def has_work(self) -> bool:
        """Whether a turn would do anything."""
        router = self.router
        return bool(self.inbox or router._local or router._events or router._calls or router._later)

    def poll(self, timeout: float) -> list[TransportEvent]:
        """Return the next message, if there is one; never wait."""
        if not self.inbox:
            return []
        link, message = self._next()
        if message is not None and type(message.body) is not bytes:
            message.body = encode_body(
                message
            )  # as late as this, for those who look at what is sent
        if message is not None and message.payload is not None:
            here = message.payload
            message.payload = here if message.kind in link._network.lends else None
            try:
                target = self.router.destination(link, message, here.nbytes)
            except ProtocolError as error:  # a wire closes the channel, too
                self.refused += 1
                log.warning("refused %s: %s", link.name, error)
                link.close()
                return [TransportEvent(link, None, f"refused: {error}")]
            if target is not None and address_of(target) != address_of(here):
                copy_bytes(target, here)
            message.payload = target
        return [TransportEvent(link, message, "" if message is not None else "closed")]

    def _next(self) -> tuple[Link, Message | None]:
        if self.random is not None:
            chosen = self.random.choice(list(dict.fromkeys(link for link, _ in self.inbox)))
            position = next(i for i, (link, _) in enumerate(self.inbox) if link is chosen)
            self.inbox.rotate(-position)
            delivery = self.inbox.popleft()
            self.inbox.rotate(position)
            return delivery
        return self.inbox.popleft()

    def in_use(self, memory: Memory) -> bool:
        """Return whether another process reads this memory where it lies."""
        return self.lent[address_of(memory)] > 0

    def pump(self) -> None:
        """Do nothing: nothing is pending."""

    def wake(self) -> None:
        """Do nothing: `poll` never waits."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class Network:
    """Routers of one thread and the links between them.

    Args:
        shuffle: a seed; processes then take their turns in random order, some rarely, and take
            messages of their channels in random order, so that messages of different channels
            overtake each other, each channel staying in order.
    """

    def __init__(self, shuffle: int | None = None) -> None:
        # virtual time in seconds; it passes when nothing moves, and `round_seconds` in each round
        self.now = 0.0
        # kinds of messages whose payloads are lent instead of copied, as in shared memory
        self.lends: Collection[Kind] = ()
        self.round_seconds = 0.0
        self.rounds = 0  # how often every process was given its turn
        self.delivered = 0  # messages that were put into inboxes or are on their way there
        self._idle = 0  # rounds in which nothing moved
        self._random = None if shuffle is None else random.Random(shuffle)
        self._transports: list[InProcessTransport] = []
        # (round in which it is due, receiver, message), by channel.
        self._late: dict[Link, deque[tuple[int, InProcessTransport, Message]]] = {}
        # called with every message as it is sent; what it returns is delivered instead
        self.filter: Callable[[Message], Sequence[Message]] = lambda message: [message]
        # returns the rounds that a message takes; those behind it in its channel wait for it
        self.latency: Callable[[Message], int] = lambda message: 0
        # as `filter`, and before it, with the receiving end; messages take the rounds that it returns
        self.script: Callable[[Link, Message], Sequence[tuple[Message, int]]] = (
            lambda link, message: [(message, 0)]
        )

    def router(self) -> Router:
        """Return the router of a new process."""
        router = Router()
        transport = InProcessTransport(router)
        router.use(transport)
        if self._random is not None:
            transport.random = self._random
            transport.speed = self._random.choice((0.05, 0.3, 1.0))
        self._transports.append(transport)
        return router

    def remove(self, router: Router) -> None:
        """End a process at once; processes with a channel to it see that channel close."""
        self._transports = [
            transport for transport in self._transports if transport.router is not router
        ]
        for link in _transport(router).links:
            link.close()

    def runs(self, router: Router) -> bool:
        """Return whether a process was made and not removed."""
        return router.transport in self._transports

    def set_pace(self, router: Router, every: int) -> None:
        """Let a process take a turn in only one of `every` rounds, from now on."""
        _transport(router).every = every

    def hang(self, router: Router, rounds: float = math.inf) -> None:
        """Stop a process, with its channels open, for so many rounds or until `heal`.

        A computation in progress is computed to its end, since all is one thread; but nothing that
        the process sends from now on leaves before it goes on.
        """
        _transport(router).hung_until = self.rounds + rounds

    def cut(self, a: Router, b: Router | None = None, rounds: float = math.inf) -> None:
        """Let nothing pass between a process and another, or all others, for `rounds` rounds or until `heal`.

        Messages wait, in order, as TCP sends again what was lost; they are lost when their channel is closed.
        """
        for link in _transport(a).links:
            assert link.other is not None
            if b is None or link._far is b.transport:
                link.held_until = link.other.held_until = self.rounds + rounds

    def heal(self) -> None:
        """Let processes that hang go on, and links that are cut carry messages; dropped messages stay lost."""
        for transport in self._transports:
            transport.hung_until = 0.0
            for link in transport.links:
                link.held_until = 0.0

    def connect(
        self, a: Router, a_peers: tuple[Peer, ...], b: Router, b_peers: tuple[Peer, ...]
    ) -> Link:
        """Connect two processes, with the roles that each hosts, and return the end that `a` holds."""
        near, far = _transport(a), _transport(b)
        there = Link(self, " + ".join(map(str, b_peers)), b_peers, far)
        back = Link(self, " + ".join(map(str, a_peers)), a_peers, near)
        there.other, back.other = back, there
        near.links.append(there)
        far.links.append(back)
        a.attach(there)
        b.attach(back)
        return there

    def deliver(self, to: InProcessTransport, link: Link, message: Message) -> None:
        """Put a message, already copied, into a process' inbox, at a link's end, now or some rounds later."""
        if self._hangs(link._far):
            link._far.unsent.append((to, link, message))
            return
        for scripted, more in self.script(link, message):
            for filtered in self.filter(scripted):
                if link.severed:
                    continue
                self.delivered += 1
                delay = more + self.latency(filtered)
                if delay or link in self._late or link.held_until > self.rounds:
                    self._late.setdefault(link, deque()).append((self.rounds + delay, to, filtered))
                else:
                    to.inbox.append((link, filtered))

    def _hangs(self, transport: InProcessTransport) -> bool:
        return transport.hung_until > self.rounds

    def _arrive(self) -> None:
        """Put messages that are due into inboxes; those of closed channels are lost."""
        for transport in self._transports:
            if transport.unsent and not self._hangs(transport):
                unsent, transport.unsent = transport.unsent, []
                for to, link, message in unsent:
                    if not link.closed:
                        self.deliver(to, link, message)
        for link, queue in list(self._late.items()):
            while queue and (link.closed or max(queue[0][0], link.held_until) <= self.rounds):
                _, to, message = queue.popleft()
                if not link.closed:
                    to.inbox.append((link, message))
            if not queue:
                del self._late[link]

    @property
    def _coming(self) -> bool:
        """Whether something will move by itself in a later round."""
        hung = [
            t.hung_until for t in self._transports if self._hangs(t) and (t.has_work or t.unsent)
        ]
        return any(map(math.isfinite, [*hung, *(link.held_until for link in self._late)]))

    def run_until(self, done: Callable[[], bool], what: str) -> None:
        """Give every process its turns until a condition holds.

        Raises:
            DeadlineError: nothing moves, not even in an hour.
        """
        self._idle = 0
        while not done():
            self._round(what)

    @property
    def waiting(self) -> int:
        """The number of messages on their way, which take some rounds more, or wait for a link to be healed."""
        return sum(map(len, self._late.values()))

    def settle(self) -> None:
        """Give every process its turns until nothing is left to do."""
        # DeadlineError: a message waits for ever, as on a cut.
        self.run_until(
            lambda: not (self._late or any(t.has_work for t in self._transports)), "silence"
        )

    def wait(self, router: Router) -> None:
        """Give every process a turn amid the work of one, or ShutdownError if that was removed; see `run_until`."""
        if not self.runs(router):
            raise ShutdownError("the process is dead")
        # Hooks of a checkpointed part of the model must not see the other processes' tensors.
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            self._round("what it needs to go on")

    def _round(self, what: str) -> None:
        before = self.delivered
        self.rounds += 1
        self._arrive()
        order = [
            transport
            for transport in self._transports
            if transport.has_work and not self._hangs(transport)
        ]
        if self._random is not None:
            self._random.shuffle(order)
        busy = bool(order) or self._coming
        for transport in order:
            if self.rounds % transport.every == 0 and (
                self._random is None or self._random.random() < transport.speed
            ):
                try:
                    transport.router.turn(0.0)
                except ShutdownError:  # the process died in the middle of its turn
                    if self.runs(transport.router):
                        raise
        if self.round_seconds:
            self._pass(self.round_seconds)
        if busy or self.delivered > before:
            self._idle = 0
            return
        self._idle += 1
        if self._idle > 100:
            raise DeadlineError(f"nothing moves any more while waiting for {what}")
        if self._idle > 2:
            self._pass(36.0)

    def _pass(self, seconds: float) -> None:
        """Let virtual time pass, and tick all routers."""
        self.now += seconds
        for transport in self._transports:
            if not self._hangs(transport):
                transport.router.tick(self.now)


def _transport(router: Router) -> InProcessTransport:
    assert isinstance(router.transport, InProcessTransport)
    return router.transport


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
