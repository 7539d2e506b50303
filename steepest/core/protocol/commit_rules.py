"""Commit rules: which staged pushes become the next version, as pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from steepest.core.messages.message import PushId


class Staged(NamedTuple):
    """A push that is staged completely on every server."""

    worker: int
    incarnation: int  # number of the worker's process
    sequence: int  # number of the push among those of that process
    pulled: int  # the version whose weights it was computed from

    @property
    def id(self) -> PushId:
        """Its identity: worker, incarnation and sequence number."""
        return PushId(self.worker, self.incarnation, self.sequence)


class Verdict(NamedTuple):
    """What a rule decides on staged pushes."""

    # make the next version, in the order in which they are added up; empty to wait
    commit: tuple[Staged, ...] = ()
    drop: tuple[Staged, ...] = ()  # will never be committed


class CommitRule(Protocol):
    """A mode of training, as pure functions of plain values.

    A worker's *clock* is the number of its pushes that are committed. A commit with the pushes of several
    versions counts as that many versions.

    Attributes:
        needs_all: whether a version needs a push of every member, so that none goes on without one that is lost.
            Its consequences have names of their own: `leases_samples`, `stages_each`.
        same_version: whether a version is made of gradients of the version before it alone. After each commit the
            samples of all other pushes are leased anew, and these are dropped before `decide` sees them.
    """

    needs_all: bool
    same_version: bool

    def decide(self, version: int, members: frozenset[int], staged: Sequence[Staged]) -> Verdict:
        """Return which staged pushes to commit and which to drop; called again until it commits nothing.

        Args:
            version: the present one.
            members: indices of all workers.
            staged: pushes that are staged on all servers, reported, and not decided on; oldest first.
        """

    def may_go_on(self, worker: int, clocks: Mapping[int, int]) -> bool:
        """Return whether a worker may begin its next push, given the clocks of all joined workers."""

    def needs(self, workers: int) -> int:
        """Return how many of a job's workers must have joined before training goes on."""

    def pushes_per_step(self, workers: int) -> int:
        """Return how many pushes make one training step of a job with that many workers."""

    def versions_per_step(self, workers: int) -> int:
        """Return how many versions make one training step, at least 1; each has `pushes_per_update` pushes."""


#: why gradients cannot be clipped; to be formatted with the settings that were given
NO_NORM = (
    "{} where not every worker's gradient is part of each update (backup_workers=): which ones are is decided before "
    "their mean is formed, so that its norm is not known; leave one of them out"
)


def decided(
    rule: CommitRule, version: int, members: frozenset[int], staged: Sequence[Staged]
) -> Verdict:
    """Return what a rule decides; pushes of older weights that it has no use for are dropped.

    Args:
        version, members, staged: as of `CommitRule.decide`.
    """
    if not rule.same_version:
        return rule.decide(version, members, staged)
    late = tuple(push for push in staged if push.pulled < version)
    fresh = [push for push in staged if push.pulled == version] if late else staged
    verdict = rule.decide(version, members, fresh)
    return verdict._replace(drop=late + verdict.drop) if late else verdict


def leases_samples(rule: CommitRule) -> bool:
    """Return whether the coordinator gives workers shares of the samples one by one.

    Otherwise a worker has the share of its own number in each step.
    """
    return not rule.needs_all


def stages_each(rule: CommitRule) -> bool:
    """Return whether servers keep each push by itself until the rule has chosen the pushes of an update.

    Otherwise they add pushes up as they arrive.
    """
    return not rule.needs_all


def pushes_per_update(rule: CommitRule, workers: int) -> int:
    """Return how many pushes make an update in a job with that many workers: 1 if each push is an update.

    Example:
        >>> [pushes_per_update(rule, 4) for rule in (CommitAll(), CommitFirst(1), CommitEach())]
        [4, 3, 1]
    """
    return rule.pushes_per_step(workers) // rule.versions_per_step(workers)


