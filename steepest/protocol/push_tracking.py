"""What is staged where, as the coordinator sees it: reports of workers, and the servers' word."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from steepest.errors import ProtocolError
from steepest.messages.gradients import PushStaged, Report, VersionStaged
from steepest.messages.message import Peer, PushId, server_peer, worker_peer
from steepest.messages.users import Pushed
from steepest.protocol.commit_rules import Staged

Culprits = list[tuple[int, str]]
#: What a worker, or a parameter server's user, says when all of a push has left.
Reported = Report | Pushed
#: By worker.
Reports = dict[int, Reported]
#: Pairs of a worker and a parameter with NaN or infinity that one message names, of maybe all
#: workers' parameters.
MOST_CULPRITS = 100

#: Pushes of one worker that are remembered before they are committed.
MOST_PUSHES = 1024
_MOST_RANGES = 1024
_MOST_LEFT = 4096


class Staging(Protocol):
    """Pushes on their way to being complete everywhere."""

    def report(self, push: PushId, report: Reported) -> None:
        """A worker says that it has pushed everything."""

    def ready(self) -> list[Staged]:
        """Pushes that are complete on every server and reported, oldest first."""

    def culprits(self, chosen: Sequence[Staged]) -> Culprits:
        """(worker, parameter) of the NaN or infinity in what would be committed."""

    def norm(self, chosen: Sequence[Staged]) -> float | None:
        """Of the gradient that would be committed; None where it is not known."""

    def take(self, done: Sequence[Staged]) -> Reports:
        """Forgets pushes that are decided on; their reports by worker, which are refused from now on."""

    def end(self, worker: int) -> tuple[list[PushId], bool]:
        """A worker is gone: its pushes that are void now, and whether one is complete and may be committed yet."""

    def awaited(self, workers: Iterable[int]) -> list[Peer]:
        """Who has not said what is needed: workers first."""

    def clear(self) -> None:
        """A new generation: everything staged is void."""


@dataclass
class StagedTogether:
    """For rules by which every member contributes to every version: one word of each server per version.

    Args:
        holding: servers that hold trainable chunks.
    """

    holding: frozenset[int]
    _reports: dict[PushId, Reported] = field(default_factory=dict)
    _servers: dict[int, VersionStaged] = field(default_factory=dict)

    def report(self, push: PushId, report: Reported) -> None:
        """Take a worker's report.

        Raises:
            ProtocolError: it has reported another push of this version.
        """
        if push not in self._reports and any(
            other.worker == push.worker for other in self._reports
        ):
            raise ProtocolError(f"worker {push.worker} has reported another push of this version")
        self._reports[push] = report

    def staged(self, server: int, staged: VersionStaged) -> None:
        """Take note that a server has reduced the gradients of all members."""
        self._servers[server] = staged

    def ready(self) -> list[Staged]:
        """All reported pushes, once every server has reduced them."""
        if not self._servers.keys() >= self.holding:
            return []
        return [Staged(*key, report.pulled) for key, report in self._reports.items()]

    def culprits(self, chosen: Sequence[Staged]) -> Culprits:
        """Each once, although a tensor may lie in many chunks."""
        return list(
            dict.fromkeys(
                (w, name) for staged in self._servers.values() for w, name in staged.culprits
            )
        )

    def norm(self, chosen: Sequence[Staged]) -> float | None:
        """Of the mean of all."""
        return _norm(self._servers.values())

    def take(self, done: Sequence[Staged]) -> Reports:
        """Everything is decided on at once."""
        reports = {push.worker: self._reports[push.id] for push in done}
        self.clear()
        return reports

    def end(self, worker: int) -> tuple[list[PushId], bool]:
        """Without it the version cannot be committed: a new generation will void everything."""
        return [], False

    def awaited(self, workers: Iterable[int]) -> list[Peer]:
        """Silent workers, or else silent servers."""
        said = {key.worker for key in self._reports}
        silent = [worker_peer(worker) for worker in workers if worker not in said]
        return silent or [
            server_peer(server) for server in sorted(self.holding - self._servers.keys())
        ]

    def clear(self) -> None:
        """Forgets everything."""
        self._reports = {}
        self._servers = {}


class SequenceSet:
    """Sequence numbers of one process that are done with: a few ranges, however many they are."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # first and last, ascending, none touches the next

    def __contains__(self, sequence: int) -> bool:
        return any(first <= sequence <= last for first, last in reversed(self._ranges))

    def add(self, sequence: int) -> None:
        """This one is done with."""
        if self._ranges and sequence == self._ranges[-1][1] + 1:  # nearly always
            self._ranges[-1] = (self._ranges[-1][0], sequence)
            return
        if sequence in self:
            return
        first = last = sequence
        apart = []
        for low, high in self._ranges:
            if high == sequence - 1:
                first = low
            elif low == sequence + 1:
                last = high
            else:
                apart.append((low, high))
        self._ranges = sorted([*apart, (first, last)])
        if len(self._ranges) > _MOST_RANGES:  # what was left out so long ago will not come
            self._ranges[:2] = [(self._ranges[0][0], self._ranges[1][1])]


class ClosedPushes:
    """Pushes that are done with, committed or not: none of them is taken again."""

    def __init__(self) -> None:
        self._counted: dict[tuple[int, int], SequenceSet] = {}

    def __contains__(self, push: PushId) -> bool:
        counted = self._counted.get(push[:2])
        return counted is not None and push.sequence in counted

    def add(self, push: PushId) -> None:
        """This one is done with."""
        self._counted.setdefault(push[:2], SequenceSet()).add(push.sequence)

    def forget(self, worker: int) -> None:
        """A worker that will send nothing more."""
        for key in [key for key in self._counted if key[0] == worker]:
            del self._counted[key]

    def clear(self) -> None:
        """A new generation: what is older is refused for that."""
        self._counted.clear()


