"""The router: the roles of one process on one thread, their messages, calls from other threads."""

from __future__ import annotations

import _thread
import contextlib
import logging
import math
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Protocol, TypeVar

from steepest.core.messages.message import Message, Peer, Send
from steepest.core.messages.permissions import MessageCheck
from steepest.core.messages.snapshots import Refused
from steepest.core.status import Status
from steepest.core.system import system
from steepest.core.tensors.memory import Memory, clone
from steepest.core.transport.channel import Channel, Transport, TransportEvent, overlap
from steepest.errors import ProtocolError, ShutdownError, SteepestError, describe_stack

log = logging.getLogger(__name__)
_LOCAL_SECONDS = 0.002  # of messages between roles of one process, before other processes' are read
_LOST_PEERS = 1024
_MOST_REASON = 2000  # characters of the reason why a request is refused
_LOOKS = 3  # attempts to read the state of a role that works meanwhile
T = TypeVar("T")


class Role(Protocol):
    """A state machine: it receives messages, lost peers and the time, and sends through the router.

    Its methods are called on the router's thread, one at a time.
    """

    def handle(self, source: Peer, message: Message) -> None:
        """Act on one message.

        Args:
            source: the role that sent it; the router has checked that it may send such a message.
            message: with its payload, if it has one and `destination` did not discard it.

        Raises:
            Exception: the message cannot be handled: it is counted and dropped, and a client is sent the reason. Other
                errors than `ProtocolError` are logged with their traceback; if the message came from the coordinator
                or from a role of this process, they end the router.
        """

    def destination(self, message: Message, size: int) -> Memory | None:
        """Return the memory for an arriving payload of `size` bytes; None to discard it.

        A payload that `message` has already is lent: it lies in the sender's memory, and may be
        returned to leave it there.

        Raises:
            Exception: the role takes no such payload, or has no memory for it: the channel is closed.
        """

    def lost(self, peer: Peer, reason: str) -> None:
        """Act on the loss of a peer, whose channel has closed.

        Args:
            peer: each role at the other end of the channel, in a call of its own.
            reason: in words.
        """

    def tick(self, now: float) -> None:
        """Act on the passing of time; `now` is in seconds, monotonic."""

    def doing(self) -> Status:
        """Return what the role does or waits for, and for how long.

        Called on any thread while the role works: it must change nothing, and may raise if it reads
        a half-made change.
        """


#: Starts a daemon thread, given its body and its name, and returns it.
StartThread = Callable[[Callable[[], None], str], Thread]


#: For a router's thread that waits while another thread runs in its turn: returns that thread's identifier.
runs_in_turn: dict[int, Callable[[], int | None]] = {}