def knows_norms(rule: CommitRule, workers: int) -> bool:
    """Return whether the norm of an update's gradient is known when the update is committed.

    It is not if a rule chooses several of the staged pushes: servers form their mean only then.
    """
    return not stages_each(rule) or pushes_per_update(rule, workers) == 1


@dataclass(frozen=True)
class CommitAll:
    """Synchronous training: a version is one push of every member."""

    needs_all = True
    same_version = True

    def decide(self, version: int, members: frozenset[int], staged: Sequence[Staged]) -> Verdict:
        """Commit all staged pushes, ordered by worker, once each member has one."""
        return (
            Verdict(tuple(sorted(staged)))
            if {push.worker for push in staged} >= members
            else Verdict()
        )

    def may_go_on(self, worker: int, clocks: Mapping[int, int]) -> bool:
        """Return True: a worker waits for new weights alone."""
        return True

    def needs(self, workers: int) -> int:
        """Return the number of all workers."""
        return workers

    def pushes_per_step(self, workers: int) -> int:
        """Return one push for each worker."""
        return workers

    def versions_per_step(self, workers: int) -> int:
        """Return 1."""
        return 1


@dataclass(frozen=True)
class CommitFirst:
    """Synchronous training with backup workers (Chen et al. 2016).

    Args:
        backup: how many of the workers' pushes for a version are not waited for.

    Reference: Revisiting Distributed Synchronous SGD, arXiv:1604.00981.
    """

    backup: int
    needs_all = False
    same_version = True

    def decide(self, version: int, members: frozenset[int], staged: Sequence[Staged]) -> Verdict:
        """Commit the first pushes once they are enough."""
        enough = self.pushes_per_step(len(members))
        return Verdict(tuple(sorted(staged[:enough])) if len(staged) >= enough else ())

    def may_go_on(self, worker: int, clocks: Mapping[int, int]) -> bool:
        """Return True: a worker waits for new weights alone."""
        return True

    def needs(self, workers: int) -> int:
        """Return the number of workers whose pushes make a version."""
        return self.pushes_per_step(workers)

    def pushes_per_step(self, workers: int) -> int:
        """Return one push for each worker but the backup; at least one."""
        return max(workers - self.backup, 1)

    def versions_per_step(self, workers: int) -> int:
        """Return 1."""
        return 1


@dataclass(frozen=True)
class CommitEach:
    """Asynchronous training: each push is a version, in the order in which pushes are complete.

    Args:
        lead: no worker begins a push while its clock is more than this ahead of the slowest's
            (stale synchronous parallel, Ho et al. 2013); None for no bound. A worker that has to
            wait finds its push committed all the same: it waits for new weights.
        drop_above: pushes of greater staleness are dropped; None to keep all.

    Reference: More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS
    2013.
    """

    lead: int | None = None
    drop_above: int | None = None
    needs_all = False
    same_version = False

    def decide(self, version: int, members: frozenset[int], staged: Sequence[Staged]) -> Verdict:
        """Commit the oldest push that is not too stale; drop the older ones."""
        if self.drop_above is None:
            return Verdict(tuple(staged[:1]))
        for index, push in enumerate(staged):
            if version - push.pulled <= self.drop_above:
                return Verdict((push,), tuple(staged[:index]))
        return Verdict((), tuple(staged))

    def may_go_on(self, worker: int, clocks: Mapping[int, int]) -> bool:
        """Return whether the worker is at most `lead` pushes ahead of the slowest."""
        return self.lead is None or clocks[worker] - min(clocks.values()) <= self.lead

    def needs(self, workers: int) -> int:
        """Return 1: any worker goes on by itself."""
        return 1

    def pushes_per_step(self, workers: int) -> int:
        """Return as many pushes as there are workers, whichever made them."""
        return workers

    def versions_per_step(self, workers: int) -> int:
        """Return as many versions as there are workers: each push is one."""
        return workers
