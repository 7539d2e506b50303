"""Which pushes are complete, reported by their workers and staged on all servers, and whether their reports agree."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from steepest.core.messages.fields import NO_STEP, RETURNED, StepDigest
from steepest.core.messages.gradients import PushStaged, Report, VersionStaged
from steepest.core.messages.message import Peer, PushId, server_peer, worker_peer
from steepest.core.messages.users import Pushed
from steepest.core.protocol.commit_rules import Staged
from steepest.errors import ProtocolError

#: (worker, parameter) of NaN and infinity.
Culprits = list[tuple[int, str]]
#: The message of a worker, or of a parameter server's user, once every chunk of a push was sent.
Reported = Report | Pushed
#: By worker.
Reports = dict[int, Reported]
#: The most culprits that one message names.
MOST_CULPRITS = 100

#: The most pushes of one worker that are tracked before they are decided on.
MOST_PUSHES = 1024
_MOST_RANGES = 1024
_MOST_CLOSING = 4096


class Staging(ABC):
    """The pushes that are reported or staged, and not decided on.

    A push is complete when its worker has reported it and every server that holds trainable chunks
    has staged it.

    Args:
        holding: the servers that hold trainable chunks.
    """

    def __init__(self, holding: frozenset[int]) -> None:
        self.holding = holding

    @abstractmethod
    def report(self, push: PushId, report: Reported) -> None:
        """Add the report of a push; a copy changes nothing; ProtocolError: the worker reported too much."""

    @abstractmethod
    def complete(self) -> list[Staged]:
        """Return the complete pushes, those of one worker in the order of their numbers."""

    @abstractmethod
    def take(self, pushes: Sequence[Staged]) -> Reports:
        """Remove complete pushes, which are decided on, and return their reports by worker."""

    @abstractmethod
    def end(self, worker: int) -> tuple[list[PushId], bool]:
        """Remove the incomplete pushes of a worker whose process has ceased to be a member.

        Returns:
            These pushes, and whether the worker has a complete one, which may still be committed.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget everything: a new generation begins, and every push is void."""

    @abstractmethod
    def _messages(self, pushes: Sequence[Staged]) -> Collection[VersionStaged | PushStaged]:
        """Return the servers' messages about complete pushes."""

    @abstractmethod
    def _missing(self) -> Mapping[int, Collection[int]]:
        """Return, for each worker with a reported push, the servers that have not staged it."""

    def overflowed(self) -> bool:
        """Return whether a worker has reported an overflow, so that the next version changes nothing."""
        return False

    def culprits(self, pushes: Sequence[Staged]) -> Culprits:
        """Return NaN and infinity in complete pushes: each parameter once for each worker, not for each chunk."""
        culprits = (
            (worker, name)
            for message in self._messages(pushes)
            for worker, name in message.culprits
        )
        return list(dict.fromkeys(culprits))

    def norm(self, pushes: Sequence[Staged]) -> float | None:
        """Return the norm of the gradient that complete pushes make; None if it is not known."""
        return math.sqrt(sum(sorted(message.squares for message in self._messages(pushes))))

    def awaited(self, workers: Iterable[int]) -> list[Peer]:
        """Return which of these workers have not reported; if all have, the servers that have not staged."""
        missing = self._missing()
        silent = [worker_peer(worker) for worker in workers if worker not in missing]
        servers = {server for part in missing.values() for server in part}
        return silent or [server_peer(server) for server in sorted(servers)]


