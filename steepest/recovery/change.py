"""A change of a job's processes as a value: kept until it is applied, whatever interrupts it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from steepest.engine.client import Client
from steepest.engine.job import Job
from steepest.messages.message import Peer
from steepest.recovery.applying import Applied
from steepest.recovery.stocktaking import StockTaking
from steepest.runtime.launch import Cluster
from steepest.runtime.places import Place
from steepest.state.stock import Stock


@dataclass
class Change:
    """What is known of one change: the next try goes on from there."""

    # the job when the change began
    job: Job
    client: Client
    places: Mapping[Peer, Place]
    step: int
    version: int
    hosts: str  # nodes that are being left, and why, in words
    taking: StockTaking  # asks the processes what is left of the job
    stock: Stock | None = None  # with which the job continues; None until it is taken
    # what is said of each dead process, by the call that watched it
    said: dict[Any, str] = field(default_factory=dict)
    # of the processes, by the calls that watch them
    names: Mapping[Any, Peer] = field(default_factory=dict)
    applied: list[Applied] = field(default_factory=list)  # by each try that has got so far
    began: float = field(default_factory=lambda: time.monotonic())
    seconds: dict[str, float] = field(default_factory=dict)  # by part of the work

    @classmethod
    def of(cls, cluster: Cluster, hosts: str, taking: StockTaking) -> Change:
        """Return the change that begins with a job as it is."""
        version = cluster.client.position.version
        places = dict(cluster.places)
        names = {watch: peer for peer, watch in cluster.watches.items()}
        return cls(
            cluster.job, cluster.client, places, cluster.step, version, hosts, taking, names=names
        )

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the seconds of a block as those of a part of the work."""
        began = time.monotonic()
        try:
            yield
        finally:
            passed = time.monotonic() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + passed
