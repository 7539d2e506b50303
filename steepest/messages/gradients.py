"""The messages of a step: gradients to servers, what is staged to the coordinator, commits, weights to workers."""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass, field
from typing import Annotated, Any

from steepest.messages.fields import (
    ANYTHING,
    COUNT,
    CULPRITS,
    FINITE,
    FLAG,
    NUMBER,
    PUSHES,
    READERS,
    RECORD,
    STATE,
    WORKER,
    many,
    numbers_by_name,
    plain_by_name,
)
from steepest.messages.message import Kind, PushId
from steepest.messages.schema import (
    Body,
    Chunk,
    Generation,
    Header,
    Incarnation,
    Payload,
    Sequence,
    Version,
    body,
)

#: The version whose weights a gradient was computed from.
Pulled = Annotated[int, Header("version")]
#: Sample weight of one unit of a payload: a chunk of a gradient is the payload times this.
Unit = Annotated[float, Header("weight", weighs=True)]
#: Summed weight of the samples behind a gradient.
Total = Annotated[float, Header("total", weighs=True)]
#: Positions, in the layout, of the parameters of a chunk for which there is no gradient.
Absent = Annotated[Row[int], many(COUNT)]


@body(Kind.PUSH)
@dataclass(frozen=True)
class Push(Body):
    """One chunk of a gradient; from a worker to a server, or to the aggregator of its host, as the chunk is complete.

    A parameter server's user pushes an update of its arrays, as generation 0, incarnation 0 and in
    units of 1. Without a payload the chunk has no gradient, and counts as zero.
    """

    generation: Generation
    incarnation: Incarnation
    sequence: Sequence
    pulled: Pulled
    chunk: Chunk
    unit: Unit = 0.0
    total: Total = 0.0
    absent: Absent = ()
    payload: Payload = field(default=None, compare=False)


@body(Kind.HOST_PUSH)
@dataclass(frozen=True)
class HostPush(Body):
    """One chunk of the sum of the gradients of a host's workers; from their aggregator to a server of another host."""

    generation: Generation
    pulled: Pulled
    chunk: Chunk
    unit: Unit
    total: Total
    pushes: Annotated[tuple[PushId, ...], PUSHES]
    absent: Absent = ()
    payload: Payload = field(default=None, compare=False)


@body(Kind.VERSION_STAGED)
@dataclass(frozen=True)
class VersionStaged(Body):
    """The gradients of all members for the next version are reduced; from a server to the coordinator.

    Attributes:
        version: from which they were computed.
        squares: sum of the squares of the mean, over the chunks that this server answers for; None
            where gradients are not looked at.
        culprits: (worker, parameter) of NaN and infinity.
    """

    generation: Generation
    version: Version
    squares: Annotated[float | None, NUMBER] = None
    culprits: Annotated[Row[Row[Any]], CULPRITS] = ()


@body(Kind.PUSH_STAGED)
@dataclass(frozen=True)
class PushStaged(Body):
    """Every chunk of one push is there; from a server to the coordinator. `squares` is of that push alone."""

    generation: Generation
    incarnation: Incarnation
    sequence: Sequence
    pulled: Pulled
    worker: Annotated[int, WORKER]
    squares: Annotated[float | None, NUMBER] = None
    culprits: Annotated[Row[Row[Any]], CULPRITS] = ()

    @property
    def push(self) -> PushId:
        """Return which push it is."""
        return PushId(self.worker, self.incarnation, self.sequence)