class StagedTogether(Staging):
    """Staging where all contribute to each version: a server sends one message, when all is reduced."""

    def __init__(self, holding: frozenset[int]) -> None:
        super().__init__(holding)
        self._reports: dict[int, tuple[PushId, Reported]] = {}  # by worker
        self._servers: dict[int, VersionStaged] = {}

    def report(self, push: PushId, report: Reported) -> None:
        """Add a report, see `Staging.report`; ProtocolError: another push of this version was reported."""
        if self._reports.setdefault(push.worker, (push, report))[0] != push:
            raise ProtocolError(f"worker {push.worker} has reported another push of this version")

    def staged(self, server: int, staged: VersionStaged) -> None:
        """Add that a server has reduced the gradients of all members."""
        self._servers[server] = staged

    def complete(self) -> list[Staged]:
        """Return all reported pushes once every server has reduced them; none before."""
        if not self._servers.keys() >= self.holding:
            return []
        return [Staged(*push, report.pulled) for push, report in self._reports.values()]

    def take(self, pushes: Sequence[Staged]) -> Reports:
        """Return the reports by worker, and forget everything: the version is decided on."""
        reports = {push.worker: self._reports[push.worker][1] for push in pushes}
        self.clear()
        return reports

    def reports(self) -> dict[int, Report]:
        """Return the reports by worker, without removing them."""
        each = {worker: report for worker, (_, report) in self._reports.items()}
        return {worker: report for worker, report in each.items() if isinstance(report, Report)}

    def overflowed(self) -> bool:
        """Return whether a report says so, see `Staging.overflowed`."""
        reports = (report for _, report in self._reports.values())
        return any(isinstance(each, Report) and each.overflowed for each in reports)

    def end(self, worker: int) -> tuple[list[PushId], bool]:
        """Return no pushes: the generation that begins without the worker voids all; see `Staging.end`."""
        return [], False

    def clear(self) -> None:
        """Forget everything."""
        self._reports = {}
        self._servers = {}

    def _messages(self, pushes: Sequence[Staged]) -> Collection[VersionStaged | PushStaged]:
        return self._servers.values()

    def _missing(self) -> Mapping[int, Collection[int]]:
        missing = self.holding - self._servers.keys()
        return dict.fromkeys(self._reports, missing)


