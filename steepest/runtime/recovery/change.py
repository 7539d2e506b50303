"""A change of a job's processes as a value: kept until it is applied, also across interruptions."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from steepest.core.engine.client import Client
from steepest.core.engine.job import Job
from steepest.core.engine.shared_state import SharedState
from steepest.core.messages.message import Peer
from steepest.core.system import system
from steepest.runtime.cluster import Cluster
from steepest.runtime.places import Place
from steepest.runtime.recovery.decision import Transition
from steepest.runtime.recovery.starting import Start
from steepest.runtime.state.job_state import JobState


@dataclass(frozen=True)
class Applied:
    """The result of one try."""

    transition: Transition
    dead: Collection[Peer]
    joined: Mapping[int, Start]  # further workers, by number
    then: str  # what becomes of missing workers, in words

    @property
    def replaced(self) -> int:
        """The number of dead processes that have successors now, or are left out for good."""
        returned = sum(bool(start.cause) for start in self.joined.values())
        if self.transition.replaced or self.transition.missing:
            return returned + len(self.transition.replaced & set(self.dead))
        return returned + len(self.dead)


@dataclass
class Change:
    """The progress of one change: the next try continues from there."""

    # the job when the change began
    job: Job
    client: Client
    places: Mapping[Peer, Place]
    names: Mapping[Any, Peer]  # of the processes, by the calls that watch them
    step: int
    version: int
    hosts: str  # nodes that are being left, and why, in words
    suspect: tuple[Peer, str] | None = None  # a process whose channel has closed, and why
    halted: bool = False  # whether the survivors were told to stop, and take no step any more
    stopped: SharedState | None = None  # where all stood when nothing was lost
    state: JobState | None = None  # with which the job continues; None until it is taken
    # what is said of each dead process, by the call that watched it
    said: dict[Any, str] = field(default_factory=dict)
    applied: list[Applied] = field(default_factory=list)  # by each try that has got so far
    began: float = field(default_factory=lambda: system().now())
    seconds: dict[str, float] = field(default_factory=dict)  # by part of the work

    @classmethod
    def of(cls, cluster: Cluster, hosts: str) -> Change:
        """Return the change that begins with a job as it is."""
        names = {watch: peer for peer, watch in cluster.watches.items()}
        version, places = cluster.client.position.version, cluster.places
        return cls(cluster.job, cluster.client, places, names, cluster.step, version, hosts)

    @property
    def has_begun(self) -> bool:
        """Whether the job has been altered already, so that the change has to be completed."""
        return self.halted or self.state is not None

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the seconds of a block as those of a part of the work."""
        began = system().now()
        try:
            yield
        finally:
            passed = system().now() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + passed
