"""Who may say what to whom, and what such a message holds: looked up before any role sees it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType

from steepest.errors import ProtocolError
from steepest.messages.fields import (
    ANYTHING,
    CHUNK,
    COUNT,
    FINITE,
    FLAG,
    HEAVIEST,
    MOST,
    NUMBER,
    RECORD,
    TEXT,
    WORKER,
    ZERO,
    ZERO_OR_ONE,
    Field,
    Limits,
    Schema,
    many,
    needed,
    nothing_or,
    numbers_by_name,
    one_of,
    plain_by_name,
    row,
    rows,
    some,
    unfit,
    whole,
)
from steepest.messages.message import COORDINATOR, Kind, Message, Peer

#: Roles of which a successor may connect while the channel of the one before it is still open.
SUCCEEDED = ("worker", "member", "client")
#: A kind, the sender's role, the receiver's role.
Line = tuple[Kind, str, str]

_PEER = row(one_of("coordinator", "server", "worker", "client", "relay", "member"), COUNT)
_CULPRITS = many(row(Field("an integer from -1", lambda v, limits: type(v) is int and -1 <= v < MOST), TEXT))
_PUSHES = needed(rows(3))  # worker, incarnation, sequence
_READERS = needed(rows(2))  # worker, sequence
_HISTORY = whole(
    {
        "committed": needed(COUNT),
        "skipped": needed(COUNT),
        "dropped": needed(COUNT),
        "staleness": needed(many(row(COUNT, COUNT))),
    }
)
_STATE = whole({"ledger": some(COUNT), "history": _HISTORY, "schedule": RECORD})  # what is missing begins anew
_PUTS = many(row(one_of("client"), COUNT, COUNT))
_WORD = {"word": COUNT, "state": _STATE, "schedule": RECORD}  # with copies, of whatever the coordinator decides
_WHAT = one_of("weights", "state", "standing")
_RECORD = {  # of optimizer state: what it is
    "name": needed(TEXT),
    "key": needed(TEXT),
    "start": needed(COUNT),
    "stop": needed(COUNT),
    "plain": needed(FLAG),
    "dtype": needed(TEXT),
    "shape": needed(many(COUNT)),
}
_PUSH = Schema({"absent": many(COUNT)}, about_chunk=True, weighs=True)
_DISCARD = Schema({"pushes": _PUSHES, "readers": _READERS, **_WORD})
_COMMIT = Schema(
    {
        "pushes": _PUSHES,
        "readers": _READERS,
        "hyper": many(plain_by_name()),
        "skip": FLAG,
        "clip": NUMBER,
        "entry": many(ANYTHING),
        **_WORD,
    },
    {"weight": FINITE},
)
_MEMBERS = Schema(
    {
        "workers": needed(many(WORKER)),
        "reload": needed(FLAG),
        "install": _PUTS,
        "again": FLAG,
        **_WORD,
    }
)
_SNAPSHOT = Schema({"reader": needed(_PEER), "what": needed(_WHAT), "chunks": many(CHUNK), "state": _STATE})
_READ = Schema({"what": _WHAT, "chunks": many(CHUNK)})
_WEIGHTS = Schema({"reload": FLAG}, about_chunk=True)
_STATE_TENSOR = Schema(_RECORD, about_chunk=True)
_INSTALL = Schema({"anew": FLAG, "state": nothing_or(_STATE)})
_FAILURE = Schema({"reason": needed(TEXT), "culprits": _CULPRITS, "step": COUNT, "worker": WORKER, "peer": _PEER})
_STAGED = {"squares": NUMBER, "culprits": _CULPRITS}
_PUSH_STAGED = Schema({"worker": needed(WORKER), **_STAGED})
_GONE = {"worker": needed(WORKER), "life": needed(COUNT), "why": needed(TEXT)}
_REPORT = {
    "samples": needed(COUNT),
    "bytes": needed(COUNT),
    "pulled": needed(COUNT),
    "loss": NUMBER,
    "metrics": numbers_by_name(),
    "timings": numbers_by_name(),
}
_RESULT = Schema({"step": needed(COUNT), "samples": COUNT, "bytes_pushed": COUNT, "bytes_pulled": COUNT})

#: Lines that a training job and a parameter server by itself have in common.
_COMMON: Mapping[Line, Schema] = {
    (Kind.COMMIT, "coordinator", "server"): _COMMIT,
    (Kind.DISCARD, "coordinator", "server"): _DISCARD,
    (Kind.MEMBERS, "coordinator", "server"): _MEMBERS,
    (Kind.SNAPSHOT, "coordinator", "server"): _SNAPSHOT,
    (Kind.READ, "client", "coordinator"): _READ,
    (Kind.WEIGHTS, "server", "worker"): _WEIGHTS,
    (Kind.WEIGHTS, "server", "client"): _WEIGHTS,
    (Kind.STATE, "server", "client"): _STATE_TENSOR,
    (Kind.SNAPSHOT_END, "server", "client"): Schema({"state": _STATE}),
    (Kind.PUT, "client", "server"): Schema(about_chunk=True),
    (Kind.PUT_STATE, "client", "server"): _STATE_TENSOR,
    (Kind.REPLACE_STATE, "client", "server"): Schema(),
    (Kind.PUT_RECEIVED, "server", "client"): Schema(),
    (Kind.INSTALL, "client", "coordinator"): _INSTALL,
    (Kind.INSTALLED, "coordinator", "client"): Schema(),
    (Kind.READ_COUNTERS, "client", "coordinator"): Schema(),
    (Kind.COUNTERS, "coordinator", "client"): Schema(),
}

#: Of a job that trains.
TRAINING: Mapping[Line, Schema] = MappingProxyType(
    {
        **_COMMON,
        (Kind.PUSH, "worker", "server"): _PUSH,
        (Kind.PUSH, "worker", "relay"): _PUSH,
        (Kind.HOST_PUSH, "relay", "server"): Schema({"pushes": _PUSHES, **_PUSH.meta}, about_chunk=True, weighs=True),
        (Kind.VERSION_STAGED, "server", "coordinator"): Schema(_STAGED),
        (Kind.PUSH_STAGED, "server", "coordinator"): _PUSH_STAGED,
        (Kind.REFRESH, "coordinator", "server"): Schema({"readers": _READERS, **_WORD}),
        (Kind.LOGGED, "server", "coordinator"): Schema(),
        (Kind.WEIGHTS, "server", "relay"): _WEIGHTS,
        (Kind.WEIGHTS, "relay", "worker"): _WEIGHTS,
        (Kind.WEIGHTS_SHARED, "relay", "worker"): Schema(),
        (Kind.REPORT, "worker", "coordinator"): Schema(_REPORT, weighs=True),
        (Kind.JOIN, "worker", "coordinator"): Schema(),
        (Kind.FAILED, "worker", "coordinator"): Schema(
            {"error": needed(TEXT), "traceback": needed(TEXT), "kind": TEXT}
        ),
        (Kind.MEMBERS, "coordinator", "worker"): _MEMBERS,
        (Kind.WORKER_JOINED, "coordinator", "server"): Schema({"worker": needed(WORKER), **_WORD}),
        (Kind.WORKER_ENDED, "coordinator", "server"): Schema(
            {"worker": needed(WORKER), "life": needed(COUNT), "pushes": _PUSHES, **_WORD}
        ),
        (Kind.GRANT, "coordinator", "worker"): Schema({"stats": FLAG}),
        (Kind.LEASE, "coordinator", "worker"): Schema({"share": needed(COUNT), "stats": FLAG, "committed": COUNT}),
        (Kind.ASK, "client", "coordinator"): Schema({"steps": needed(COUNT), "stats": FLAG}),
        (Kind.REVOKE, "client", "coordinator"): Schema(),
        (Kind.REVOKED, "coordinator", "client"): Schema(),
        (Kind.STOP, "client", "coordinator"): Schema(),
        (Kind.STOPPED, "coordinator", "client"): Schema(),
        (Kind.READ_LOG, "client", "coordinator"): Schema({"first": needed(COUNT)}),
        (Kind.LOG_PAGE, "coordinator", "client"): Schema({"log": needed(nothing_or(many(ANYTHING))), "length": COUNT}),
        (Kind.RESULT, "coordinator", "client"): _RESULT,
        (Kind.FAILURE, "coordinator", "client"): _FAILURE,
        (Kind.GIVE_UP, "client", "coordinator"): Schema(_GONE),
        (Kind.WORKER_LOST, "coordinator", "client"): Schema(_GONE),
        (Kind.INSTALL_REFUSED, "coordinator", "client"): Schema({"peer": needed(_PEER), "why": needed(TEXT)}),
        (Kind.DATA, "member", "member"): Schema(),
        (Kind.CONNECTED, "member", "member"): Schema(),
        (Kind.ABORT, "member", "member"): Schema({"reason": TEXT}),
    }
)

_OWN = {"generation": ZERO, "incarnation": ZERO}  # users have one life each, in no generation

#: Of a parameter server by itself: its users are workers, who know nothing of each other, and clients.
OPEN: Mapping[Line, Schema] = MappingProxyType(
    {
        **_COMMON,
        (Kind.PUSH, "worker", "server"): Schema(
            {"absent": many(COUNT)}, {**_OWN, "weight": ZERO_OR_ONE, "total": ZERO_OR_ONE}, about_chunk=True
        ),
        (Kind.PUSH_STAGED, "server", "coordinator"): _PUSH_STAGED,
        (Kind.PUSHED, "worker", "coordinator"): Schema({"pull": FLAG}, _OWN),
        (Kind.INSTALL_PUT, "coordinator", "server"): Schema({"install": needed(_PUTS), **_WORD}),
        (Kind.READ, "worker", "coordinator"): _READ,
        (Kind.SNAPSHOT_END, "server", "worker"): Schema(),
        (Kind.PUSH_COMMITTED, "coordinator", "worker"): Schema(),
        (Kind.PUSH_REFUSED, "coordinator", "worker"): Schema({"culprits": needed(_CULPRITS)}),
        (Kind.USER_LEFT, "server", "coordinator"): Schema({"worker": needed(WORKER)}),
    }
)


class Admission:
    """What a process takes from others.

    Args:
        table: who may say what to whom, and the fields of that.
        limits: how many workers, servers and chunks there are.
        succeeded: as `SUCCEEDED`, or fewer.
    """

    def __init__(
        self,
        table: Mapping[Line, Schema] = TRAINING,
        limits: Limits = Limits(),  # noqa: B008 - immutable
        succeeded: Collection[str] = SUCCEEDED,
    ) -> None:
        self.succeeded = frozenset(succeeded)
        self._limits = limits
        self._lines = {
            line: (schema.lowest_chunk, schema.weighs, schema.header, schema.meta, schema.needs_meta)
            for line, schema in table.items()
        }

    def exists(self, peer: Peer) -> bool:
        """Whether there can be such a coordinator, server or relay; anybody may be anything else."""
        if peer.role in ("server", "relay"):
            return 0 <= peer.index < self._limits.servers
        return peer.role != "coordinator" or peer == COORDINATOR

    def check(self, message: Message) -> None:
        """Looks at a message before anybody acts on it; costs a microsecond where there is no `meta`.

        Raises:
            ProtocolError: its sender may not say such a thing to its receiver; or a field holds what it may not, and
                which.
        """
        source, target, limits = message.source, message.target, self._limits
        assert source is not None
        assert target is not None
        line = self._lines.get((message.kind, source.role, target.role))
        if line is None:
            raise ProtocolError(f"a {source.role} may not send {message.kind.name} to a {target.role}")
        lowest, weighs, header, fields, required = line
        wrong = None
        if not lowest <= message.chunk < limits.chunks:
            wrong = f"chunk={message.chunk}: give an index from {lowest} to {limits.chunks - 1}"
        elif not 0 <= message.version < MOST:
            wrong = f"version={message.version}: give an integer from 0 to 2**62"
        elif weighs and not (0.0 <= message.weight <= HEAVIEST and 0.0 <= message.total <= HEAVIEST):
            wrong = _unfit_weight(message)
        elif header:
            wrong = unfit(header.items(), {name: getattr(message, name) for name in header}, limits)
        meta = message.meta
        if wrong is None and (required or meta):
            wrong = unfit(fields.items(), {} if meta is None else meta, limits)
        if wrong is not None:
            raise ProtocolError(f"{message.kind.name} from {source} with {wrong}")


def _unfit_weight(message: Message) -> str | None:
    """What is not finite is no fault of the message: it makes a gradient that is not finite, and is told of as that."""
    for name, value in (("weight", message.weight), ("total", message.total)):
        if value < 0 or HEAVIEST < value < math.inf:
            return f"{name}={value}: give a number from 0 to {HEAVIEST:g}"
    return None
