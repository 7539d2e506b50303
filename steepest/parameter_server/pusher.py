"""The end of a parameter server that users hold: pushes and pulls, as a state machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from steepest.errors import NonFiniteError, PeerLostError, ProtocolError, ShutdownError
from steepest.messages.gradients import Push, Weights
from steepest.messages.message import COORDINATOR, Kind, Message, Peer, Send, server_peer
from steepest.messages.snapshots import Read, SnapshotEnd
from steepest.messages.users import PushCommitted, Pushed, PushRefused
from steepest.parameter_server.arrays import Arrays, Wanted
from steepest.tensors.memory import Bytes

_READS = 1 << 62  # sequence numbers of reads; below are pushes, which servers count


@dataclass
class _Request:
    """Something that is being waited for."""

    future: Future[int]
    wanted: Mapping[str, Wanted]
    chunks: set[int]  # still to come
    servers: set[int]  # which have not ended a read yet
    landed: dict[int, Bytes] = field(
        default_factory=dict
    )  # payloads by chunk that are where they are wanted


class Pusher:
    """Whoever pushes to and pulls from a parameter server; a role, used on its router's thread.

    It speaks as a worker. Each push has a sequence number, under which it is applied at most once.

    Args:
        index: of this worker; servers do not know it beforehand.
        arrays: what the servers hold.
        owners: the server of each chunk.
        num_servers: how many there are.
        send: how to send.
    """

    def __init__(
        self, index: int, arrays: Arrays, owners: tuple[int, ...], num_servers: int, send: Send
    ) -> None:
        self.version = 0
        self.pushing = 0  # pushes in flight
        self._index = index
        self._arrays = arrays
        self._owners = owners
        self._servers = frozenset(range(num_servers))
        self._send = send
        self._sequence = 0
        self._reads = _READS
        self._requests: dict[int, _Request] = {}
        self._gone: Callable[[], Exception] | None = None

    @property
    def failure(self) -> Exception | None:
        """Why nothing is pushed or pulled any more; None while all is well."""
        return None if self._gone is None else self._gone()

    def push(
        self, update: Mapping[str, Bytes], wanted: Mapping[str, Wanted] | None = None
    ) -> Future[int]:
        """Pushes some arrays; the future holds the version that the update made.

        Args:
            update: memory of arrays by name, unchanged until the future is done, unless it is owned
                (`Router.own_pending`).
            wanted: receive the weights of that version too.
        """
        self._sequence += 1
        chunks = self._arrays.layout.chunks
        awaited = set() if wanted is None else {chunk.index for chunk in chunks}
        request = self._begin(self._sequence, wanted or {}, awaited, set())
        if self._gone is None:
            self.pushing += 1
            self._send(
                COORDINATOR, Pushed(self._sequence, self.version, pull=wanted is not None).pack()
            )
            for chunk in chunks:
                payload, absent = self._arrays.payload(chunk, update)
                push = Push(0, 0, self._sequence, self.version, chunk.index)
                if payload is not None:
                    push = replace(push, unit=1.0, total=1.0, absent=absent, payload=payload)
                self._send(server_peer(self._owners[chunk.index]), push.pack())
        return request

    def pull(self, wanted: Mapping[str, Wanted]) -> Future[int]:
        """Receives arrays at one version, which the future holds."""
        self._reads += 1
        chunks = self._arrays.chunks_for(wanted)
        future = self._begin(self._reads, wanted, set(chunks), set(self._servers))
        if self._gone is None:
            some = None if len(chunks) == len(self._owners) else sorted(chunks)
            self._send(COORDINATOR, Read(self._reads, chunks=some).pack())
        return future

    def _begin(
        self, sequence: int, wanted: Mapping[str, Wanted], chunks: set[int], servers: set[int]
    ) -> Future[int]:
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # what is sent cannot be cancelled
        if self._gone is not None:
            future.set_exception(self._gone())
        else:
            self._requests[sequence] = _Request(future, wanted, chunks, servers)
        return future

    # -- Role ----------------------------------------------------------------------------------

    def destination(self, message: Message, size: int) -> Bytes | None:
        """Where an arriving payload goes: into the memory that was given, where a chunk fits it."""
        request = self._requests.get(message.sequence)
        if message.kind is not Kind.WEIGHTS or not 0 <= message.chunk < len(self._owners):
            raise ProtocolError(
                f"a parameter server's user takes no payload of {message.kind.name}"
            )
        chunk = self._arrays.layout.chunks[message.chunk]
        if size != chunk.nbytes:
            raise ProtocolError(f"chunk {message.chunk} has {chunk.nbytes} bytes, {size} arrive")
        if request is None or message.chunk not in request.chunks:
            return None  # a copy
        target = self._arrays.target(chunk, request.wanted)
        if target is None:
            return np.empty(size, dtype=np.uint8)
        request.landed[message.chunk] = target
        return target

    def handle(self, source: Peer, message: Message) -> None:
        """Acts on one message."""
        request = self._requests.get(message.sequence)
        match message.kind:
            case _ if request is None:
                return  # nobody waits for it any more
            case Kind.PUSH_COMMITTED:
                committed = PushCommitted.unpack(message)
                self._finish(committed.sequence, committed.version)
            case Kind.PUSH_REFUSED:
                culprits = PushRefused.unpack(message).culprits
                names = ", ".join(repr(name) for _, name in culprits if name) or "the array"
                self._end(message.sequence).set_exception(
                    NonFiniteError(
                        f"the update was refused, and nothing of it applied: {names} holds NaN or "
                        "infinity; "
                        'nonfinite="skip" leaves such updates out, nonfinite="pass" applies them'
                    )
                )
            case Kind.WEIGHTS:
                self._take(Weights.unpack(message), request)
            case Kind.SNAPSHOT_END:
                end = SnapshotEnd.unpack(message)
                request.servers.discard(source.index)
                self._look(end, request)
            case _:
                raise ProtocolError(f"a parameter server's user does not take {message.kind.name}")

    def _take(self, weights: Weights, request: _Request) -> None:
        if weights.payload is None or weights.chunk not in request.chunks:
            return  # a copy
        chunk = self._arrays.layout.chunks[weights.chunk]
        if weights.payload is not request.landed.pop(weights.chunk, None):
            self._arrays.scatter(chunk, weights.payload, request.wanted)
        request.chunks.discard(weights.chunk)
        self._look(weights, request)

    def _look(self, message: Weights | SnapshotEnd, request: _Request) -> None:
        """The message that completes a request is of its version, also when the request came twice."""
        if not request.chunks and not request.servers:
            self._finish(message.sequence, message.version)

    def _finish(self, sequence: int, version: int) -> None:
        self.version = max(self.version, version)
        self._end(sequence).set_result(version)

    def _end(self, sequence: int) -> Future[int]:
        self.pushing -= sequence < _READS
        return self._requests.pop(sequence).future

    def lost(self, peer: Peer, reason: str) -> None:
        """A server or the coordinator is gone: whatever waits fails, now and later."""
        if peer.role in ("server", "coordinator"):
            text = f"{peer} of the parameter server is gone ({reason}): it was shut down or died"
            self._fail(lambda: PeerLostError(text))

    def close(self, why: str) -> None:
        """Nothing will arrive any more."""
        self._fail(lambda: ShutdownError(why))

    def _fail(self, error: Callable[[], Exception]) -> None:
        """Every future has an exception of its own: raising one adds to its traceback."""
        if self._gone is None:
            self._gone = error
        requests, self._requests = self._requests, {}
        self.pushing = 0
        for request in requests.values():
            request.future.set_exception(error())

    def tick(self, now: float) -> None:
        """Deadlines are those of the callers."""