class SequenceSet:
    """A set of sequence numbers, kept as a few ranges however many they are."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # first and last, ascending, none touches the next

    def __contains__(self, sequence: int) -> bool:
        return any(first <= sequence <= last for first, last in reversed(self._ranges))

    def add(self, sequence: int) -> None:
        """Add a number; beyond 1024 ranges the two lowest become one, with the gap between them."""
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
        if len(self._ranges) > _MOST_RANGES:  # numbers missing for so long will not come
            self._ranges[:2] = [(self._ranges[0][0], self._ranges[1][1])]


class ClosedPushes:
    """The pushes that are decided on or void: later messages about them are ignored."""

    def __init__(self) -> None:
        self._counted: dict[tuple[int, int], SequenceSet] = {}

    def __contains__(self, push: PushId) -> bool:
        counted = self._counted.get(push[:2])
        return counted is not None and push.sequence in counted

    def add(self, push: PushId) -> None:
        """Add a push."""
        self._counted.setdefault(push[:2], SequenceSet()).add(push.sequence)

    def forget(self, worker: int) -> None:
        """Remove all pushes of a worker, which will send nothing more."""
        for key in [key for key in self._counted if key[0] == worker]:
            del self._counted[key]

    def clear(self) -> None:
        """Remove all pushes: a new generation begins, and older messages are refused for that."""
        self._counted.clear()


@dataclass
class _TrackedPush:
    """A push with its report, and the messages of the servers that have staged it."""

    report: Reported | None = None
    servers: dict[int, PushStaged] = field(default_factory=dict)


class StagedEach(Staging):
    """Staging under a rule that chooses among pushes: a server sends one message for each, when it has it."""

    def __init__(self, holding: frozenset[int]) -> None:
        super().__init__(holding)
        self._tracked: dict[PushId, _TrackedPush] = {}
        self._complete: dict[PushId, Staged] = {}
        self._closed = ClosedPushes()
        # by worker, the ends of its closed channels: servers, and None for the coordinator
        self._closing: dict[int, set[int | None]] = {}

    def report(self, push: PushId, report: Reported) -> None:
        """Add the report of a push, see `Staging.report`; the report of a closed push is ignored.

        Raises:
            ProtocolError: too many other pushes of the worker are not complete.
        """
        if push not in self._closed:
            self._track(push).report = report
            self._check_complete(push)

    def awaited_by_push(self) -> list[tuple[PushId, list[Peer]]]:
        """Return the incomplete pushes, each with its worker or the servers that are waited for."""
        return [
            (
                push,
                [server_peer(server) for server in sorted(self.holding - progress.servers.keys())]
                or [worker_peer(push.worker)],
            )
            for push, progress in list(self._tracked.items())
            if push not in self._complete
        ]

    def is_closed(self, push: PushId) -> bool:
        """Return whether a push is decided on or void, so that messages about it come too late."""
        return push in self._closed

    def staged(self, server: int, staged: PushStaged) -> None:
        """Note that a server has staged all of a push; a closed push is ignored.

        Raises:
            ProtocolError: too many other pushes of the worker are not complete.
        """
        push = staged.push
        if push not in self._closed:
            self._track(push).servers[server] = staged
            self._check_complete(push)

    def _track(self, push: PushId) -> _TrackedPush:
        """Return the record of a push, which its first message creates."""
        progress = self._tracked.get(push)
        if progress is None:
            if (
                len(self._tracked) >= MOST_PUSHES
                and sum(other.worker == push.worker for other in self._tracked) >= MOST_PUSHES
            ):
                raise ProtocolError(
                    f"{MOST_PUSHES} pushes of worker {push.worker} are not complete"
                )
            progress = self._tracked[push] = _TrackedPush()
        return progress

    def _check_complete(self, push: PushId) -> None:
        """Make a push complete if nothing of it is missing."""
        progress = self._tracked[push]
        if (
            progress.report is not None
            and progress.servers.keys() >= self.holding
            and push not in self._complete
        ):
            self._complete[push] = Staged(*push, progress.report.pulled)

    def complete(self) -> list[Staged]:
        """Return the complete pushes in the order in which they became so."""
        return list(self._complete.values())

    def norm(self, pushes: Sequence[Staged]) -> float | None:
        """Return the norm of one push; None for several, whose mean is formed later."""
        return super().norm(pushes) if len(pushes) == 1 else None

    def take(self, pushes: Sequence[Staged]) -> Reports:
        """Remove and close complete pushes, and return their reports by worker."""
        reports = {}
        for push in pushes:
            report = self._tracked.pop(push.id).report
            assert report is not None
            reports[push.worker] = report
            del self._complete[push.id]
            self._closed.add(push.id)
        return reports

    def abandon(self, worker: int, server: int | None) -> list[PushId]:
        """Close and return the pushes that a user cannot complete, as one of its channels closed.

        The user is forgotten when all its channels are closed; until then messages about its pushes may still
        arrive from other processes.

        Args:
            server: the other end of the channel, None for the coordinator.
        """
        if server is not None and server not in self.holding:
            return []
        closing = self._closing.setdefault(worker, set())
        closing.add(server)
        if len(self._closing) > _MOST_CLOSING:  # one that was connected to some servers only
            oldest = next(iter(self._closing))
            del self._closing[oldest]
            self._closed.forget(oldest)
        all_closed = closing >= {None, *self.holding}
        void = []
        for push, progress in self._tracked.items():
            missing = progress.report is None if server is None else server not in progress.servers
            if push.worker == worker and push not in self._complete and (missing or all_closed):
                void.append(push)
        self._close(void)
        if all_closed:
            del self._closing[worker]
            self._closed.forget(worker)
        return void

    def end(self, worker: int) -> tuple[list[PushId], bool]:
        """Close a worker's incomplete pushes, see `Staging.end`; messages may still arrive."""
        own = [push for push in self._tracked if push.worker == worker]
        void = [push for push in own if push not in self._complete]
        self._close(void)
        return void, len(void) < len(own)

    def _close(self, pushes: Iterable[PushId]) -> None:
        """Close pushes that are void."""
        for push in pushes:
            del self._tracked[push]
            self._closed.add(push)

    def clear(self) -> None:
        """Forget everything."""
        self._tracked.clear()
        self._complete.clear()
        self._closed.clear()

    def _messages(self, pushes: Sequence[Staged]) -> Collection[VersionStaged | PushStaged]:
        return [message for push in pushes for message in self._tracked[push.id].servers.values()]

    def _missing(self) -> Mapping[int, Collection[int]]:
        return {
            push.worker: self.holding - progress.servers.keys()
            for push, progress in self._tracked.items()
            if progress.report is not None
        }


def clip_factor(norm: float, greatest: float) -> float:
    """Return the factor by which `torch.nn.utils.clip_grad_norm_` multiplies a gradient.

    Args:
        norm: of the gradient; NaN gives NaN.
        greatest: the norm that it may have.

    Example:
        >>> round(clip_factor(4.0, 1.0), 3), clip_factor(0.5, 1.0)
        (0.25, 1.0)
    """
    factor = greatest / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor


#: Hyperparameters by parameter group that differ from the optimizer's own; None for those of its schedule.
Hyper = list[dict[str, Any]] | None

