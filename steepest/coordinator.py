"""The coordinator: decides what is committed. Events in, messages out; no I/O, no tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from steepest.comm.message import Kind, Message, Peer, Send, server_peer, worker_peer
from steepest.errors import ProtocolError, describe_error

Outgoing = list[tuple[Peer, Message]]


class Staged(NamedTuple):
    """A worker's push that lies complete on every server: who, its own count, the version it pulled."""

    worker: int
    sequence: int
    pulled: int


#: A commit rule: of the members and the staged pushes (oldest first), those to commit as the next
#: version; empty to wait. The rule is the mode: everything else is the same for all of them.
CommitRule = Callable[[frozenset[int], tuple[Staged, ...]], tuple[Staged, ...]]


def commit_all(members: frozenset[int], staged: tuple[Staged, ...]) -> tuple[Staged, ...]:
    """Synchronous: one push of every member, in the order of the workers."""
    if {push.worker for push in staged} >= members:
        return tuple(sorted(staged))
    return ()


@dataclass
class _Report:
    """What a worker said about one push."""

    sequence: int
    pulled: int
    total: float
    meta: dict[str, Any]


@dataclass
class _Open:
    """The step that is being worked on."""

    reports: dict[int, _Report] = field(default_factory=dict)
    staged_on: dict[int, dict[str, Any]] = field(default_factory=dict)  # server -> what STAGED said
    since: float = math.inf  # when it was opened, on the caller's clock