@dataclass
class _Waiting:
    report: Reported | None = None
    servers: dict[int, PushStaged] = field(default_factory=dict)


@dataclass
class StagedEach:
    """For rules that choose among pushes: one word of each server per push.

    Args:
        holding: servers that hold trainable chunks.
    """

    holding: frozenset[int]
    _waiting: dict[PushId, _Waiting] = field(default_factory=dict)
    _ready: dict[PushId, Staged] = field(default_factory=dict)
    _done: ClosedPushes = field(default_factory=ClosedPushes)
    _left: dict[int, set[int | None]] = field(
        default_factory=dict
    )  # who has seen which workers leave

    def report(self, push: PushId, report: Reported) -> None:
        """Take a worker's report; of a push that is decided on it is ignored."""
        if push not in self._done:
            self._await(push).report = report
            self._look(push)

    def is_done(self, push: PushId) -> bool:
        """Whether it is decided on, and what is said of it comes too late."""
        return push in self._done

    def staged(self, server: int, staged: PushStaged) -> None:
        """Take note that a server has all of a push; of one that is decided on it is ignored."""
        push = staged.push
        if push not in self._done:
            self._await(push).servers[server] = staged
            self._look(push)

    def _await(self, key: PushId) -> _Waiting:
        """What is known of a push.

        Raises:
            ProtocolError: too many others of its worker are not complete.
        """
        waiting = self._waiting.get(key)
        if waiting is None:
            if (
                len(self._waiting) >= MOST_PUSHES
                and sum(k.worker == key.worker for k in self._waiting) >= MOST_PUSHES
            ):
                raise ProtocolError(f"{MOST_PUSHES} pushes of worker {key.worker} are not complete")
            waiting = self._waiting[key] = _Waiting()
        return waiting

    def _look(self, key: PushId) -> None:
        waiting = self._waiting[key]
        if (
            waiting.report is not None
            and waiting.servers.keys() >= self.holding
            and key not in self._ready
        ):
            self._ready[key] = Staged(*key, waiting.report.pulled)

    def ready(self) -> list[Staged]:
        """Complete pushes; those of one worker in the order of their sequence numbers."""
        return list(self._ready.values())

    def culprits(self, chosen: Sequence[Staged]) -> Culprits:
        """Each once, although a tensor may lie in many chunks."""
        found: dict[tuple[int, str], None] = {}
        for push in chosen:
            for staged in self._waiting[push.id].servers.values():
                found |= dict.fromkeys((worker, name) for worker, name in staged.culprits)
        return list(found)

    def norm(self, chosen: Sequence[Staged]) -> float | None:
        """Of one push; the mean of several is formed later."""
        return _norm(self._waiting[chosen[0].id].servers.values()) if len(chosen) == 1 else None

    def take(self, done: Sequence[Staged]) -> Reports:
        """These are decided on."""
        reports = {}
        for push in done:
            report = self._waiting.pop(push.id).report
            assert report is not None
            reports[push.worker] = report
            del self._ready[push.id]
            self._done.add(push.id)
        return reports

    def abandon(self, worker: int, server: int | None) -> list[PushId]:
        """A worker's channel to a server (None: to the coordinator) closed: what can never be complete now.

        Some of its words may still be on their way, until everybody has said so.
        """
        if server is not None and server not in self.holding:
            return []
        left = self._left.setdefault(worker, set())
        left.add(server)
        if len(self._left) > _MOST_LEFT:  # whoever was connected to some servers only
            oldest = next(iter(self._left))
            del self._left[oldest]
            self._done.forget(oldest)
        everybody = left >= {None, *self.holding}
        lost = []
        for key, waiting in self._waiting.items():
            missing = waiting.report is None if server is None else server not in waiting.servers
            if key.worker == worker and key not in self._ready and (missing or everybody):
                lost.append(key)
        for key in lost:
            del self._waiting[key]
            self._done.add(key)
        if everybody:
            del self._left[worker]
            self._done.forget(worker)
        return lost

    def end(self, worker: int) -> tuple[list[PushId], bool]:
        """What is not complete is void, although words of it may still be on their way."""
        own = [key for key in self._waiting if key.worker == worker]
        lost = [key for key in own if key not in self._ready]
        for key in lost:
            del self._waiting[key]
            self._done.add(key)
        return lost, len(lost) < len(own)

    def awaited(self, workers: Iterable[int]) -> list[Peer]:
        """Workers that have not reported, or the servers that have not staged what they reported."""
        reported = {
            key.worker: waiting
            for key, waiting in self._waiting.items()
            if waiting.report is not None
        }
        silent = [worker_peer(worker) for worker in workers if worker not in reported]
        missing = {
            server
            for waiting in reported.values()
            for server in self.holding - waiting.servers.keys()
        }
        return silent or [server_peer(server) for server in sorted(missing)]

    def clear(self) -> None:
        """Forgets everything."""
        self._waiting.clear()
        self._ready.clear()
        self._done.clear()


def _norm(servers: Iterable[VersionStaged | PushStaged]) -> float | None:
    """Return the norm by the squares of all servers; None if one did not compute them."""
    squares = [staged.squares for staged in servers]
    known = [each for each in squares if each is not None]
    return math.sqrt(sum(sorted(known))) if len(known) == len(squares) else None


def clip_factor(norm: float, greatest: float) -> float:
    """What a gradient of that norm is multiplied by, as `torch.nn.utils.clip_grad_norm_` does; NaN if it is NaN.

    Example:
        >>> round(clip_factor(4.0, 1.0), 3), clip_factor(0.5, 1.0)
        (0.25, 1.0)
    """
    factor = greatest / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor
