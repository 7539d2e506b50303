"""The role in a user's process that pushes to and pulls from a parameter server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from steepest.core.messages.gradients import Push, Weights
from steepest.core.messages.message import COORDINATOR, Kind, Message, Peer, Send, server_peer
from steepest.core.messages.snapshots import Read, SnapshotEnd
from steepest.core.messages.users import PushCommitted, Pushed, PushRefused
from steepest.core.status import Status
from steepest.core.tensors.memory import Bytes
from steepest.errors import (
    NonFiniteError,
    PeerLostError,
    ProtocolError,
    ShutdownError,
    described_by,
    listed,
    raised_by_user,
)
from steepest.parameter_server.arrays import Arrays, WantedPart

_READS = 1 << 61  # sequence numbers of reads begin here; those below are of pushes


@dataclass
class _Unanswered:
    """A push or a read that is not answered yet."""

    future: Future[int]  # of the version that the push makes, or that is read
    update: Mapping[str, Bytes] | None  # of a push, memory of arrays by name; None for a read
    # memory for the weights, by array; None if none are wanted, or not any more
    wanted: Mapping[str, WantedPart] | None
    given_up: bool = False  # by the caller, whose memory is not to be used any more
    chunks: set[int] = field(default_factory=set)  # of the weights, that have not arrived
    servers: set[int] = field(default_factory=set)  # that have not ended the read
    confirmed: bool = True  # whether a push is known to be committed; True of others
    # by chunk, the payloads that are received into the wanted memory
    in_place: dict[int, Bytes] = field(default_factory=dict)


class Pusher:
    """The pushes and pulls of one user; a role, used on the thread that runs its router.

    To the servers it is a worker. Each push has a sequence number, under which it is applied at
    most once. If servers have copies, requests outlive a server's death: `resume` continues them
    once its successor serves.

    Args:
        arrays: names, shapes, dtypes and chunks of what the servers hold.
        holders: the indices of the servers that hold each chunk.
        num_servers: number of servers.
        drop_arriving: discards payloads that are being received into some memory; see `Router`.
    """

    def __init__(
        self,
        arrays: Arrays,
        holders: tuple[tuple[int, ...], ...],
        num_servers: int,
        drop_arriving: Callable[[Bytes], None],
    ) -> None:
        self.version = 0  # the newest that an answer had
        self.pushing = 0  # number of pushes in flight
        self.index = -1  # of this worker; servers do not know it beforehand
        self.broken = ""  # why requests wait for a successor of a server; empty while none do
        self._arrays = arrays
        self._holders = holders
        self._copies = any(len(servers) > 1 for servers in holders)
        self._servers = frozenset(range(num_servers))
        self._send: Send = _send_nothing
        self._drop_arriving = drop_arriving
        self._sequence = 0
        self._reads = _READS
        self._requests: dict[int, _Unanswered] = {}
        self._failure: Callable[[], Exception] | None = None  # makes the error of each request

    def use(self, index: int, send: Send) -> None:
        """Speak as the worker of an index, whose messages `send` sends."""
        self.index, self._send = index, send

    @property
    def failure(self) -> Exception | None:
        """A new error that says why every request fails; None while requests can be answered."""
        return None if self._failure is None else self._failure()

    def push(
        self, update: Mapping[str, Bytes], wanted: Mapping[str, WantedPart] | None = None
    ) -> Future[int]:
        """Push an update, and receive the weights that it makes if they are wanted.

        Args:
            update: memory (flat, uint8) of some or all arrays by name; unchanged until the future
                is done, unless the router owns it (`Router.own_pending`).
            wanted: memory for the weights by array name; None for no weights.

        Returns:
            The future of the version that the update makes. It raises NonFiniteError if the update
            is refused, ModelRaisedError if the servers' optimizer raised in it or in an earlier
            one, PeerLostError or ShutdownError if it may or may not be committed.
        """
        self._sequence += 1
        return self._begin(self._sequence, _Unanswered(_running(), update, wanted))

    def pull(self, wanted: Mapping[str, WantedPart]) -> Future[int]:
        """Receive arrays, or parts of them, at one version.

        Args:
            wanted: memory for them by array name; empty to learn the version alone.

        Returns:
            The future of that version. It raises ModelRaisedError if the servers' optimizer has
            raised, PeerLostError or ShutdownError.
        """
        self._reads += 1
        return self._begin(self._reads, _Unanswered(_running(), None, wanted))

    def _begin(self, sequence: int, request: _Unanswered) -> Future[int]:
        """Add a request and ask for it, or fail it if none can be answered; return its future."""
        if self._failure is not None:
            request.future.set_exception(self._failure())
            return request.future
        self._requests[sequence] = request
        self.pushing += sequence < _READS
        if not self.broken:
            self._ask(sequence, request)
        return request.future

    def _ask(self, sequence: int, request: _Unanswered) -> None:
        """Send a request that has no answers yet."""
        chunks = self._arrays.layout.chunks
        request.in_place.clear()
        if request.update is None:
            wanted = self._arrays.chunks_for(request.wanted or {})
            request.chunks, request.servers = set(wanted), set(self._servers)
            some = None if len(wanted) == len(chunks) else sorted(wanted)
            self._send(COORDINATOR, Read(sequence, chunks=some).pack())
            return
        pull = request.wanted is not None
        request.chunks = {chunk.index for chunk in chunks} if pull else set()
        request.confirmed = not (pull and self._copies)
        self._send(COORDINATOR, Pushed(sequence, self.version, pull=pull).pack())
        for chunk in chunks:
            payload, absent = self._arrays.payload(chunk, request.update)
            unit = 0.0 if payload is None else 1.0
            push = Push(0, 0, sequence, self.version, chunk.index, unit, unit, absent)
            for server in self._holders[chunk.index]:
                self._send(server_peer(server), push.pack(payload))
        if not self._copies:
            request.update = {}  # nothing is sent again: the memory is its owner's

    def resume(self, committed: Mapping[tuple[int, int], int], index: int) -> None:
        """Continue all requests at the servers that `use` has named.

        A push that was committed before is answered with its version, and not sent again; what it
        wanted is read, at that version or a later one. All others are begun anew.

        Args:
            committed: the versions of pushes, by index of the user and number of the push.
            index: under which the requests were begun.
        """
        self.broken = ""
        requests, self._requests = self._requests, {}
        self.pushing = 0
        for sequence, request in requests.items():
            version = None if request.update is None else committed.get((index, sequence))
            if request.given_up:
                request.future.set_exception(PeerLostError("its caller has given up"))
            elif version is not None and request.wanted is None:
                self.version = max(self.version, version)
                request.future.set_result(version)
            elif version is None and request.update is not None:
                self._begin(sequence, request)
            else:
                request.update, request.confirmed = None, True
                self._reads += 1
                self._begin(self._reads, request)

    def withdraw(self, future: Future[Any]) -> None:
        """Write nothing more to the memory of an unfinished request, whose caller has given up.

        What the request sends still leaves, and a push is committed all the same.
        """
        for request in self._requests.values():
            if request.future is future:
                self._leave_memory(request)

    def _leave_memory(self, request: _Unanswered) -> None:
        """Write nothing more to the memory of a request."""
        request.wanted, request.given_up = None, True
        for memory in request.in_place.values():
            self._drop_arriving(memory)
        request.in_place.clear()

    # -- Role ----------------------------------------------------------------------------------

    def destination(self, message: Message, size: int) -> Bytes | None:
        """Return memory for a chunk: the wanted memory where all of it belongs there, new where a part does.

        Else None. See `Role.destination`; None for a chunk that is not awaited, or of a request that was
        withdrawn.
        """
        if message.kind is not Kind.WEIGHTS:
            raise ProtocolError(
                f"a parameter server's user takes no payload of {message.kind.name}"
            )
        weights: Weights = message.body
        request = self._requests.get(weights.sequence)
        chunk = self._arrays.layout.chunks[weights.chunk]
        if size != chunk.nbytes:
            raise ProtocolError(f"chunk {weights.chunk} has {chunk.nbytes} bytes, {size} arrive")
        if request is None or weights.chunk not in request.chunks:
            return None  # a copy
        if request.wanted is None:
            return None
        target = self._arrays.target(chunk, request.wanted)
        if target is None:
            return np.empty(size, dtype=np.uint8)
        request.in_place[weights.chunk] = target
        return target

    def handle(self, source: Peer, message: Message) -> None:
        """Act on one message; one that answers no open request is ignored; ProtocolError: a kind for no user."""
        request = self._requests.get(message.body.sequence)
        match message.kind:
            case _ if request is None:
                return  # a copy, or the request has failed
            case Kind.PUSH_COMMITTED:
                request.confirmed = True
                self._finish_if_complete(message.body, request)
            case Kind.PUSH_REFUSED:
                refused: PushRefused = message.body
                if refused.raised:
                    self._fail_by_optimizer(refused.sequence, refused.raised, refused)
                    return
                culprits = refused.culprits
                names = ", ".join(repr(name) for _, name in culprits if name) or "the array"
                self._end(refused.sequence).set_exception(
                    NonFiniteError(
                        f"the update was refused, and nothing of it applied: {names} holds NaN or "
                        'infinity; nonfinite="skip" leaves such updates out, nonfinite="pass" '
                        "applies them"
                    )
                )
            case Kind.WEIGHTS:
                self._take(message.body, message.payload, request)
            case Kind.SNAPSHOT_END:
                end: SnapshotEnd = message.body
                if end.given_up:
                    why = f"{source}: {end.given_up}"
                    self._fail_by_optimizer(end.sequence, why, end)
                    return
                request.servers.discard(source.index)
                self._finish_if_complete(end, request)
            case _:
                raise ProtocolError(f"a parameter server's user does not take {message.kind.name}")

    def _fail_by_optimizer(
        self, sequence: int, why: str, raised: PushRefused | SnapshotEnd
    ) -> None:
        """Fail a request because the servers' optimizer raised in its update, or an earlier one."""
        self._leave_memory(self._requests[sequence])
        error = raised_by_user(
            f"{why}; parts of the arrays have that update and others not: load_state_dict() a state "
            "from before it",
            described_by(raised),
        )
        self._end(sequence).set_exception(error)

    def _take(self, weights: Weights, payload: Bytes | None, request: _Unanswered) -> None:
        """Take a chunk of weights, copying what was not received into its place."""
        wanted = request.wanted
        if weights.chunk not in request.chunks or (payload is None and wanted is not None):
            return  # a copy
        chunk = self._arrays.layout.chunks[weights.chunk]
        in_place = request.in_place.pop(weights.chunk, None)
        if wanted is not None and payload is not None and payload is not in_place:
            self._arrays.scatter(chunk, payload, wanted)
        request.chunks.discard(weights.chunk)
        self._finish_if_complete(weights, request)

    def _finish_if_complete(
        self, message: Weights | SnapshotEnd | PushCommitted, request: _Unanswered
    ) -> None:
        """Finish a request if nothing more is awaited, with the version of its last message."""
        if not request.chunks and not request.servers and request.confirmed:
            self._finish(message.sequence, message.version)

    def _finish(self, sequence: int, version: int) -> None:
        """Complete a request with the version of its answer."""
        self.version = max(self.version, version)
        self._end(sequence).set_result(version)

    def _end(self, sequence: int) -> Future[int]:
        """Remove a request; return its future."""
        self.pushing -= sequence < _READS
        return self._requests.pop(sequence).future

    def lost(self, peer: Peer, reason: str) -> None:
        """Fail all requests, open and later ones, if a server or the coordinator is lost.

        With copies they await `resume`.
        """
        if peer.role in ("server", "coordinator"):
            text = f"{peer} of the parameter server is gone ({reason}): it was shut down or died"
            if self._copies:
                self.broken = self.broken or text
            else:
                self.fail(text)

    def fail(self, why: str) -> None:
        """Fail all requests, open and later ones, with a PeerLostError that says why."""
        self._fail(lambda: PeerLostError(why))

    def close(self, why: str) -> None:
        """Fail all requests, open and later ones, with a ShutdownError that gives `why`."""
        self._fail(lambda: ShutdownError(why))

    def _fail(self, error: Callable[[], Exception]) -> None:
        """Fail all requests, each with a new error: raising an error adds to its traceback."""
        if self._failure is None:
            self._failure = error
        self.broken = ""
        requests, self._requests = self._requests, {}
        self.pushing = 0
        for request in requests.values():
            self._leave_memory(request)
            request.future.set_exception(error())

    def tick(self, now: float) -> None:
        """Do nothing: the calling threads keep the deadlines."""

    def doing(self) -> Status:
        """Return which requests are not answered, see `Role.doing`."""
        waits = []
        for sequence, request in list(self._requests.items()):
            servers = {self._holders[chunk][0] for chunk in request.chunks} | request.servers
            of = [*([] if request.confirmed else [COORDINATOR]), *map(server_peer, sorted(servers))]
            what = f"push {sequence}" if sequence < _READS else f"pull {sequence - _READS}"
            waits.append(f"waits for {listed(of)} to answer {what}")
        return Status(listed(waits))


def _running() -> Future[int]:
    """Return a new future that cannot be cancelled: what is sent cannot be taken back."""
    future: Future[int] = Future()
    future.set_running_or_notify_cancel()
    return future


def _send_nothing(target: Peer, message: Message) -> None:
    """Send nothing: the role has no router yet."""