class Coordinator:
    """Membership, versions and commits of one job.

    Args:
        members: indices of the workers that must join before the first step.
        servers: indices of all servers.
        holding: those of them that hold trainable chunks, whose staging is awaited.
        rule: the commit rule.
        hyperparameters: of each step, by parameter group; what differs from the servers' own.
        step_timeout: seconds after which an open step is given up.
    """

    def __init__(
        self,
        *,
        members: frozenset[int],
        servers: tuple[int, ...],
        holding: frozenset[int],
        rule: CommitRule,
        hyperparameters: Callable[[int], list[dict[str, Any]]],
        step_timeout: float,
    ) -> None:
        self.version = 0
        self.generation = 0
        self.limit = 0
        self.joined: set[int] = set()
        self.gone: dict[Peer, str] = {}  # members and servers whose channel closed, and why
        self._members = members
        self._servers = servers
        self._holding = holding
        self._rule = rule
        self._hyperparameters = hyperparameters
        self._step_timeout = step_timeout
        self._stats = True
        self._client: Peer | None = None
        self._waiting: list[tuple[Peer, int]] = []  # clients that installed and wait for the members
        self._open = _Open()
        self._now = 0.0
        self.committed = 0

    # -- events --------------------------------------------------------------------------------

    def handle(self, source: Peer, message: Message) -> Outgoing:
        """Acts on one message; returns what is to be sent.

        Raises:
            ProtocolError: a kind that no coordinator receives.
        """
        match message.kind:
            case Kind.JOIN:
                return self._join(source.index)
            case Kind.REPORT:
                return self._report(source.index, message)
            case Kind.STAGED:
                return self._staged(source.index, message)
            case Kind.FAILED:
                return self._failed(source.index, message)
            case Kind.ASK:
                return self._ask(source, message)
            case Kind.READ:
                return self._read(source, message)
            case Kind.INSTALL:
                return self._install(source, message)
            case Kind.STATS:
                counters = {
                    "version": self.version,
                    "generation": self.generation,
                    "committed": self.committed,
                }
                return [(source, Message(Kind.STATS, sequence=message.sequence, meta=counters))]
            case _:
                raise ProtocolError(f"a coordinator does not take {message.kind.name}")

    def tick(self, now: float) -> Outgoing:
        """Time has passed: gives an open step up when its deadline is over."""
        self._now = now
        if self._client is None or self.version >= self.limit:
            return []
        if self._open.since == math.inf:
            self._open.since = now
        if now - self._open.since < self._step_timeout:
            return []
        return self._fail({"reason": "deadline", "awaited": self._awaited(), "seconds": self._step_timeout})

    def lost(self, peer: Peer, reason: str) -> Outgoing:
        """A peer's channel closed."""
        if peer.role == "worker" and peer.index in self._members:
            self.joined.discard(peer.index)
        elif peer.role != "server":
            if peer == self._client:
                self._client = None
            return []
        self.gone[peer] = reason
        if self.version < self.limit:
            return self._fail(self._loss())
        return self._begin_generation(reload=False)  # whoever asks for the next step is told

    # -- decisions -----------------------------------------------------------------------------

    def _join(self, worker: int) -> Outgoing:
        if worker not in self._members:
            raise ProtocolError(f"worker {worker} is not a member of this job")
        self.joined.add(worker)
        self.gone.pop(worker_peer(worker), None)
        if self.joined < self._members:
            return []
        asked = self.limit - self.version  # steps may be asked for before everybody is there
        out = self._begin_generation(reload=True)
        self.limit += asked
        return out + self._grant()

    def _grant(self) -> Outgoing:
        """Tells workers how far they may go."""
        if self.joined < self._members:
            return []
        meta = {"stats": self._stats}
        return [
            (worker_peer(worker), Message(Kind.GRANT, self.generation, version=self.limit, meta=meta))
            for worker in sorted(self.joined)
        ]

    def _begin_generation(self, *, reload: bool) -> Outgoing:
        """Voids every staged push; with `reload`, servers send all weights to all workers."""
        self.generation += 1
        self.limit = self.version
        self._open = _Open()
        install = reload and bool(self._waiting)  # otherwise what clients put may not be whole yet
        meta = {"workers": sorted(self.joined), "reload": reload, "install": install}
        out = self._to_servers(Kind.MEMBERS, meta=meta)
        for worker in sorted(self.joined):
            message = Message(Kind.MEMBERS, generation=self.generation, version=self.version, meta=meta)
            out.append((worker_peer(worker), message))
        if self.joined == self._members:
            for client, sequence in self._waiting:
                installed = Message(Kind.INSTALLED, self.generation, sequence=sequence, version=self.version)
                out.append((client, installed))
            self._waiting.clear()
        return out

    def _to_servers(self, kind: Kind, **fields: Any) -> Outgoing:
        return [
            (server_peer(server), Message(kind, generation=self.generation, version=self.version, **fields))
            for server in self._servers
        ]

    def _ask(self, source: Peer, message: Message) -> Outgoing:
        self._client = source
        meta = message.values()
        if meta.get("revoke"):
            out = self._begin_generation(reload=False)
            stopped = Message(Kind.INSTALLED, self.generation, sequence=message.sequence, version=self.version)
            return [*out, (source, stopped)]
        if self.gone:
            return self._fail(self._loss())
        self._stats = bool(meta.get("stats", True))
        if self.version == self.limit:
            self._open.since = math.inf  # the clock of a step starts when it is asked for
        self.limit += int(meta["steps"])
        return self._grant()

    def _read(self, source: Peer, message: Message) -> Outgoing:
        """Orders a snapshot between two commits, so that all servers send one version."""
        meta = {"reader": [source.role, source.index], "what": message.values().get("what", "weights")}
        return self._to_servers(Kind.SNAPSHOT, sequence=message.sequence, meta=meta)

    def _install(self, source: Peer, message: Message) -> Outgoing:
        self._client = source
        if self.gone:
            return [(source, Message(Kind.INSTALLED, sequence=message.sequence, meta=self._loss()))]
        self.version = self.limit = message.version
        self._waiting.append((source, message.sequence))
        if self.joined == self._members:
            return self._begin_generation(reload=True)
        return []  # the client waits for the members

    def _report(self, worker: int, message: Message) -> Outgoing:
        if message.generation != self.generation or message.version != self.version:
            return []  # of a generation or a version that is over
        report = _Report(message.sequence, message.version, message.total, message.values())
        self._open.reports[worker] = report
        return self._commit_if_ready()

    def _staged(self, server: int, message: Message) -> Outgoing:
        if message.generation != self.generation or message.version != self.version:
            return []
        self._open.staged_on[server] = message.values()
        return self._commit_if_ready()

    def _commit_if_ready(self) -> Outgoing:
        if not self._open.staged_on.keys() >= self._holding:
            return []
        staged = tuple(Staged(w, r.sequence, r.pulled) for w, r in self._open.reports.items())
        chosen = self._rule(frozenset(self._members), staged)
        if not chosen:
            return []
        culprits = {(w, name): None for s in self._open.staged_on.values() for w, name in s.get("culprits", [])}
        if culprits:  # each once, although a tensor may lie in many chunks
            return self._fail({"reason": "nonfinite", "culprits": [list(culprit) for culprit in culprits]})
        return self._commit(chosen)

    def _commit(self, chosen: tuple[Staged, ...]) -> Outgoing:
        reports = {push.worker: self._open.reports[push.worker] for push in chosen}
        try:
            hyper = self._hyperparameters(self.version)
        except Exception as error:  # noqa: BLE001 - the user's schedule; sent to the driver with its traceback
            return self._fail({"reason": "schedule", **describe_error(error)})
        meta: dict[str, Any] = {"contributions": [[push.worker, push.sequence] for push in chosen]}
        if any(hyper):
            meta["hyper"] = hyper
        staleness = [self.version - push.pulled for push in chosen]
        self.version += 1
        self.committed += 1
        self._open = _Open(since=self._now if self.version < self.limit else math.inf)
        out = self._to_servers(Kind.COMMIT, weight=1.0, meta=meta)
        if self._client is not None:
            result = {"staleness": staleness, **summarize(reports, self._stats)}
            out.append((self._client, Message(Kind.RESULT, self.generation, version=self.version, meta=result)))
        return out

    def _loss(self) -> dict[str, Any]:
        peer, why = next(iter(self.gone.items()))
        return {"reason": "lost", "peer": [peer.role, peer.index], "why": why}

    def _failed(self, worker: int, message: Message) -> Outgoing:
        if message.generation != self.generation:
            return []
        return self._fail({"reason": "raised", "worker": worker, **message.values()})

    def _fail(self, meta: dict[str, Any]) -> Outgoing:
        """Gives the open step up: nothing of it is applied, all staged pushes are void."""
        meta["step"] = self.version
        out = self._begin_generation(reload=False)
        if self._client is not None:
            out.append((self._client, Message(Kind.FAILURE, self.generation, version=self.version, meta=meta)))
        return out

    def _awaited(self) -> list[str]:
        silent = [str(worker_peer(w)) for w in sorted(self._members) if w not in self._open.reports]
        if silent:
            return silent
        return [str(server_peer(s)) for s in sorted(self._holding) if s not in self._open.staged_on]