class Router:
    """The delivery of messages between the roles of this process and those of other processes.

    All of it happens on the thread that runs `run`, one thing at a time, so that roles need no
    locks; other threads use `call`. A message of another process is checked before it reaches a
    role: whether its sender is at the other end of the channel, and whether `admission` allows it.

    Args:
        tick_seconds: seconds between two ticks of the roles while no messages come.
    """

    def __init__(self, tick_seconds: float = 0.5) -> None:
        # the channels to other processes; None before `use` and after `clear`
        self.transport: Transport | None = None
        self.refused = 0  # number of messages and channels that were refused
        # the last peers whose channels have closed; may be read on any thread
        self.lost_peers: deque[Peer] = deque(maxlen=_LOST_PEERS)
        self.admission = MessageCheck()  # the check of messages and channels of other processes
        self._tick_seconds = tick_seconds
        self._roles: dict[Peer, Role] = {}
        self._channels: dict[Peer, Channel] = {}
        self._local: deque[Message] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._events: deque[TransportEvent] = deque()  # of the transport, not delivered yet
        self._later: deque[Callable[[], None]] = deque()  # to be called when nothing is to be done
        self._ticked = 0.0
        self._on_role: Callable[[Peer, Role], None] | None = None
        self._now = system().now
        self._stopping = system().event()
        self._why = "the process is shut down"  # nothing can be done, once `_stopping` is set
        self._thread: Thread | None = None
        self._ident = 0  # of that thread
        # holds None when `run` has ended after `stop`, or the exception that ended it
        self.finished: Future[None] = Future()
        _routers.add(self)

    # -- wiring --------------------------------------------------------------------------------

    def use(self, transport: Transport) -> None:
        """Receive and send over a transport, whose sink is `destination`; the one used before is closed."""
        if self.transport is not None and self.transport is not transport:
            self.transport.close()
        self.transport = transport

    def admit(self, admission: MessageCheck) -> None:
        """Accept from other processes only messages that this check allows."""
        self.admission = admission

    def host(self, peer: Peer, role: Role) -> None:
        """Deliver the messages for `peer` to a role in this process from now on."""
        self._roles[peer] = role
        if self._on_role is not None:
            self._on_role(peer, role)

    def attend(self, on_role: Callable[[Peer, Role], None] | None) -> None:
        """Have a function called with each role of this process, and with those that are hosted later."""
        self._on_role = on_role
        if on_role is not None:
            for peer, role in self._roles.items():
                on_role(peer, role)

    def attach(self, channel: Channel) -> None:
        """Send messages for the roles at a channel's other end over that channel from now on.

        The channel is closed instead, and counted as refused, if it names a role that lives here, a
        role that has an open channel and can have no successor, or a server that the job does not
        have.
        """
        if (why := self._why_not(channel)) is not None:
            self.refused += 1
            log.warning("refused a channel of %s: %s", channel.name, why)
            channel.close()
            return
        for peer in channel.peers:
            self._channels[peer] = channel
            if peer in self.lost_peers:  # its successor
                self.lost_peers.remove(peer)

    def _why_not(self, channel: Channel) -> str | None:
        """Return why a channel may not speak for the peers that it names; None if it may."""
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
        """Forget all roles, messages and events, and close the transport; another one can be used afterwards."""
        if self.transport is not None:
            self.transport.close()
            self.transport = None
        for queue in (self._roles, self._channels, self._local, self._events, self._later):
            queue.clear()
        self.lost_peers.clear()

    def channel(self, peer: Peer) -> Channel | None:
        """Return the channel to a peer; None when the peer lives here or has no channel."""
        return self._channels.get(peer)

    def sender(self, source: Peer) -> Send:
        """Return the function by which a role sends; it never blocks.

        A message for a role in this process is queued; one for a peer without a channel is dropped.
        """

        def send(target: Peer, message: Message) -> None:
            message.source, message.target = source, target
            if target in self._roles:
                self._local.append(message)
                return
            channel = self._channels.get(target)
            if channel is None:
                log.debug("dropped %s for %s, which has no channel", message.kind.name, target)
                return
            channel.send(message)

        return send

    def destination(self, channel: Channel, message: Message, size: int) -> Memory | None:
        """Return the memory for an arriving payload, as the receiving role chooses it.

        This is the sink of the transport. The memory is overwritten before the message is
        delivered, so the sender is checked here already.

        Args:
            channel: on which the payload arrives.
            message: without its payload, unless it is lent.
            size: of the payload, in bytes.

        Raises:
            ProtocolError: no role here takes the payload, from that sender or at all.
        """
        assert message.target is not None
        self._check_arriving(channel, message)
        role = self._roles.get(message.target)
        if role is None:
            raise ProtocolError(f"{message.kind.name} for {message.target}, which is not here")
        self.admission.check(message)
        try:
            return role.destination(message, size)
        except ProtocolError:
            raise
        except Exception as error:  # such as no memory for it
            raise ProtocolError(
                f"{message.kind.name} of {size} bytes that makes no sense: {error}"
            ) from error

    def own_pending(self, memory: Memory) -> None:
        """Copy payloads in this memory (flat, uint8) that have not left yet; the memory may change afterwards."""
        for channel in dict.fromkeys(self._channels.values()):
            if channel.pending:
                channel.own_pending(memory)
        for message in self._local:
            if message.payload is not None and overlap(message.payload, memory):
                message.payload = clone(message.payload)

    def drop_arriving(self, memory: Memory) -> None:
        """Stop channels from writing to this memory (flat, uint8), see `Channel.drop_arriving`."""
        for channel in dict.fromkeys(self._channels.values()):
            channel.drop_arriving(memory)

    def in_use(self, memory: Memory) -> bool:
        """Return whether this memory (flat, uint8) must not change: a peer may read it, or some of it is to be sent."""
        if any(
            message.payload is not None and overlap(message.payload, memory)
            for message in self._local
        ):
            return True
        return self.transport is not None and self.transport.in_use(memory)

    def pump(self) -> None:
        """Send queued bytes without waiting; for use before or during a long computation."""
        if self.transport is not None:
            self.transport.pump()

    def when_idle(self, function: Callable[[], None]) -> None:
        """Have a function called once, when all messages that are here have been delivered.

        It is called on this thread before it waits for further messages, or by `finish`.
        """
        self._later.append(function)

    def finish(self) -> None:
        """Call the functions given to `when_idle`, and send queued bytes.

        For use before a long computation, so that no other process waits for them meanwhile.
        """
        while self._later:
            self._later.popleft()()
        self.pump()

    def pump_both_ways(self) -> None:
        """Send and receive without waiting; messages that come are delivered in the next turn.

        For use during a computation that reads no memory into which payloads may arrive.
        """
        if self.transport is not None:
            self.transport.pump()
            self._events.extend(self.transport.poll(0.0))

    # -- running -------------------------------------------------------------------------------

    def turn(self, timeout: float) -> None:
        """Run queued calls, deliver messages, and wait up to `timeout` seconds for more of them.

        After a call it does not wait: the call's result may be what a role in `wait` needs.
        """
        timeout = 0.0 if self._run_calls() else timeout
        self._deliver_local()
        if self.transport is None:
            return
        if self._later and not self._events:
            self._events.extend(self.transport.poll(0.0))
            if not (self._events or self._calls or self._local):
                self.finish()
        if not self._events:
            self._events.extend(self.transport.poll(0.0 if self._calls or self._local else timeout))
        while self._events:  # a role may call `wait`, which takes further events
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
        """Deliver the messages between roles of this process; after a while leave those to workers.

        If one process has all roles, each step of a worker leads to messages that let it take the next one, as long as
        steps are granted: other processes' messages have to be read in between. Messages to coordinator and servers
        are always delivered, so that these agree.
        """
        if not self._local:
            return
        until = self._now() + _LOCAL_SECONDS
        while self._local:
            at = 0
            if self.transport is not None and self._now() > until:
                targets = (message.target for message in self._local)
                others = (i for i, peer in enumerate(targets) if peer and peer.role != "worker")
                if (at := next(others, -1)) < 0:
                    return
            message = self._local[at]
            del self._local[at]
            self._dispatch(message)

    def _receive(self, channel: Channel, message: Message) -> None:
        """Deliver a message of another process, or count it as refused if a check fails."""
        try:
            self._check_source(channel, message)
        except ProtocolError as error:
            self._count(message, str(error))
            return
        try:
            self.admission.check(message)
        except ProtocolError as error:
            self._refuse(message, str(error))
        else:
            self._dispatch(message)

    def _check_source(self, channel: Channel, message: Message) -> None:
        """Check that a message's source is at the other end of the channel, and accepted; ProtocolError otherwise."""
        source = message.source
        if source is None or source not in channel.peers:
            raise ProtocolError(f"{channel.name} sends as {source}")
        if (
            self._channels.get(source) is not channel
            and source.role not in self.admission.succeeded
        ):
            raise ProtocolError(f"{channel.name} is not the {source} that is connected")

    def _check_arriving(self, channel: Channel, message: Message) -> None:
        """Check as `_check_source`, for a channel that may have opened and not been attached yet."""
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
                raise ProtocolError(f"{message.target} is not here")
            role.handle(message.source, message)
        except ProtocolError as error:
            self._refuse(message, str(error))
        except Exception as error:
            if (
                isinstance(error, SteepestError)  # such as that the router stops
                or message.source in self._roles
                or message.source.role == "coordinator"
            ):
                # A decision that cannot be carried out, or a defect of this process, which ends.
                raise
            log.exception("%s from %s makes no sense", message.kind.name, message.source)
            self._refuse(message, f"it makes no sense: {error!r}")

    def _refuse(self, message: Message, reason: str) -> None:
        """Count a message that its source has sent, and tell a client, which waits for an answer."""
        self._count(message, reason)
        source, target = message.source, message.target
        assert source is not None
        assert target is not None
        if source.role == "client" and target in self._roles:
            refused = Refused(self.admission.number(message), reason[:_MOST_REASON])
            self.sender(target)(source, refused.pack())

    def _count(self, message: Message, reason: str) -> None:
        self.refused += 1
        log.warning("refused %s from %s: %s", message.kind.name, message.source, reason)

    def _lose(self, channel: Channel, reason: str) -> None:
        for peer in channel.peers:
            if self._channels.get(peer) is channel:
                del self._channels[peer]
                self.lost_peers.append(peer)
                for role in list(self._roles.values()):
                    role.lost(peer, reason)

    def run(self) -> None:
        """Take turns until `stop` is called; an exception of a role ends it, and is raised here."""
        while not self._stopping.is_set():
            self._turn_and_tick()

    def wait(self, timeout: float = math.inf) -> None:
        """Take one turn in the middle of a role's work, which needs more messages to go on.

        The role receives messages meanwhile.

        Args:
            timeout: in seconds; the turn ends after a tick in any case.

        Raises:
            ShutdownError: `stop` was called.
        """
        if self._stopping.is_set():
            raise ShutdownError(self._why)
        # The role may be waiting for a message of a role in this process.
        self._turn_and_tick(0.0 if self._local else timeout)

    def _turn_and_tick(self, timeout: float = math.inf) -> None:
        self.turn(min(timeout, self._tick_seconds))
        now = self._now()
        if now - self._ticked >= self._tick_seconds:
            self._ticked = now
            self.tick(now)

    def tick_within(self, seconds: float) -> None:
        """Let at most `seconds` pass between two ticks while no messages come."""
        self._tick_seconds = min(self._tick_seconds, seconds)

    def tick(self, now: float) -> None:
        """Call every role's `tick` with the time, in seconds."""
        for role in list(self._roles.values()):
            role.tick(now)

    def start(self, name: str, start_thread: StartThread | None = None) -> None:
        """Call `run` in a thread of that name, started by `start_thread` if given; `finished` holds its outcome."""

        def body() -> None:
            self._ident = _thread.get_ident()  # that of the frames, in a simulation too
            try:
                self.run()
            except BaseException as error:  # noqa: BLE001 - raised by `finished.result()`
                self._end(error)
            else:
                self._end(None)

        self._thread = (start_thread or system().start)(body, name)

    def where(self, *, whole: bool = False) -> str:
        """Return the stack of the router's thread, whole or only users' code, as text; any thread may call this."""
        ident = runs_in_turn.get(self._ident, lambda: None)() or self._ident
        frame = sys._current_frames().get(ident)
        return "" if frame is None else describe_stack(frame, whole=whole)

    def doing(self) -> list[tuple[Peer, Status]]:
        """Return what each role does or waits for, see `Role.doing`; any thread may call this."""
        statuses = [(peer, _doing(role)) for peer, role in list(self._roles.items())]
        return [(peer, status) for peer, status in statuses if status.words]

    @property
    def busy(self) -> float:
        """Seconds since the router's thread last looked at the time; within `tick_seconds` if idle."""
        return self._now() - self._ticked if self._ticked else 0.0

    def _end(self, error: BaseException | None) -> None:
        self._stopping.set()
        if self.transport is not None:
            self.transport.close()
        if error is None:
            self.finished.set_result(None)
        else:
            self.finished.set_exception(error)
        self._run_calls()  # each fails; calls made later are run by `call`

    def _run_calls(self) -> bool:
        """Run queued calls; return whether there were any."""
        any_ran = False
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while self._calls:
                self.pump()  # a call may take long, and peers wait for messages sent before it
                self._calls.popleft()()
                any_ran = True
        return any_ran

    def stop(self, timeout: float = 10.0) -> None:
        """End `run`, and wait for its thread up to `timeout` seconds; any thread may do this."""
        self._stopping.set()
        if self.transport is not None:
            self.transport.wake()
        if self._thread is not None and self._thread is not system().current():
            self._thread.join(timeout)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have a function run on the router's thread; return its future. Any thread may do this.

        ShutdownError if `stop` was called before it ran.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._stopping.is_set():
                future.set_exception(ShutdownError(self._why))
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

    def leave(self) -> None:
        """Make every call raise ShutdownError; used in a forked child, which has no connection.

        The router's thread exists only in the parent process, and locks may be held.
        """
        self._why = (
            "this process was forked from one that takes part in a job, and has none of its "
            "connections: do this in that process, not in a DataLoader worker, say"
        )
        self.transport, self._channels = None, {}
        self._calls, self._local, self._events = deque(), deque(), deque()
        self._thread = None
        self._stopping, self.finished = system().event(), Future()
        self._stopping.set()
        self.finished.set_exception(ShutdownError(self._why))


def _doing(role: Role) -> Status:
    """Return what a role does; its state may change while it is read."""
    error: Exception | None = None
    for _ in range(_LOOKS):
        try:
            return role.doing()
        except Exception as changed:  # noqa: BLE001 - whatever a half-made change raises
            error = changed
    return Status(f"cannot be asked: {error!r}")


_routers: weakref.WeakSet[Router] = weakref.WeakSet()


def _leave_all() -> None:
    """Leave the routers to the process that this one was forked from."""
    for router in list(_routers):
        router.leave()


os.register_at_fork(after_in_child=_leave_all)
