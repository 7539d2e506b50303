"""Commit rules: which staged pushes become the next version. Pure functions; the rule is the mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from steepest.messages.message import PushId


class Staged(NamedTuple):
    """A push that lies complete on every server: who, which life, its own count, the version it was made from."""

    worker: int
    incarnation: int
    sequence: int
    pulled: int

    @property
    def id(self) -> PushId:
        """What tells it from every other push."""
        return PushId(self.worker, self.incarnation, self.sequence)


class Decision(NamedTuple):
    """What becomes of staged pushes: those to commit as the next version, and those that never will be."""

    commit: tuple[Staged, ...] = ()
    drop: tuple[Staged, ...] = ()


class CommitRule(Protocol):
    """A mode of training, as decisions over plain values.

    A worker's *clock* is how many of its pushes were committed.
    """

    #: whether every member contributes to every version, so that servers may reduce as pushes
    #: arrive
    together: bool

    def decide(self, version: int, members: frozenset[int], staged: Sequence[Staged]) -> Decision:
        """What to do with the staged pushes (oldest first) at a version."""

    def may_go_on(self, worker: int, clocks: Mapping[int, int]) -> bool:
        """Whether a worker may begin its next push."""

    def needs(self, workers: int) -> int:
        """How many of them must be there for the others to go on."""

    def pushes_per_step(self, workers: int) -> int:
        """How many batches make one step."""

    def versions_per_step(self, workers: int) -> int:
        """How many updates make one step."""


@dataclass(frozen=True)
class CommitAll:
    """Synchronous: one push of every member."""

    together = True

    def decide(self, version: int, members: frozenset[int], staged: Sequence[Staged]) -> Decision:
        """All or nothing, in the order of the workers."""
        return (
            Decision(tuple(sorted(staged)))
            if {push.worker for push in staged} >= members
            else Decision()
        )

    def may_go_on(self, worker: int, clocks: Mapping[int, int]) -> bool:
        """New weights are all that a worker waits for."""
        return True

    def needs(self, workers: int) -> int:
        """All."""
        return workers

    def pushes_per_step(self, workers: int) -> int:
        """One of each worker."""
        return workers

    def versions_per_step(self, workers: int) -> int:
        """A step is an update."""
        return 1


@dataclass(frozen=True)
class CommitFirst:
    """Synchronous with backup workers: the first gradients of a version, all but `backup` (Chen et al. 2016).

    Reference: Revisiting Distributed Synchronous SGD, arXiv:1604.00981.
    """

    backup: int
    together = False

    def decide(self, version: int, members: frozenset[int], staged: Sequence[Staged]) -> Decision:
        """Those of this version as soon as they are enough; later ones are of older weights, and dropped."""
        drop = tuple(push for push in staged if push.pulled < version)
        fresh = [push for push in staged if push.pulled == version]
        enough = self.pushes_per_step(len(members))
        return Decision(tuple(sorted(fresh[:enough])) if len(fresh) >= enough else (), drop)

    def may_go_on(self, worker: int, clocks: Mapping[int, int]) -> bool:
        """New weights are all that a worker waits for."""
        return True

    def needs(self, workers: int) -> int:
        """As many as a step takes."""
        return self.pushes_per_step(workers)

    def pushes_per_step(self, workers: int) -> int:
        """All but the backup."""
        return max(workers - self.backup, 1)

    def versions_per_step(self, workers: int) -> int:
        """A step is an update."""
        return 1


@dataclass(frozen=True)
class CommitEach:
    """Asynchronous: every push by itself, in the order in which they are complete.

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
    together = False

    def decide(self, version: int, members: frozenset[int], staged: Sequence[Staged]) -> Decision:
        """The oldest that is not too stale."""
        if self.drop_above is None:
            return Decision(tuple(staged[:1]))
        for index, push in enumerate(staged):
            if version - push.pulled <= self.drop_above:
                return Decision((push,), tuple(staged[:index]))
        return Decision((), tuple(staged))

    def may_go_on(self, worker: int, clocks: Mapping[int, int]) -> bool:
        """Whether it is within the bound."""
        return self.lead is None or clocks[worker] - min(clocks.values()) <= self.lead

    def needs(self, workers: int) -> int:
        """Any."""
        return 1

    def pushes_per_step(self, workers: int) -> int:
        """As many as workers, of whichever."""
        return workers

    def versions_per_step(self, workers: int) -> int:
        """Each push is an update."""
        return workers