_BY_METRIC = (
    "on all workers they have to be the same: gather what they are made of first (steepest.gather), give the scheduler "
    "to steepest.prepare(), and keep what counts for them by steepest.register()"
)
_BY_STEPS = (
    "all workers are to take the same steps: decide by what steepest.gather() returns, and keep counters of your own "
    "by steepest.register()"
)
_BY_PASSES = (
    "the gradients of all workers are to be made of as many: accumulate over equally many batches, or say by "
    "steepest.weight() what the batch weighs"
)
_MOST_SHOWN = 8  # workers that an error names


class UnlikeError(Exception):
    """The reports of one update differ: the text names what differs, each worker's value, and the remedy."""


def agreed(
    reports: Reports, groups: Sequence[Mapping[str, Any]], *, needs_all: bool
) -> tuple[Hyper, float | None]:
    """Return the hyperparameters of an update and its greatest norm, as workers report them; None where none does.

    Args:
        reports: of the update's pushes.
        groups: the optimizer's own hyperparameters, by parameter group, for errors.
        needs_all: whether every worker contributes to each update. Otherwise the first report counts: other workers
            may be in another epoch.

    Raises:
        UnlikeError: every worker contributes to each update, and their reports differ.
    """
    first: Report | None = None
    alike = True
    for report in reports.values():
        if isinstance(report, Report) and (report.digest is not None or report.total):
            first = first or report
            alike = alike and report.digest == first.digest
            alike = alike and report.hyper == first.hyper and report.clip == first.clip
    if first is None:
        return None, None
    if needs_all and not alike:
        _compare({w: r for w, r in reports.items() if isinstance(r, Report)}, groups)
    return first.hyper, first.clip


def _compare(reports: Mapping[int, Report], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise UnlikeError if two reports differ in a field that both have."""
    reports = {w: r for w, r in reports.items() if r.digest is not None or r.total}
    digests = {worker: report.digest for worker, report in reports.items() if report.digest}

    def differ(part: Callable[[StepDigest], Any]) -> bool:
        values = (part(digest) for digest in digests.values())
        return len({each for each in values if each is not None}) > 1

    if differ(lambda digest: digest[:3] if digest.step is not None else None) or differ(
        lambda digest: digest.optimizer
    ):
        values = {worker: _in_words(digest) for worker, digest in digests.items()}
        raise _unlike("the step that they take", values, "is", _BY_STEPS)
    for at in range(max(len(report.hyper or ()) for report in reports.values())):
        own: Mapping[str, Any] = groups[at] if at < len(groups) else {}
        by_worker = {
            worker: report.hyper[at] if report.hyper else {} for worker, report in reports.items()
        }
        for name in dict.fromkeys(name for changed in by_worker.values() for name in changed):
            by_value = {
                worker: changed.get(name, own.get(name)) for worker, changed in by_worker.items()
            }
            if len({*map(repr, by_value.values())}) > 1:
                where = f" of parameter group {at}" if len(groups) > 1 else ""
                raise _unlike(f"{name}{where}", by_value, "has", _BY_METRIC)
    norms = {worker: report.clip for worker, report in reports.items()}
    if len({*norms.values()}) > 1:
        shown = {worker: "no norm" if norm is None else norm for worker, norm in norms.items()}
        raise _unlike("the norm by which gradients are clipped", shown, "has", _BY_METRIC)
    if differ(lambda digest: digest.passes):
        passes = {worker: digest.passes for worker, digest in digests.items()}
        counted = {worker: count for worker, count in passes.items() if count is not None}
        raise _unlike("the number of backward passes in a step", counted, "has", _BY_PASSES)


def _unlike(what: str, values: Mapping[int, Any], verb: str, do: str) -> UnlikeError:
    """Return the error that names workers and their values; of many workers, at most two for each value."""
    by_value: dict[str, list[int]] = {}
    for worker, value in sorted(values.items()):
        by_value.setdefault(str(value), []).append(worker)
    shown = sorted((worker, value) for value, own in by_value.items() for worker in own[:2])
    listed = ", ".join(f"worker {worker} {verb} {value}" for worker, value in shown[:_MOST_SHOWN])
    return UnlikeError(f"workers disagree about {what}: {listed}; {do}")


def _in_words(digest: StepDigest) -> str:
    """Return the position of a loop and the optimizer that it steps, in words."""
    if digest.optimizer == RETURNED:
        return "behind its loop: its function has returned"
    where = f"in epoch {digest.epoch}, batch {digest.batch} of the job"
    if digest.optimizer == NO_STEP:
        return f"{where}, and takes no step there"
    return f"{where}, at its step {digest.step} there, of optimizer {digest.optimizer}"
