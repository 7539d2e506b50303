"""The messages that each role may send to each other role, checked before they reach a role."""

from __future__ import annotations

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
from steepest.core.messages.fields import Limits
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
from steepest.core.messages.schema import Body, reader_of
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


def lines(*sayings: Sayings) -> dict[Line, type[Body]]:
    """Return the bodies of the messages that may be sent, by kind, sender and receiver."""
    return {
        (body.KIND, source, target): body
        for part in sayings
        for (source, target), bodies in part.items()
        for body in bodies
    }


#: The messages of a job that trains.
TRAINING: Mapping[Line, type[Body]] = MappingProxyType(lines(COMMON, _TRAINING))


class MessageCheck:
    """The check of messages that come from other processes."""

    def __init__(
        self,
        # the body of each kind that a role may send to a role
        table: Mapping[Line, type[Body]] = TRAINING,
        limits: Limits = Limits(),  # noqa: B008 - immutable
        # roles whose successor may connect while the old channel is open
        succeeded: Collection[str] = SUCCEEDED,
    ) -> None:
        self.succeeded = frozenset(succeeded)
        self._limits = limits
        self._table = dict(table)

    def allow(self, table: Mapping[Line, type[Body]]) -> None:
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
        """Check that a message's sender may send it, and read its body, whose fields may hold their values.

        Args:
            message: of another process, with source and target.

        Raises:
            ProtocolError: the sender's role may not send this kind to the receiver's; or a field is
                missing or holds a wrong value, which the error names.
        """
        if type(message.body) is not bytes:
            return  # it has been checked
        cls = self._class_of(message)
        if cls is None:
            assert message.source is not None
            assert message.target is not None
            raise ProtocolError(
                f"a {message.source.role} may not send {message.kind.name} to a {message.target.role}"
            )
        try:
            message.body = reader_of(cls).read(message.body, self._limits)
        except ProtocolError as error:
            raise ProtocolError(f"{message.kind.name} from {message.source} with {error}") from None

    def number(self, message: Message) -> int:
        """Return the number of a client's request that is refused, by which it awaits an answer; 0 if it has none."""
        if type(message.body) is not bytes:
            return getattr(message.body, "sequence", 0)
        cls = self._class_of(message)
        return 0 if cls is None else reader_of(cls).number(message.body)

    def _class_of(self, message: Message) -> type[Body] | None:
        assert message.source is not None
        assert message.target is not None
        return self._table.get((message.kind, message.source.role, message.target.role))