@body(Kind.REPORT)
@dataclass(frozen=True)
class Report(Body):
    """Every chunk of a gradient has left; from a worker to the coordinator.

    Attributes:
        total: weight of its samples.
        samples: how many they are.
        bytes_pushed: of this gradient, to other processes.
        bytes_pulled: of weights that came from other processes since the last report.
        loss: mean over the samples; None, as metrics and timings are empty, where no statistics are
            wanted.
        metrics: means by name.
        timings: seconds by part of the step.
    """

    generation: Generation
    incarnation: Incarnation
    sequence: Sequence
    pulled: Pulled
    total: Annotated[float, Header("total", weighs=True)]
    samples: Annotated[int, COUNT]
    bytes_pushed: Annotated[int, COUNT]
    bytes_pulled: Annotated[int, COUNT]
    loss: Annotated[float | None, NUMBER] = None
    metrics: Annotated[dict[str, float], numbers_by_name()] = field(default_factory=dict)
    timings: Annotated[dict[str, float], numbers_by_name()] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision(Body):
    """What the coordinator tells all servers, in one order; where servers remember it, with what comes with it.

    Attributes:
        generation, version: at which the servers are once they have carried it out.
        number: its number among the decisions, from 1; 0 where servers have no copies and remember
            nothing.
        state: what another coordinator needs to go on from here.
        schedule: where the schedule of hyperparameters stands, in some of the decisions.
    """

    generation: Generation
    version: Version
    number: Annotated[int, COUNT] = field(default=0, kw_only=True)
    state: Annotated[dict[str, Any] | None, STATE] = field(default=None, kw_only=True)
    schedule: Annotated[dict[str, Any] | None, RECORD] = field(default=None, kw_only=True)


@body(Kind.COMMIT)
@dataclass(frozen=True)
class Commit(Decision):
    """Apply these pushes as the next version; from the coordinator to every server.

    Attributes:
        rate: factor of the learning rate.
        pushes: in the order in which they are added up.
        readers: (worker, sequence) of the workers that are sent the weights, and what for.
        hyper: hyperparameters by group, where they differ from the servers' own; None where none
            does.
        skip: whether nothing is applied, because of NaN or infinity.
        clip: factor of the gradient.
        entry: of the log, if one is kept and servers remember it.
    """

    rate: Annotated[float, Header("weight", FINITE)]
    pushes: Annotated[tuple[PushId, ...], PUSHES]
    readers: Annotated[Row[Row[int]], READERS]
    hyper: Annotated[list[dict[str, Any]] | None, many(plain_by_name())] = None
    skip: Annotated[bool, FLAG] = False
    clip: Annotated[float, NUMBER] = 1.0
    entry: Annotated[list[Any] | None, many(ANYTHING)] = None


@body(Kind.DISCARD)
@dataclass(frozen=True)
class Discard(Decision):
    """These pushes will not be committed; from the coordinator to every server.

    Attributes:
        readers: (worker, sequence) of the workers that are sent the weights instead.
    """

    pushes: Annotated[tuple[PushId, ...], PUSHES]
    readers: Annotated[Row[Row[int]], READERS] = ()


@body(Kind.REFRESH)
@dataclass(frozen=True)
class Refresh(Decision):
    """Send the weights to workers that go on, and hold older ones; from the coordinator to every server."""

    readers: Annotated[Row[Row[int]], READERS]


@body(Kind.LOGGED)
@dataclass(frozen=True)
class Logged(Body):
    """A commit is known in another process than the coordinator's; from a server there to the coordinator."""

    generation: Generation
    version: Version


@body(Kind.WEIGHTS)
@dataclass(frozen=True)
class Weights(Body):
    """One chunk of the weights; from a server to its readers, or from an aggregator to the workers of its host.

    Attributes:
        sequence: of the reader's request or push that it answers; 0 for workers.
        reload: whether the chunks that are not trained come, too.
    """

    generation: Generation
    sequence: Sequence
    version: Version
    chunk: Chunk
    reload: Annotated[bool, FLAG] = False
    payload: Payload = field(default=None, compare=False)


@body(Kind.WEIGHTS_SHARED)
@dataclass(frozen=True)
class WeightsShared(Body):
    """The vector in which the weights of a host lie, as payload; from an aggregator to the workers of the host."""

    generation: Generation
    payload: Payload = field(default=None, compare=False)
