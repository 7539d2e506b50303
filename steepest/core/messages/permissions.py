"""The messages that each role may send to each other role, checked before they reach a role."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from steepest.core.messages.driver import (
    AskForSteps,
    AuditDifference,
    Counters,
    Failure,
    GiveUp,
    LogPage,
    ReadCounters,
    ReadLog,
    Result,
    Revoke,
    Revoked,
    Stop,
    Stopped,
    WorkerLost,
)
from steepest.core.messages.fields import HEAVIEST, MOST, Limits, Schema, unfit
from steepest.core.messages.gradients import (
    CommitOrder,
    Discard,
    HostPush,
    Logged,
    Push,
    PushStaged,
    Refresh,
    Report,
    VersionStaged,
    Weights,
    WeightsShared,
)
from steepest.core.messages.membership import (
    Failed,
    Grant,
    GroupKey,
    Join,
    Lease,
    Members,
    WorkerEnded,
    WorkerJoined,
)
from steepest.core.messages.message import COORDINATOR, Message, MessageKind, Peer
from steepest.core.messages.schema import Body
from steepest.core.messages.snapshots import (
    Install,
    Installed,
    Put,
    PutReceived,
    PutState,
    Read,
    Refused,
    ReplaceState,
    Snapshot,
    SnapshotEnd,
    StateTensor,
)
from steepest.errors import ProtocolError

#: Roles of which a successor may connect while its predecessor's channel is still open.
SUCCEEDED = ("worker", "member", "client")
#: A kind, the sender's role, the receiver's role.
Line = tuple[MessageKind, str, str]
#: Bodies of the messages that may be sent, by the sender's and the receiver's role.
Sayings = Mapping[tuple[str, str], Sequence[type[Body]]]

#: The messages that a training job and a parameter server by itself have in common.
COMMON: Sayings = {
    ("coordinator", "server"): (CommitOrder, Discard, Members, Snapshot),
    ("server", "worker"): (Weights,),
    ("server", "client"): (Weights, StateTensor, SnapshotEnd, PutReceived, Refused),
    ("client", "server"): (Put, PutState, ReplaceState),
    ("client", "coordinator"): (Read, Install, ReadCounters),
    ("coordinator", "client"): (Installed, Counters, Refused),
}
_TRAINING: Sayings = {
    ("worker", "server"): (Push,),
    ("worker", "aggregator"): (Push,),
    ("worker", "coordinator"): (Join, Report, Failed),
    ("worker", "worker"): (GroupKey,),
    ("aggregator", "server"): (HostPush,),
    ("aggregator", "worker"): (Weights, WeightsShared),
    ("server", "aggregator"): (Weights,),
    ("server", "coordinator"): (VersionStaged, PushStaged, Logged, Failed),
    ("coordinator", "server"): (Refresh, WorkerJoined, WorkerEnded),
    ("coordinator", "worker"): (Members, Grant, Lease),
    ("client", "coordinator"): (AskForSteps, Revoke, Stop, GiveUp, ReadLog),
    ("coordinator", "client"): (
        Result,
        Failure,
        Revoked,
        Stopped,
        WorkerLost,
        AuditDifference,
        LogPage,
    ),
}


def lines(*sayings: Sayings) -> dict[Line, Schema]:
    """Return the schemas of the messages that may be sent, by kind, sender and receiver."""
    return {
        (body.KIND, source, target): body.SCHEMA
        for part in sayings
        for (source, target), bodies in part.items()
        for body in bodies
    }


#: The messages of a job that trains.
TRAINING: Mapping[Line, Schema] = MappingProxyType(lines(COMMON, _TRAINING))


class MessageCheck:
    """The check of messages that come from other processes."""

    def __init__(
        self,
        # the schema of each kind that a role may send to a role
        table: Mapping[Line, Schema] = TRAINING,
        limits: Limits = Limits(),  # noqa: B008 - immutable
        # roles whose successor may connect while the old channel is open
        succeeded: Collection[str] = SUCCEEDED,
    ) -> None:
        self.succeeded = frozenset(succeeded)
        self._limits = limits
        self._table = dict(table)

    def allow(self, table: Mapping[Line, Schema]) -> None:
        """Accept further messages."""
        self._table.update(table)

    def exists(self, peer: Peer) -> bool:
        """Return whether this job can have a peer.

        The index of a coordinator is 0, those of workers, servers and aggregators are within the
        limits, others are any.
        """
        if peer.role == "worker":
            return 0 <= peer.index < self._limits.workers
        if peer.role in ("server", "aggregator"):
            return 0 <= peer.index < self._limits.servers
        return peer.role != "coordinator" or peer == COORDINATOR

    def check(self, message: Message) -> None:
        """Check that a message's sender may send it, and that each field may hold its value.

        It takes a microsecond for a message without `meta`.

        Args:
            message: with source and target.

        Raises:
            ProtocolError: the sender's role may not send this kind to the receiver's; or a field is
                missing or holds a wrong value, which the error names.
        """
        source, target, limits = message.source, message.target, self._limits
        assert source is not None
        assert target is not None
        schema = self._table.get((message.kind, source.role, target.role))
        if schema is None:
            raise ProtocolError(
                f"a {source.role} may not send {message.kind.name} to a {target.role}"
            )
        wrong, lowest = None, schema.lowest_chunk
        if not lowest <= message.chunk < limits.chunks:
            wrong = f"chunk={message.chunk}: give an index from {lowest} to {limits.chunks - 1}"
        elif not 0 <= message.version < MOST:
            name = schema.names.get("version", "version")
            wrong = f"{name}={message.version}: give an integer from 0 to 2**62"
        elif schema.weighs and not (
            0.0 <= message.weight <= HEAVIEST and 0.0 <= message.total <= HEAVIEST
        ):
            wrong = _unfit_weight(message, schema)
        elif schema.header:
            wrong = _unfit_header(message, schema, limits)
        if wrong is None and (schema.required or message.meta):
            wrong = unfit(schema, message.values(), limits)
        if wrong is not None:
            raise ProtocolError(f"{message.kind.name} from {source} with {wrong}")


def _unfit_header(message: Message, schema: Schema, limits: Limits) -> str | None:
    for slot, part in schema.header.items():
        if not part.fits(value := getattr(message, slot), limits):
            return f"{schema.names[slot]}={value!r:.80}: give {part.allowed}"
    return None


def _unfit_weight(message: Message, schema: Schema) -> str | None:
    """Return what is wrong with a message's weight or total, else None.

    NaN and infinity are allowed: they make a gradient that is not finite, which servers report as such.
    """
    for slot, value in (("weight", message.weight), ("total", message.total)):
        if value < 0 or HEAVIEST < value < math.inf:
            return f"{schema.names.get(slot, slot)}={value}: give a number from 0 to {HEAVIEST:g}"
    return None
