"""The router: the roles of one process on one thread, their messages, and calls from other threads."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from steepest.errors import ProtocolError, ShutdownError
from steepest.messages.message import Message, Peer, Send
from steepest.messages.permissions import Admission
from steepest.tensors.memory import Memory, clone
from steepest.transport.channel import Channel, Event, Transport, overlap

log = logging.getLogger(__name__)
T = TypeVar("T")


class Role(Protocol):
    """A state machine: it is given messages and losses, and sends through the router."""

    def handle(self, source: Peer, message: Message) -> None:
        """Acts on one message.

        Raises:
            ProtocolError: the message makes no sense here; it is counted and dropped.
        """

    def destination(self, message: Message, size: int) -> Memory | None:
        """Where the payload of an arriving message goes (see `steepest.transport.frames.Sink`)."""

    def lost(self, peer: Peer, reason: str) -> None:
        """A peer's channel closed."""

    def tick(self, now: float) -> None:
        """Time has passed; `now` is in seconds, monotonic."""


#: Starts a daemon thread with a body and a name.
StartThread = Callable[[Callable[[], None], str], threading.Thread]


def _start_thread(body: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread


class Router:
    """Delivers messages between the roles of this process and, over a transport, those of others.

    Everything happens on the thread that runs `run`, one thing at a time, so that roles need no
    locks. Other threads use `call`. What comes from another process is checked here, before any
    role sees it: whether its sender is at the other end of the channel, and what `admission` says.

    Args:
        tick_seconds: how often roles are told the time while nothing happens.

    Attributes:
        admission: what is taken from other processes.
        refused: messages and channels that were not.
    """

    def __init__(self, tick_seconds: float = 0.5) -> None:
        self.transport: Transport | None = None
        self.refused = 0
        self.admission = Admission()
        self._tick_seconds = tick_seconds
        self._roles: dict[Peer, Role] = {}
        self._channels: dict[Peer, Channel] = {}
        self._local: deque[Message] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._events: deque[Event] = deque()  # seen, and not delivered yet
        self._ticked = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.finished: Future[None] = Future()

    # -- wiring --------------------------------------------------------------------------------

    def use(self, transport: Transport) -> None:
        """Receive and send over a transport; its sink is `destination`."""
        self.transport = transport

    def admit(self, admission: Admission) -> None:
        """Take from other processes what this admission allows, and nothing else."""
        self.admission = admission

    def host(self, peer: Peer, role: Role) -> None:
        """Makes a role live in this process."""
        self._roles[peer] = role

    def attach(self, channel: Channel) -> None:
        """Makes a channel the way to the roles at its other end.

        It is closed instead, and counted as refused, if it speaks for a role that lives here, for
        one whose channel is open and which has no successors, or for a server that there is not.
        """
        if (why := self._why_not(channel)) is not None:
            self.refused += 1
            log.warning("refused a channel of %s: %s", channel.name, why)
            channel.close()
            return
        for peer in channel.peers:
            self._channels[peer] = channel

    def _why_not(self, channel: Channel) -> str | None:
        """Why a channel may not speak for the peers that it names; None if it may."""
        for peer in channel.peers:
            other = self._channels.get(peer, channel)
            if not self.admission.exists(peer):
                return f"{peer} is not of this job"
            if peer in self._roles or (
                other is not channel and peer.role not in self.admission.succeeded
            ):
                return f"{peer} is connected already"
        return None

    def clear(self) -> None:
        """Forgets every role and all that is on its way, and closes the transport; another one may take its place."""
        if self.transport is not None:
            self.transport.close()
            self.transport = None
        for queue in (self._roles, self._channels, self._local, self._events):
            queue.clear()

    def channel(self, peer: Peer) -> Channel | None:
        """The channel to a peer, or None when it lives here or is unknown."""
        return self._channels.get(peer)

    def sender(self, source: Peer) -> Send:
        """The `send` of one role."""

        def send(target: Peer, message: Message) -> None:
            message.source, message.target = source, target
            if target in self._roles:
                self._local.append(message)
                return
            channel = self._channels.get(target)
            if channel is None:
                log.debug("%s for %s, who is gone, dropped", message.kind.name, target)
                return
            channel.send(message)

        return send

    def destination(self, channel: Channel, message: Message, size: int) -> Memory | None:
        """The sink of this process' transport: asks the role that the message is for.

        What it returns is overwritten before the message is delivered, so the sender is checked
        here already.

        Raises:
            ProtocolError: nobody here takes the payload, from that sender or at all.
        """
        assert message.target is not None
        self._check_arriving(channel, message)
        role = self._roles.get(message.target)
        if role is None:
            raise ProtocolError(f"{message.kind.name} for {message.target}, who does not live here")
        self.admission.check(message)
        message.admitted = True
        try:
            return role.destination(message, size)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"{message.kind.name} that makes no sense: {error}") from error

    def own_pending(self, memory: Memory) -> None:
        """Copies what has not left yet of that memory (flat, uint8), so that it may change."""
        for channel in set(self._channels.values()):
            if channel.pending:
                channel.own_pending(memory)
        for message in self._local:
            if message.payload is not None and overlap(message.payload, memory):
                message.payload = clone(message.payload)

    def in_use(self, memory: Memory) -> bool:
        """Whether that memory (flat, uint8) must not change: somebody may be reading it, or has yet to be sent it."""
        if any(
            message.payload is not None and overlap(message.payload, memory)
            for message in self._local
        ):
            return True
        return self.transport is not None and self.transport.in_use(memory)

    def pump(self) -> None:
        """Sends what can be sent now; for use in the middle of a long computation, or before it."""
        if self.transport is not None:
            self.transport.pump()

    def pump_both_ways(self) -> None:
        """Receives, too, where nothing that may come is written to what the computation uses; delivers it later."""
        if self.transport is not None:
            self.transport.pump()
            self._events.extend(self.transport.poll(0.0))

    # -- running -------------------------------------------------------------------------------

    def turn(self, timeout: float) -> None:
        """Runs queued calls, delivers what is there, and waits up to `timeout` seconds for more."""
        self._run_calls()
        self._deliver_local()
        if self.transport is None:
            return
        if not self._events:
            self._events.extend(self.transport.poll(0.0 if self._calls or self._local else timeout))
        while self._events:  # a role may call `wait`, which goes on with those that are left
            channel, message, reason = self._events.popleft()
            if message is not None:
                self._receive(channel, message)
                self._deliver_local()
            elif reason == "opened":
                self.attach(channel)
            else:
                self._lose(channel, reason)
        self._deliver_local()

    def _deliver_local(self) -> None:
        while self._local:
            self._dispatch(self._local.popleft())

    def _receive(self, channel: Channel, message: Message) -> None:
        """Delivers what another process sent, if it may."""
        try:
            self._check_source(channel, message)
            if not message.admitted:
                self.admission.check(message)
        except ProtocolError as error:
            self._refuse(message, str(error))
        else:
            self._dispatch(message)

    def _check_source(self, channel: Channel, message: Message) -> None:
        """Whether a channel speaks for a peer: it said so when it was opened, and was not refused."""
        source = message.source
        if source is None or source not in channel.peers:
            raise ProtocolError(f"{channel.name} speaks for another")
        if (
            self._channels.get(source) is not channel
            and source.role not in self.admission.succeeded
        ):
            raise ProtocolError(f"{channel.name} is not the {source} that is connected")

    def _check_arriving(self, channel: Channel, message: Message) -> None:
        """As `_check_source`, of a channel whose opening may have been seen and not been delivered yet."""
        source = message.source
        if source is not None and source in channel.peers and source not in self._channels:
            if (why := self._why_not(channel)) is not None:
                raise ProtocolError(why)
        else:
            self._check_source(channel, message)

    def _dispatch(self, message: Message) -> None:
        assert message.source is not None
        assert message.target is not None
        role = self._roles.get(message.target)
        try:
            if role is None:
                raise ProtocolError(f"{message.target} does not live here")
            role.handle(message.source, message)
        except ProtocolError as error:
            self._refuse(message, str(error))
        except (KeyError, TypeError, ValueError, IndexError):
            if message.source in self._roles or message.source.role == "coordinator":
                raise  # a decision that cannot be carried out, or a defect here: not something to go on after
            log.exception("%s from %s makes no sense", message.kind.name, message.source)
            self._refuse(message, "see above")

    def _refuse(self, message: Message, reason: str) -> None:
        self.refused += 1
        log.warning("refused %s from %s: %s", message.kind.name, message.source, reason)

    def _lose(self, channel: Channel, reason: str) -> None:
        for peer in channel.peers:
            if self._channels.get(peer) is channel:
                del self._channels[peer]
                for role in list(self._roles.values()):
                    role.lost(peer, reason)

    def run(self) -> None:
        """Serves until `stop`; what a role raises ends it, and is raised here."""
        while not self._stopping.is_set():
            self._turn_and_tick()

    def wait(self, timeout: float = math.inf) -> None:
        """One turn in the middle of a role's work, when it cannot go on; it is handed messages meanwhile.

        Args:
            timeout: in seconds; it ends after a tick in any case.

        Raises:
            ShutdownError: `stop` was called.
        """
        if self._stopping.is_set():
            raise ShutdownError("the process is shut down")
        self._turn_and_tick(
            0.0 if self._local else timeout
        )  # what lies here may be what it waits for

    def _turn_and_tick(self, timeout: float = math.inf) -> None:
        self.turn(min(timeout, self._tick_seconds))
        now = time.monotonic()
        if now - self._ticked >= self._tick_seconds:
            self._ticked = now
            self.tick(now)

    def tick(self, now: float) -> None:
        """Tells every role the time, in seconds."""
        for role in list(self._roles.values()):
            role.tick(now)

    def start(self, name: str, start_thread: StartThread = _start_thread) -> None:
        """Runs in a thread of its own; `finished` tells how that ended.

        Args:
            name: of the thread.
            start_thread: starts one.
        """

        def body() -> None:
            try:
                self.run()
            except BaseException as error:  # noqa: BLE001 - carried to whoever waits on `finished`
                self._end(error)
            else:
                self._end(None)

        self._thread = start_thread(body, name)

    def _end(self, error: BaseException | None) -> None:
        self._stopping.set()
        if self.transport is not None:
            self.transport.close()
        if error is None:
            self.finished.set_result(None)
        else:
            self.finished.set_exception(error)
        self._run_calls()  # each fails; those that come later are run by `call`

    def _run_calls(self) -> None:
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while self._calls:
                self.pump()  # a call may take long, and others wait for what was said before it
                self._calls.popleft()()

    def stop(self, timeout: float = 10.0) -> None:
        """Ends `run` and waits for its thread."""
        self._stopping.set()
        if self.transport is not None:
            self.transport.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Has a function run on the router's thread; the future holds what it returns or raises."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._stopping.is_set():
                future.set_exception(ShutdownError("the process is shut down"))
                return
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised again by the caller
                future.set_exception(error)

        self._calls.append(run)
        if self._stopping.is_set() and self.finished.done():
            self._run_calls()
        elif self.transport is not None:
            self.transport.wake()
        return future
