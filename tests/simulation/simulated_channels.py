"""Channels between simulated processes, in place of sockets: messages take time, and get lost with a process."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from steepest.core.messages.message import Message, Peer
from steepest.core.messages.schema import encode_body
from steepest.core.tensors.memory import Memory, address_of, clone, copy_bytes
from steepest.core.transport.channel import Address, ChannelSink, TransportEvent
from steepest.core.transport.handshake import names_of
from steepest.errors import DeadlineError, PeerLostError, ProtocolError
from tests.simulation.virtual_threads import Scheduler, Waiters

log = logging.getLogger(__name__)


class Host(Protocol):
    """A process that has channels; None stands for the driver's, which cannot die.

    Attributes:
        alive: whether it runs.
    """

    alive: bool


class Wires:
    """All channels of a simulation.

    Args:
        scheduler: its clock.
        dice: draws how long messages take.
        here: returns the process of the thread that runs; None for the driver.
        reaches: says of two processes whether messages pass between them now.
        sent: called at each message that is sent.

    Attributes:
        latency: least and most seconds that a message takes.
        grain: messages arrive at multiples of so many seconds, many of them together.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        dice: random.Random,
        here: Callable[[], Any],
        reaches: Callable[[Any, Any], bool],
        sent: Callable[[], None],
    ) -> None:
        self.scheduler, self.dice, self.here = scheduler, dice, here
        self.reaches, self.sent = reaches, sent
        self.latency = dice.choice(((2e-5, 2e-4), (1e-4, 2e-3), (1e-4, 2e-2)))
        self.grain = dice.choice((1e-5, 2e-4, 1e-3))
        self._listening: dict[int, SimulatedTransport] = {}

    def arrival(self, after: float) -> float:
        """Return when a message arrives that is sent now, not before another one."""
        arrives = self.scheduler.now + self.dice.uniform(*self.latency)
        return max((arrives // self.grain + 1) * self.grain, after)

    def listen(self, transport: SimulatedTransport) -> int:
        """Have a transport take connections; return its port."""
        self._listening[len(self._listening) + 1] = transport
        return len(self._listening)

    def listener(self, port: int) -> SimulatedTransport | None:
        """Return the transport that listens at a port, if it is open."""
        found = self._listening.get(port)
        return None if found is None or found.closed else found

    def drop(self, process: Host, *, silently: bool) -> None:
        """Close the channels of a process that was killed."""
        # `silently`: nobody is told, as where its node has gone too.
        for transport in list(self._listening.values()):
            if transport.process is process:
                transport.die(silently=silently)


class SimulatedChannel:
    """One end of a channel.

    Attributes:
        name, peers, pending: see `Channel`.
        closed: whether this end is closed.
        transport: of this end's process.
        far: the other end; None until the connection is accepted.
    """

    def __init__(self, transport: SimulatedTransport, name: str, peers: tuple[Peer, ...]) -> None:
        self.transport, self.name, self.peers = transport, name, peers
        self.pending = 0
        self.closed = False
        self.far: SimulatedChannel | None = None
        self.arrived: Waiters = []  # the thread that connects
        self._last = 0.0  # when the last message so far arrives at the other end
        self._cut: deque[Callable[[], None]] = deque()  # until the other end can be reached

    def send(self, message: Message) -> None:
        """Send a copy of a message; MessageTooLargeError: as a wire would."""
        wires = self.transport.wires
        wires.sent()
        wires.scheduler.check()
        if self.closed:
            return
        copy = replace(message, body=encode_body(message))
        if message.payload is not None:
            copy.payload = clone(message.payload)
            self.transport.bytes_sent += message.payload.nbytes
        self._send(copy, "")

    def _send(self, message: Message | None, reason: str) -> None:
        wires = self.transport.wires
        self._last = wires.arrival(self._last)
        wires.scheduler.at(self._last, partial(self._arrive, message, reason))

    def _arrive(self, message: Message | None, reason: str) -> None:
        far = self.far
        if far is None or far.closed:
            return
        wires, to = self.transport.wires, far.transport
        if not wires.reaches(self.transport.process, to.process):
            return  # a node that is cut off is not coming back
        to.take(far, message, reason)

    def own_pending(self, memory: Memory) -> None:
        """Do nothing: `send` copies."""

    def drop_arriving(self, memory: Memory) -> None:
        """Do nothing: payloads arrive in whole."""

    def close(self) -> None:
        """Close this end; the other process reads the end of the stream."""
        if not self.closed:
            self.closed = True
            self.transport.ends.pop(self, None)
            self._send(None, "connection closed")


class SimulatedTransport:
    """A `Transport` with the methods of `WireTransport`; for the arguments see there."""

    listens_at: str | None = None
    encrypts = False

    def __init__(
        self,
        wires: Wires,
        token: bytes,
        peers: tuple[Peer, ...],
        node: str,
        sink: ChannelSink,
        ways: str = "wire",
    ) -> None:
        self.wires, self.process = wires, wires.here()
        self.ways, self.lends = ways, False
        self.peers, self.node, self.sink = peers, node, sink
        self.refused = self.bytes_sent = 0
        self.ends: dict[SimulatedChannel, None] = {}
        self.closed = False
        self._token = token
        self._inbox: deque[tuple[SimulatedChannel, Message | None, str]] = deque()
        self._polling: Waiters = []
        self._woken = False

    # -- opening -------------------------------------------------------------------------------

    def listen(self, host: str) -> Address:
        """Take connections from now on; return the address."""
        return Address(self.node, host, self.wires.listen(self), "", self.peers)

    def connect(self, address: Address, timeout: float = 10.0) -> SimulatedChannel:
        """Connect to a process, as soon as it polls; PeerLostError: it does not listen; DeadlineError: no answer."""
        wires, scheduler = self.wires, self.wires.scheduler
        scheduler.sleep(wires.dice.uniform(*wires.latency))
        there = wires.listener(address.port)
        where = f"{names_of(address.peers)} at {address.host}:{address.port}"
        end = SimulatedChannel(self, where, address.peers)
        if there is not None and wires.reaches(self.process, there.process):
            there.take(end, None, "hello")
            scheduler.block(end.arrived, timeout, f"{where} to accept a connection")
        elif there is None:
            raise PeerLostError(f"cannot connect to {where}: connection refused")
        else:
            scheduler.sleep(timeout)
        if end.closed:
            raise PeerLostError(f"cannot connect to {where}: it has closed the connection")
        if end.far is None:
            end.closed = True
            raise DeadlineError(f"{where} did not answer the handshake within {timeout:g} s")
        return end

    def _accept(self, asking: SimulatedChannel) -> SimulatedChannel | None:
        other = asking.transport
        if asking.closed or other.closed:
            return None
        end = SimulatedChannel(self, names_of(other.peers), other.peers)
        end.far, asking.far = asking, end
        self.ends[end] = other.ends[asking] = None
        self.wires.scheduler.wake(asking.arrived)
        return end

    # -- serving -------------------------------------------------------------------------------

    def take(self, end: SimulatedChannel, message: Message | None, reason: str) -> None:
        """Put what has arrived into the inbox."""
        self._inbox.append((end, message, reason))
        self.wires.scheduler.wake(self._polling)

    def poll(self, timeout: float) -> list[TransportEvent]:
        """Return what has arrived; wait up to `timeout` virtual seconds for something."""
        if not self._inbox and not self._woken and timeout > 0:
            self.wires.scheduler.block(self._polling, timeout, "messages")
        self._woken = False
        events: list[TransportEvent] = []
        while self._inbox and not self.closed:
            events += self._events(*self._inbox.popleft())
        return events

    def _events(
        self, end: SimulatedChannel, message: Message | None, reason: str
    ) -> list[TransportEvent]:
        if reason == "hello":
            accepted = self._accept(end)
            return [] if accepted is None else [TransportEvent(accepted, None, "opened")]
        if end.closed:
            return []
        if message is None:
            end.closed = True
            self.ends.pop(end, None)
        elif message.payload is not None:
            here, message.payload = message.payload, None
            try:
                target = self.sink(end, message, here.nbytes)
            except ProtocolError as error:
                self.refused += 1
                log.warning("refused %s: %s", end.name, error)
                end.close()
                return [TransportEvent(end, None, f"refused: {error}")]
            if target is not None and address_of(target) != address_of(here):
                copy_bytes(target, here)
            message.payload = target
        return [TransportEvent(end, message, reason)]

    def pump(self) -> None:
        """Do nothing: nothing is pending."""

    def in_use(self, memory: Memory) -> bool:
        """Return False: payloads are copies."""
        return False

    def wake(self) -> None:
        """End a `poll` in progress."""
        self._woken = True
        self.wires.scheduler.wake(self._polling)

    def close(self) -> None:
        """Close every channel."""
        self._shut()
        for end in list(self.ends):
            end.close()

    def _shut(self) -> None:
        """Take no more connections; those that wait to be accepted are refused."""
        self.closed = True
        for end, _, reason in self._inbox:
            if reason == "hello":
                end.closed = True
                self.wires.scheduler.wake(end.arrived)
        self._inbox.clear()

    def die(self, *, silently: bool) -> None:
        """End with the process: some of what it has sent last is lost; `silently`: the other ends are not told."""
        if silently:
            self.closed = True
            for end in self.ends:
                end.closed = True
            return
        for end in list(self.ends):
            if self.wires.dice.random() < 0.5 and end.far is not None:  # what is on its way is lost
                far, end.far = end.far, None
                end.closed = True
                self.wires.scheduler.at(
                    self.wires.arrival(0.0), partial(far.transport.take, far, None, "reset")
                )
        self.close()
