"""Scripted faults in a job of one thread: of its processes, and of messages between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from steepest.core.engine.job import ModelCreator
from steepest.core.engine.server import Server
from steepest.core.messages.message import Kind, Message, Peer, worker_peer
from steepest.core.protocol.coordinator import Coordinator
from steepest.core.transport.router import Router
from steepest.errors import ConfigurationError, ShutdownError
from steepest.testing.faults import OF_MESSAGES, Clock, Fault, Moment, WatchedCreator
from steepest.testing.moments import watch_applying
from steepest.testing.network import Link, Network


class ScriptedJob(Protocol):
    """The job of one thread in which faults happen."""

    network: Network
    servers: list[Server]
    coordinator: Coordinator
    lives: list[int]  # of each worker, the number of processes before the present one

    def router(self, peer: Peer) -> Router:
        """Return the process in which a role lives now."""


class FaultScript:
    """The faults of an `InProcessCluster`.

    Args:
        cluster: in which they happen.
        faults: in any order.
        model_creator: of the cluster's models.
        batches: that each replica computes for a step.

    Attributes:
        creator: makes the models, which report the moments of workers' steps.
        unmet: the faults that have not happened in any life yet.

    Raises:
        ConfigurationError: there is no such process.
    """

    def __init__(
        self,
        cluster: ScriptedJob,
        faults: Sequence[Fault],
        model_creator: ModelCreator,
        batches: int,
    ) -> None:
        self._cluster = cluster
        self._faults = tuple(faults)
        # How often each fault has happened: by its position in `faults`, and life.
        self._happened: Counter[tuple[int, int]] = Counter()
        self._batches = batches
        self.creator = WatchedCreator(model_creator, self._make_clock)

    def check(self, counts: dict[str, int]) -> None:
        """Check that all processes with faults exist, given each role's count; ConfigurationError otherwise."""
        for fault in self._faults:
            for role, index in [(fault.role, fault.index), *([fault.peer] if fault.peer else [])]:
                if not 0 <= index < counts.get(role, 0):
                    raise ConfigurationError(
                        f"{fault}: there is no {role} {index}; there are {counts}"
                    )

    @property
    def unmet(self) -> list[Fault]:
        """The faults that have not happened yet, in the order in which they were given."""
        met = {position for position, _ in self._happened}
        return [fault for position, fault in enumerate(self._faults) if position not in met]

    def _make_clock(self, worker: int) -> Clock:
        own, life = worker_peer(worker), self._life(worker_peer(worker))

        def reached(step: int, moment: Moment) -> None:
            router = self._cluster.router(own)
            if life != self._life(own) or not self._cluster.network.runs(router):
                raise ShutdownError("the process is dead")
            if moment == "forward":
                self._set_pace(own, step)
            for fault in self._due(own, step, moment):
                if fault.what == "hang":
                    self._cluster.network.hang(router, fault.rounds)
                    continue
                self._act(own, fault)
                if fault.what == "kill":
                    raise ShutdownError("the process is dead")

        return Clock(self._batches, reached)

    def watch(self, server: Server, own: Peer) -> None:
        """Watch a server, a peer, so that its faults happen in the middle of an update."""

        def reached(step: int, moment: Moment, detail: str) -> None:
            for fault in self._due(own, step, moment):
                self._act(own, fault)
                if fault.what == "kill":
                    raise ShutdownError("the process is dead")

        watch_applying(server, reached)

    def __call__(self, link: Link, message: Message) -> list[tuple[Message, int]]:
        """Return the fate of a message at its link: pairs of a message and the further rounds that it takes."""
        source, target = message.source, message.target
        assert source is not None
        assert target is not None
        for peer, moment in self._moments(message, source, target):
            self._set_pace(peer, self._step(peer))
            for fault in self._due(peer, self._step(peer), moment):
                self._act(peer, fault)
        if link.closed:
            return []
        copies, rounds = [message], 0
        for position, fault in enumerate(
            self._faults if source.role in ("worker", "server", "coordinator") else ()
        ):
            if fault.what not in OF_MESSAGES or not fault.concerns(
                source, self._life(source), self._step(source)
            ):
                continue
            key = (position, self._life(source))
            if fault.kind not in (None, message.kind) or fault.peer not in (None, target):
                continue
            if self._happened[key] >= fault.count:
                continue
            self._happened[key] += 1
            link.severed |= fault.what == "drop"
            rounds += int(fault.rounds) if fault.what == "delay" else 0
            copies += [replace(message)] if fault.what == "duplicate" else []
        return [(copy, rounds) for copy in copies]

    def _moments(self, message: Message, source: Peer, target: Peer) -> list[tuple[Peer, Moment]]:
        """Return the moments that come as this message is sent, each with its process."""
        if message.kind in (Kind.PUSH, Kind.HOST_PUSH) and target.role == "server":
            return [(target, "push")]
        if message.kind is not Kind.WEIGHTS:
            return []
        moments: list[tuple[Peer, Moment]] = []
        if source.role == "server" and target.role != "client":
            moments.append((source, "pull"))
        if target.role == "worker" and not self.creator.clocks[target.index].computing:
            moments.append((target, "pull"))
        return moments

    def _due(self, process: Peer, step: int, moment: Moment) -> list[Fault]:
        """Return the faults that are to happen to a process now, and count them as happened."""
        life, faults = self._life(process), []
        for position, fault in enumerate(self._faults):
            if (
                fault.what in (*OF_MESSAGES, "slow")
                or fault.at != moment
                or self._happened[position, life]
            ):
                continue
            if fault.concerns(process, life, step):
                self._happened[position, life] += 1
                faults.append(fault)
        return faults

    def _act(self, process: Peer, fault: Fault) -> None:
        network, router = self._cluster.network, self._cluster.router(process)
        match fault.what:
            case "raise":
                raise RuntimeError(f"scripted: {fault} at {fault.at}")
            case "kill":
                network.remove(router)
            case "hang":
                network.hang(router, fault.rounds)
            case "cut":
                far = None if fault.peer is None else self._cluster.router(Peer(*fault.peer))
                network.cut(router, far, fault.rounds)

    def _set_pace(self, process: Peer, step: int) -> None:
        """Set how slow a process is in a step, by the faults that slow it."""
        life = self._life(process)
        own = [
            (n, f)
            for n, f in enumerate(self._faults)
            if f.what == "slow" and process == (f.role, f.index)
        ]
        now = [(position, fault) for position, fault in own if fault.slows(process, life, step)]
        self._happened.update((position, life) for position, _ in now)
        if own:
            pace = max((fault.factor for _, fault in now), default=1.0)
            self._cluster.network.set_pace(self._cluster.router(process), round(pace))

    def _step(self, process: Peer) -> int:
        if process.role == "worker":
            return self.creator.clocks[process.index].step
        cluster = self._cluster
        return (
            cluster.servers[process.index] if process.role == "server" else cluster.coordinator
        ).version

    def _life(self, process: Peer) -> int:
        return self._cluster.lives[process.index] if process.role == "worker" else 0
