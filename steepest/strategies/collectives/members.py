"""A collective over a process' channels: one member is a role of its process' router."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from steepest.core.messages.message import Message, Peer, member_peer
from steepest.core.status import Status
from steepest.core.system import system
from steepest.core.tensors.allocator import Recycler
from steepest.core.tensors.memory import as_tensor
from steepest.core.tensors.shared_memory import allocate, segment_of
from steepest.core.transport.channel import Channel
from steepest.core.transport.router import Router
from steepest.errors import ConfigurationError, DeadlineError, PeerLostError, ProtocolError
from steepest.strategies.collectives.messages import (
    MEMBERS,
    Abort,
    Connected,
    Data,
    MemberKind,
    Part,
)
from steepest.strategies.collectives.protocol import Collective, check_message

_MOST_ROUNDS = 1024
_TAKEN = (MemberKind.DATA, MemberKind.CONNECTED, MemberKind.ABORT, MemberKind.PART)
_ABORT_SECONDS = 1.0  # in which a member that waits answers one that connects to tell it of an end


@dataclass
class _Round:
    """The messages between the members within one call, or within one generation, and of no other."""

    # sent and awaited: number of messages so far, by member
    sent: Counter[int] = field(default_factory=Counter)
    awaited: Counter[int] = field(default_factory=Counter)
    # receipts of messages to come, by member and number
    posted: dict[tuple[int, int], ReceiveWork] = field(default_factory=dict)
    # payloads for which there is no receipt yet, and what they are, by member and number
    arrived: dict[tuple[int, int], tuple[torch.Tensor, str]] = field(default_factory=dict)
    aborted: str = ""  # why the round was aborted; empty if it was not


class ReceiveWork:
    """A message of `nbytes` that a member awaits from the one of rank `source`; `what`: its contents, in words.

    Args:
        memory: flat uint8 to which it is written, or None to leave it where it lies.
    """

    def __init__(
        self,
        member: MemberCollective,
        source: int,
        nbytes: int,
        memory: torch.Tensor | None,
        what: str,
    ) -> None:
        self._member, self._source, self._nbytes, self._what = member, source, nbytes, what
        self.memory = memory
        self.payload: torch.Tensor | None = None
        self._sent = ""  # what has come, in words

    def receive(self, payload: torch.Tensor, what: str) -> None:
        """Keep the payload that has come, and the description of it."""
        self._sent = what
        if (
            self.memory is not None
            and self.memory is not payload
            and self.memory.numel() == payload.numel()
        ):
            payload = self.memory.copy_(payload)
        self.payload = payload

    def wait(self) -> None:
        """Return when the message is here; errors as for `bytes`."""
        self.bytes()

    def bytes(self) -> torch.Tensor:
        """Return the payload, flat uint8, when it is here; ConfigurationError: it is not what is awaited.

        others: see `Collective`.
        """
        self._member.until(lambda: self.payload is not None, "a message", self._source)
        assert self.payload is not None
        check_message(self._source, self._sent, self._member.rank, self._what)
        if self.payload.numel() != self._nbytes:
            raise ConfigurationError(
                f"member {self._source} sent {self.payload.numel()} bytes where member "
                f"{self._member.rank} awaits {self._nbytes}: both must give tensors of one shape "
                "and dtype, and call the same operations"
            )
        return self.payload


class _SendWork:
    """A message that leaves."""

    def __init__(self, member: MemberCollective, to: int, payload: torch.Tensor) -> None:
        self._member, self._to, self._payload = member, to, payload

    def wait(self) -> None:
        """Return when all of it has left."""
        self._member.until(
            lambda: self._member.has_left(self._payload, self._to), "taking a message", self._to
        )


class MemberCollective(Collective):
    """A `Collective` whose members are roles: messages travel over the channels of their processes.

    Everything happens on the router's thread; a wait turns the router. A member connects to those
    of lower rank at its first message to or from them, and those of higher rank connect to it; an
    open channel is used.

    Args:
        rank, size, deadline: see `Collective`.
        router: of this process; the role `member_peer(rank)` is hosted on it here.
        connect: opens a channel to the process of a member of lower rank, within some seconds.
        generation: returns the present membership; when it changes, operations in progress end with
            `PeerLostError`, and the collective works again.
        one_host: whether all members share a host and lend each other memory.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        router: Router,
        deadline: float,
        connect: Callable[[int, float], Channel] | None = None,
        *,
        generation: Callable[[], int] = lambda: 0,
        one_host: bool = False,
    ) -> None:
        super().__init__(rank, size, deadline)
        self.one_host = one_host
        self._router = router
        self._connect = connect
        self._generation = generation
        self._call = 0  # number of the call in progress, 0 between calls
        self._last_call = 0
        self._rounds: dict[tuple[int, int], _Round] = {}
        self._unsent: dict[int, list[Message]] = {}  # to members of higher rank, until they connect
        self._lending_buffers: dict[int, torch.Tensor] = {}
        self._results = Recycler()
        self._lost = ""
        self.take_part: Callable[[Part, Any], None] | None = None  # is given what `tell` sends here
        self._deliver = router.sender(member_peer(rank))
        router.host(member_peer(rank), self)
        router.admission.allow(MEMBERS)

    @contextlib.contextmanager
    def call(self, number: int) -> Iterator[None]:
        """Return a context for one call of the user's; numbers rise, and are the same on all members.

        Its messages are not mistaken for those of another call.
        """
        before, self._call = self._call, number
        try:
            yield
        finally:
            self._call, self._last_call = before, max(self._last_call, number)
            self._rounds.pop((0, number), None)

    def abandon(self, number: int, reason: str) -> None:
        """End the operations of a call that are, or will be, in progress here; `reason`: for the member that waits."""
        if number > self._last_call:
            self._round((0, number)).aborted = reason

    # -- messages ------------------------------------------------------------------------------

    def _key(self) -> tuple[int, int]:
        return (0, self._call) if self._call else (self._generation(), 0)

    def _over(self, key: tuple[int, int]) -> bool:
        generation, call = key
        return 0 < call <= self._last_call if call else generation < self._generation()

    def _round(self, key: tuple[int, int] | None = None) -> _Round:
        key = self._key() if key is None else key
        here = self._rounds.get(key)
        if here is None:
            for old in [old for old in self._rounds if self._over(old)]:
                del self._rounds[old]
            here = self._rounds[key] = _Round()
        return here

    def _send(self, memory: torch.Tensor, to: int, what: str) -> _SendWork:
        if segment_of(memory) is not None:
            memory = memory.clone()  # otherwise it would be lent, and might be kept for long
        self._post(memory, to, what)
        self._router.pump()  # the caller may compute before it waits
        return _SendWork(self, to, memory)

    def lend(self, memory: torch.Tensor, to: int) -> None:
        """Send bytes that the receiver may read where they lie, unchanged until it is known to be done with them."""
        self._post(memory, to, self._named(memory), lent=True)

    def borrow(self, nbytes: int, source: int) -> ReceiveWork:
        """Receive the next message, sent with `lend`, whose `bytes` are not to be written to."""
        return self._await(
            source, nbytes, None, self._named(torch.empty(nbytes, dtype=torch.uint8))
        )

    def lending_buffer(self, number: int, nbytes: int) -> torch.Tensor:
        """Return memory `number` to lend from, the same each time; no other member may be reading it any more."""
        if number not in self._lending_buffers or self._lending_buffers[number].numel() < nbytes:
            # Few sizes: readers keep each segment mapped.
            self._lending_buffers[number] = allocate(1 << (nbytes - 1).bit_length())
        return self._lending_buffers[number][:nbytes]

    def result(self, nbytes: int) -> torch.Tensor:
        """Return uninitialised memory, flat uint8, for the result of a call; used again when no view of it is left.

        Few sizes, so that little memory is kept.
        """
        return as_tensor(self._results.empty(1 << (nbytes - 1).bit_length()))[:nbytes]

    def drop_lending_buffers(self) -> None:
        """Drop the memory of `lending_buffer`, because another member may be reading there."""
        self._lending_buffers.clear()

    def pump(self) -> None:
        """Send messages that wait to leave together."""
        self._router.pump()

    def _receive(self, memory: torch.Tensor, source: int, what: str) -> ReceiveWork:
        return self._await(source, memory.numel(), memory, what)

    def _post(self, memory: torch.Tensor, to: int, what: str, *, lent: bool = False) -> None:
        key = self._key()
        here = self._round()
        self._raise_if_over(key, here)
        number = here.sent[to]
        here.sent[to] += 1
        generation, call = key
        self._reach(to)
        self._put(to, Data(generation, number, call, lent, what).pack(memory))

    def _put(self, to: int, message: Message) -> None:
        if self._router.channel(member_peer(to)) is None:
            self._unsent.setdefault(to, []).append(message)
        else:
            self._deliver(member_peer(to), message)

    def _await(
        self, source: int, nbytes: int, memory: torch.Tensor | None, what: str
    ) -> ReceiveWork:
        here = self._round()
        self._raise_if_over(self._key(), here)
        place = source, here.awaited[source]
        here.awaited[source] += 1
        receipt = ReceiveWork(self, source, nbytes, memory, what)
        if place in here.arrived:
            receipt.receive(*here.arrived.pop(place))
        else:
            here.posted[place] = receipt
            self._reach(source)
        return receipt

    def _reach(self, other: int, seconds: float | None = None) -> None:
        """Connect to a member of lower rank, if there is no channel, within its deadline or so many seconds."""
        if (
            other < self.rank
            and self._connect is not None
            and self._router.channel(member_peer(other)) is None
        ):
            self._router.pump()  # others may wait for earlier messages while this member connects
            self._router.attach(self._connect(other, self.deadline if seconds is None else seconds))
            # The other member sends what it has kept for this one.
            self._deliver(member_peer(other), Connected().pack())
            self._router.pump()

    def has_left(self, memory: torch.Tensor, to: int) -> bool:
        """Return whether the memory of a message to a member may be written to again."""
        if any(message.payload is memory for message in self._unsent.get(to, ())):
            return False
        if self._router.in_use(memory):
            self._router.pump()
        return not self._router.in_use(memory)

    def tell(self, to: int, part: Part, payload: torch.Tensor | None) -> None:
        """Send a part of a gathering, whatever generation or call is in progress.

        PeerLostError, DeadlineError: the member cannot be reached now.
        """
        self._reach(to)
        self._put(to, part.pack(payload))
        self._router.pump()

    def until(self, condition: Callable[[], bool], what: str, other: int) -> None:
        """Run the router until a condition holds that depends on another member, which errors name.

        Raises:
            DeadlineError: it takes too long.
            PeerLostError: a member is dead, the collective was aborted, or a new generation has begun.
        """
        key, limit = self._key(), system().now() + self.deadline
        here = self._round()
        while not condition():
            self._raise_if_over(key, here)
            left = limit - system().now()
            if left <= 0:
                raise DeadlineError(
                    f"member {self.rank} waited {self.deadline:g} s in vain for {what} by member "
                    f"{other}"
                )
            self._router.wait(left)

    def _raise_if_over(self, key: tuple[int, int], here: _Round) -> None:
        if self._lost or here.aborted:
            raise PeerLostError(self._lost or f"the collective was aborted: {here.aborted}")
        if self._over(key):
            raise PeerLostError("the step was given up: a new generation has begun")

    def abort(self, reason: str) -> None:
        """End every operation in progress, here and at the other members.

        Those that wait in one answer at once when this member connects; others are told nothing.
        """
        self._round().aborted = reason
        for other in self._others():
            with contextlib.suppress(PeerLostError, DeadlineError, ProtocolError):
                self._reach(other, min(self.deadline, _ABORT_SECONDS))
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        generation, call = self._key()
        for other in self._others():
            self._put(other, Abort(generation, call, reason[:1000]).pack())
        self._router.pump()

    # -- Role ----------------------------------------------------------------------------------

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Return the memory of an arriving payload: the tensor that awaits it, or new memory."""
        assert message.source is not None
        if message.kind is MemberKind.PART:
            return torch.empty(size, dtype=torch.uint8)
        if message.kind is not MemberKind.DATA:
            raise ProtocolError(f"a member takes no payload of {message.kind.name}")
        data: Data = message.body
        if data.lent and message.payload is not None:
            return as_tensor(message.payload)
        key = data.generation, data.call
        here = self._rounds.get(key)
        receipt = (
            here.posted.get((message.source.index, data.sequence)) if here is not None else None
        )
        if (
            receipt is None
            or receipt.memory is None
            or receipt.memory.numel() != size
            or self._over(key)
        ):
            return torch.empty(size, dtype=torch.uint8)
        return receipt.memory

    def handle(self, source: Peer, message: Message) -> None:
        """Act on one message: keep its payload, or end what it aborts.

        Raises:
            ProtocolError: it comes from no member, or from one that is too far ahead.
        """
        if source.role != "member" or message.kind not in _TAKEN:
            raise ProtocolError(f"{message.kind.name} from {source} at a member")
        if not 0 <= source.index < self.size:
            raise ProtocolError(f"{source} is none of {self.size} members")
        for kept in self._unsent.pop(source.index, ()):
            self._deliver(source, kept)
        if message.kind is MemberKind.CONNECTED:
            return
        if message.kind is MemberKind.PART:
            if self.take_part is not None:
                self.take_part(message.body, message.payload)
            return
        key = message.body.generation, message.body.call
        if self._over(key):
            return
        if key not in self._rounds and len(self._rounds) >= _MOST_ROUNDS:
            raise ProtocolError(
                f"{source} is {_MOST_ROUNDS} calls or generations ahead of member {self.rank}"
            )
        here = self._round(key)
        if message.kind is MemberKind.ABORT:
            here.aborted = here.aborted or message.body.reason
        elif message.payload is not None:
            data: Data = message.body
            place = source.index, data.sequence
            if place in here.posted:
                here.posted.pop(place).receive(message.payload, data.what)
            else:
                here.arrived[place] = message.payload, data.what

    def lost(self, peer: Peer, reason: str) -> None:
        """Fail all later operations, and tell the other members, which may await this one."""
        if peer.role == "member" and 0 <= peer.index < self.size and not self._lost:
            self._lost = f"{peer} is gone ({reason})"
            self._tell(self._lost)

    def tick(self, now: float) -> None:
        """Do nothing: waits check the time themselves."""

    def doing(self) -> Status:
        """Return nothing: an operation that waits is found in the stack of the worker's thread."""
        return Status()


class AwaitedMember:
    """Takes a member's place from its process' first connection until it joins.

    Members that have joined before connect to it, and ask it for parts of gatherings. It does not answer, since it
    asks all of them itself as soon as it joins.

    Args:
        router: of this process; the role `member_peer(rank)` is hosted on it here.
        rank: of the member.
    """

    def __init__(self, router: Router, rank: int) -> None:
        router.host(member_peer(rank), self)
        router.admission.allow(MEMBERS)

    def destination(self, message: Message, size: int) -> None:
        """Discard a payload."""

    def handle(self, source: Peer, message: Message) -> None:
        """Drop a part of a gathering; ProtocolError: the message is of another kind."""
        if message.kind not in (MemberKind.PART, MemberKind.CONNECTED):
            raise ProtocolError(
                f"{message.kind.name} from {source} at a member that has not joined"
            )

    def lost(self, peer: Peer, reason: str) -> None:
        """Do nothing."""

    def tick(self, now: float) -> None:
        """Do nothing."""

    def doing(self) -> Status:
        """Return nothing."""
        return Status()