def summarize(reports: dict[int, _Report], stats: bool) -> dict[str, Any]:
    """Loss, metrics and timings of a step over its workers: means by sample weight, times by worker."""
    summary: dict[str, Any] = {
        "samples": sum(int(report.meta["samples"]) for report in reports.values()),
        "bytes_pushed": sum(int(report.meta["bytes"]) for report in reports.values()),
    }
    if not stats:
        return summary

    def mean(values: list[tuple[float, float]]) -> float:
        total = sum(weight for _, weight in values)
        return sum(v * weight for v, weight in values) / total if total else math.nan

    summary["loss"] = mean([(r.meta["loss"], r.total) for r in reports.values() if r.total])
    names = sorted({name for r in reports.values() for name in r.meta["metrics"]})
    summary["metrics"] = {
        name: mean([(r.meta["metrics"][name], r.total) for r in reports.values() if name in r.meta["metrics"]])
        for name in names
    }
    parts = sorted({name for r in reports.values() for name in r.meta["timings"]})
    summary["timings"] = {
        name: sum(r.meta["timings"].get(name, 0.0) for r in reports.values()) / len(reports) for name in parts
    }
    return summary


class CoordinatorRole:
    """A coordinator in a process: sends what it decides."""

    def __init__(self, coordinator: Coordinator, send: Send) -> None:
        self.coordinator = coordinator
        self._send = send

    def handle(self, source: Peer, message: Message) -> None:
        """Acts on one message."""
        self._carry_out(self.coordinator.handle(source, message))

    def destination(self, message: Message, size: int) -> None:
        """No coordinator takes payloads."""
        raise ProtocolError(f"{message.kind.name} with {size} bytes of payload for the coordinator")

    def lost(self, peer: Peer, reason: str) -> None:
        """A peer's channel closed."""
        self._carry_out(self.coordinator.lost(peer, reason))

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._carry_out(self.coordinator.tick(now))

    def _carry_out(self, decisions: Outgoing) -> None:
        for peer, message in decisions:
            self._send(peer, message)
