"""The spans of time that a process' roles record while a timeline is on, in a ring of bounded size."""

from __future__ import annotations

import enum
import struct
from typing import Protocol, runtime_checkable

from steepest.core.messages.message import Peer
from steepest.core.system import system
from steepest.core.transport.router import Router

#: A span: seconds at which it began and ended, its number and version (see `RoleSpans.add`), chunk, other worker, the
#: index of its role, the role's number in `ROLES`, its `SpanKind`.
SPAN = struct.Struct("<ddqqiiHBB")
ROLES = ("worker", "server", "aggregator")


class SpanKind(enum.IntEnum):
    """What a role did in a span of time."""

    COMPUTE = 0  # a worker's step, with what it loads, pushes and waits for in it
    LOAD = 1  # a batch
    PUSH = 2  # packing a chunk of the gradient and handing it to the transport
    WAIT = 3  # a worker, for weights or for what its model needs
    PULL = 4  # a chunk of new weights is here: an instant
    CALL = 5  # functions between two steps, such as an evaluation
    STAGE = 6  # a server, or a host's aggregator, takes a pushed chunk
    REDUCE = 7  # the mean of a chunk's pushes; an aggregator's sum of its host's
    APPLY = 8  # the optimizer's step on a chunk


class SpanRing:
    """The newest spans of one process. Its roles write on the router's thread; other threads read.

    Args:
        capacity: spans that are kept; older ones are overwritten.
    """

    def __init__(self, capacity: int) -> None:
        self.memory, self.capacity = bytearray(capacity * SPAN.size), capacity
        self.count = 0  # of spans so far

    def since(self, number: int, least: int = 1) -> tuple[int, bytes]:
        """Return the number of spans so far, and those after the first `number`, oldest first, packed as `SPAN`.

        Overwritten spans are left out. If fewer than `least` are new, return `number` and no spans.
        """
        count = self.count
        if count - number < max(least, 1):
            return number, b""
        memory = bytes(self.memory)
        first = max(number, self.count - self.capacity + 1)  # older ones were overwritten meanwhile
        if first >= count:
            return count, b""
        begin, end = (each % self.capacity * SPAN.size for each in (first, count))
        return count, memory[begin:end] if begin < end else memory[begin:] + memory[:end]


class RoleSpans:
    """Records the spans of one role of a process."""

    def __init__(self, ring: SpanRing, peer: Peer) -> None:
        self._ring, self._peer = ring, (peer.index, ROLES.index(peer.role))
        self.now = system().now

    def add(
        self,
        kind: SpanKind,
        began: float,
        number: int = -1,
        version: int = -1,
        chunk: int = -1,
        other: int = -1,
        ended: float | None = None,
    ) -> None:
        """Record a span.

        Args:
            kind: of the span.
            began: in seconds, as `now` returns them.
            number: of the share for COMPUTE, LOAD and WAIT; the push's sequence number for PUSH and STAGE; else -1.
            version: that a worker computes from, awaits or has received, that a push was computed from, or that is
                reduced or applied; -1 if none.
            chunk: index; -1 if none.
            other: for STAGE, the worker that has pushed; -1 if none.
            ended: in seconds; None for now.
        """
        ring = self._ring
        at = ring.count % ring.capacity * SPAN.size
        end = self.now() if ended is None else ended
        SPAN.pack_into(
            ring.memory, at, began, end, number, version, chunk, other, *self._peer, kind
        )
        ring.count += 1


@runtime_checkable
class RecordsSpans(Protocol):
    """A role that records what it does."""

    def record(self, spans: RoleSpans | None) -> None:
        """Record spans from now on; None to record none, as at the beginning."""


def record_roles(router: Router, ring: SpanRing | None) -> None:
    """Have a process' roles, also those that are hosted later, record spans in a ring; None to record none.

    Called on the router's thread.
    """

    def begin(peer: Peer, role: object) -> None:
        if isinstance(role, RecordsSpans):
            role.record(None if ring is None else RoleSpans(ring, peer))

    router.attend(begin)
    if ring is None:
        router.attend(None)
